"""A declarative map "which slices of which parameters does unit j of layer l own" -> masks and products per unit."""

import dataclasses
import difflib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree, Shaped

from harnessrl_jax.errors import PartitionError

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class UnitSlice:
    """One parameter, and which of its entries each unit owns: `width` neighbours along `axis`."""

    path: str
    """Keys of the parameter joined with "/", where `{layer}` stands for the layer's number."""
    axis: int
    """The axis along which the units lie, counted from the front."""
    _: dataclasses.KW_ONLY
    width: int = 1
    """Unit j owns the indices j · width to (j + 1) · width - 1: the channels of an attention head, for instance."""
    expert_axis: int | None = None
    """The axis of the experts of a mixture; unit e · (size of `axis` / width) + j is unit j of expert e."""

    def units(self, shape: Shape) -> int:
        """How many units the parameter holds."""
        return shape[self.axis] // self.width * (1 if self.expert_axis is None else shape[self.expert_axis])

    def axes(self) -> tuple[int, ...]:
        """The axes along which units differ, in the order in which a unit's number counts them."""
        return (self.axis,) if self.expert_axis is None else (self.expert_axis, self.axis)

    def mask(self, units: Shaped[Array, " unit"], shape: Shape) -> Shaped[Array, "..."]:
        """One value a unit -> an array that broadcasts to the parameter."""
        axes = self.axes()
        by_axis = jnp.repeat(units, self.width).reshape([shape[axis] for axis in axes])
        if axes != tuple(sorted(axes)):
            by_axis = by_axis.T
        return by_axis.reshape([size if axis in axes else 1 for axis, size in enumerate(shape)])

    def sums(self, values: Float[Array, "..."], leading: int) -> Float[Array, "*leading unit"]:
        """Sums, over what each unit owns, of an array with `leading` more axes in front of the parameter's."""
        axes = [axis + leading for axis in self.axes()]
        summed = values.sum(axis=tuple(i for i in range(leading, values.ndim) if i not in axes))
        if axes != sorted(axes):
            summed = summed.swapaxes(-1, -2)
        return summed.reshape(*values.shape[:leading], -1, self.width).sum(axis=-1)

    def problem(self, shape: Shape) -> str:
        """Why the slice does not fit a parameter of this shape; empty if it does."""
        for axis in self.axes():
            if not 0 <= axis < len(shape):
                return (
                    f"axis {axis}, but its shape is {list(shape)}; wanted 0 to {len(shape) - 1}; correct the map's axis"
                )
        if len(set(self.axes())) < len(self.axes()):
            return f"axis {self.axis} for units and for experts; give two axes"
        if shape[self.axis] % self.width:
            return f"axis {self.axis}, whose {shape[self.axis]} entries are not a multiple of the width {self.width}"
        return ""


@dataclasses.dataclass(frozen=True)
class Whole:
    """One parameter that a single unit owns as a whole: a layer's, or that of an adapter."""

    path: str
    """As in `UnitSlice`."""
    unit: int
    """Number of the owner."""
    of: int
    """How many units there are."""

    def units(self, shape: Shape) -> int:
        """How many units there are."""
        return self.of

    def mask(self, units: Shaped[Array, " unit"], shape: Shape) -> Shaped[Array, "..."]:
        """One value a unit -> an array that broadcasts to the parameter."""
        return units[self.unit].reshape((1,) * len(shape))

    def sums(self, values: Float[Array, "..."], leading: int) -> Float[Array, "*leading unit"]:
        """The sum of an array with `leading` more axes in front of the parameter's, at the owner; 0 elsewhere."""
        whole = values.sum(axis=tuple(range(leading, values.ndim)))
        return jnp.where(jnp.arange(self.of) == self.unit, jnp.expand_dims(whole, -1), 0)

    def problem(self, shape: Shape) -> str:
        """Why the entry does not fit a parameter of this shape; empty if it does."""
        return "" if 0 <= self.unit < self.of else f"unit {self.unit}, but there are {self.of}; correct the number"


