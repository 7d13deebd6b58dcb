"""A declarative map "which slices of which parameters does unit j of layer l own" -> masks and products per unit."""

import dataclasses
import difflib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from harnessrl_jax.errors import PartitionError


@dataclasses.dataclass(frozen=True)
class UnitSlice:
    """One parameter of which unit j owns the slice `take(j, axis)`."""

    path: str
    """Keys of the parameter joined with "/", where `{layer}` stands for the layer's number."""
    axis: int
    """The axis along which the units lie, counted from the front."""


@dataclasses.dataclass(frozen=True)
class UnitMap:
    """A family of units: in each of `layers` layers, unit j owns slice j of every entry of `slices`.

    Parameters that no slice names are *ungated*. The map knows paths only, so it fits every model whose parameters are
    a pytree of arrays.
    """

    layers: int
    slices: tuple[UnitSlice, ...]

    def owned(self) -> Iterator[tuple[int, str, int]]:
        """(layer, path, axis) of every owned parameter."""
        for layer in range(self.layers):
            for part in self.slices:
                yield layer, part.path.replace("{layer}", str(layer)), part.axis

    def units(self, params: PyTree) -> int:
        """Compares the map with the parameters (arrays or their shapes).

        Returns:
          The number of units of a layer.

        Raises:
          PartitionError: a path or axis that the parameters lack, a parameter named twice, or sizes that disagree.
        """
        shapes = {leaf_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
        seen: dict[str, int] = {}
        for layer, path, axis in self.owned():
            seen[path] = _size(layer, path, axis, shapes, seen)
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


def _size(layer: int, path: str, axis: int, shapes: dict[str, tuple[int, ...]], seen: dict[str, int]) -> int:
    where = f"CAPO unit map: layer {layer} owns {path!r}, axis {axis}"
    if path not in shapes:
        near = difflib.get_close_matches(path, shapes, 1)
        hint = f"the nearest is {near[0]!r} {list(shapes[near[0]])}; " if near else ""
        raise PartitionError(f"{where}, but the parameters have no such path; {hint}correct the map's path")
    shape = shapes[path]
    if not 0 <= axis < len(shape):
        raise PartitionError(
            f"{where}, but its shape is {list(shape)}; wanted 0 to {len(shape) - 1}; correct the map's axis"
        )
    if path in seen:
        raise PartitionError(f"{where}, which the map names twice; put {{layer}} into the path or remove one entry")
    return shape[axis]


def decoder_units(layers: int, *, include_gate: bool) -> UnitMap:
    """The MLP neurons of `models.Decoder`: columns of `gate` and `up`, rows of `down` (kernels are stored [in, out]).

    Args:
      layers: number of decoder layers.
      include_gate: whether a neuron owns its gate column too; False leaves the gate ungated.
    """
    columns = ("gate", "up") if include_gate else ("up",)
    slices = [UnitSlice(f"layers_{{layer}}/mlp/{name}/kernel", 1) for name in columns]
    return UnitMap(layers, (*slices, UnitSlice("layers_{layer}/mlp/down/kernel", 0)))


def leaf_name(path: tuple[Any, ...]) -> str:
    """The name of a leaf in a pytree, as in "layers_0/mlp/up/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def expand(
    unit_map: UnitMap, params: PyTree, units: Bool[Array, "layer unit"], rest: Bool[Array, ""]
) -> PyTree[Bool[Array, "..."]]:
    """A mask of units as one array a parameter, of the parameter's rank, size 1 along all axes but the units'.

    Args:
      unit_map: which slices the units own; must fit `params` (`UnitMap.units`).
      params: the parameters, for their structure and ranks.
      units: the mask.
      rest: the value for ungated parameters.
    """
    owner = {path: (layer, axis) for layer, path, axis in unit_map.owned()}

    def mask(path: tuple[Any, ...], leaf: Array) -> Bool[Array, "..."]:
        layer, axis = owner.get(leaf_name(path), (None, None))
        if layer is None:
            return jnp.reshape(rest, (1,) * leaf.ndim)
        return jnp.reshape(units[layer], tuple(-1 if i == axis else 1 for i in range(leaf.ndim)))

    return jax.tree_util.tree_map_with_path(mask, params)


def unit_products(
    unit_map: UnitMap, gradients: PyTree
) -> tuple[Float[Array, "role role layer unit"], Float[Array, "role role"]]:
    """Inner products of the role gradients with each other, in float32 at least.

    Args:
      unit_map: which slices the units own; must fit the gradients.
      gradients: parameter-like, with a leading role axis on every leaf.

    Returns:
      The products over what each unit owns, and over all ungated parameters.
    """
    owner = {path: (layer, axis) for layer, path, axis in unit_map.owned()}
    units: list[Any] = [jnp.zeros(())] * unit_map.layers
    rest: Any = jnp.zeros((1, 1))
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
        products = wide[:, None] * wide[None]  # fused into the sum below, never stored
        layer, axis = owner.get(leaf_name(path), (None, None))
        summed = products.sum(axis=tuple(i + 2 for i in range(leaf.ndim - 1) if i != axis))
        if layer is None:
            rest = rest + summed
        else:
            units[layer] = units[layer] + summed
    return jnp.stack(units, axis=2), rest