@dataclasses.dataclass(frozen=True)
class UnitMap:
    """A family of units: in each of `layers` layers, unit j owns its part of every entry of `slices`.

    Parameters that no entry names are *ungated*. The map knows paths only, so it fits every model whose parameters are
    a pytree of arrays.
    """

    layers: int
    slices: tuple[UnitSlice | Whole, ...]

    def owned(self) -> Iterator[tuple[int, str, UnitSlice | Whole]]:
        """(layer, path, entry) of every owned parameter."""
        for layer in range(self.layers):
            for entry in self.slices:
                yield layer, entry.path.replace("{layer}", str(layer)), entry

    def owners(self) -> dict[str, tuple[int, UnitSlice | Whole]]:
        """The layer and entry of every owned path."""
        return {path: (layer, entry) for layer, path, entry in self.owned()}

    def units(self, params: PyTree) -> int:
        """Compares the map with the parameters (arrays or their shapes).

        Returns:
          The number of units of a layer.

        Raises:
          PartitionError: a path or axis that the parameters lack, a parameter named twice, or sizes that disagree.
        """
        shapes = {leaf_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
        seen: dict[str, int] = {}
        for layer, path, entry in self.owned():
            seen[path] = _size(layer, path, entry, shapes, seen)
        if not seen:
            raise PartitionError(
                f"CAPO unit map: names no parameter ({self.layers} layers, {len(self.slices)} slices a layer); "
                "give at least one layer and one slice"
            )
        if len(set(seen.values())) > 1:
            found = ", ".join(f"{path} {list(shapes[path])} has {size}" for path, size in seen.items())
            raise PartitionError(
                f"CAPO unit map: every slice must hold the same number of units, but {found}; correct the axes"
            )
        return next(iter(seen.values()))


def _size(layer: int, path: str, entry: UnitSlice | Whole, shapes: dict[str, Shape], seen: dict[str, int]) -> int:
    where = f"CAPO unit map: layer {layer} owns {path!r}"
    if path not in shapes:
        near = difflib.get_close_matches(path, shapes, 1)
        hint = f"the nearest is {near[0]!r} {list(shapes[near[0]])}; " if near else ""
        raise PartitionError(f"{where}, but the parameters have no such path; {hint}correct the map's path")
    if problem := entry.problem(shapes[path]):
        raise PartitionError(f"{where}, {problem}")
    if path in seen:
        raise PartitionError(f"{where}, which the map names twice; put {{layer}} into the path or remove one entry")
    return entry.units(shapes[path])


def leaf_name(path: tuple[Any, ...]) -> str:
    """The name of a leaf in a pytree, as in "layers_0/mlp/up/kernel".

    A box that Flax puts around the array (`nnx.Variable`, `nn.Partitioned`) is no part of it.
    """
    boxed = path[-1:] == (jax.tree_util.GetAttrKey("value"),)
    return jax.tree_util.keystr(path[:-1] if boxed else path, simple=True, separator="/")


def expand(
    unit_map: UnitMap, params: PyTree, units: Shaped[Array, "layer unit"], rest: Shaped[Array, ""]
) -> PyTree[Shaped[Array, "..."]]:
    """One value a unit (a mask, a factor) as one array a parameter that broadcasts to it.

    Args:
      unit_map: which entries the units own; must fit `params` (`UnitMap.units`).
      params: the parameters, for their structure and shapes.
      units: the values.
      rest: the value for ungated parameters.
    """
    owners = unit_map.owners()

    def spread(path: tuple[Any, ...], leaf: Array) -> Shaped[Array, "..."]:
        layer, entry = owners.get(leaf_name(path), (0, None))
        return jnp.reshape(rest, (1,) * leaf.ndim) if entry is None else entry.mask(units[layer], leaf.shape)

    return jax.tree_util.tree_map_with_path(spread, params)


def unit_products(
    unit_map: UnitMap, gradients: PyTree
) -> tuple[Float[Array, "role role layer unit"], Float[Array, "role role"]]:
    """Inner products of the role gradients with each other, in float32 at least.

    Args:
      unit_map: which entries the units own; must fit the gradients.
      gradients: parameter-like, with a leading role axis on every leaf.

    Returns:
      The products over what each unit owns, and over all ungated parameters.
    """
    owners = unit_map.owners()
    units: list[Any] = [jnp.zeros(())] * unit_map.layers
    rest: Any = jnp.zeros((1, 1))
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
        products = wide[:, None] * wide[None]  # fused into the sum below, never stored
        layer, entry = owners.get(leaf_name(path), (0, None))
        if entry is None:
            rest = rest + products.sum(axis=tuple(range(2, products.ndim)))
        else:
            units[layer] = units[layer] + entry.sums(products, 2)
    return jnp.stack(units, axis=2), rest
