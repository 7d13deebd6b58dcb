"""What a Flax model of anybody's shows of its units, by name -> activations and statistics of every layer."""

import dataclasses
import difflib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from harnessrl_jax.capo.probe import Probe, Statistic, probe_row
from harnessrl_jax.capo.units import UnitMap, Whole, leaf_name
from harnessrl_jax.errors import PartitionError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attachment:
    """One family of units of a model: the activations that show them, and the parameters that they own."""

    reads: tuple[str, ...]
    """Names of captured activations, where `{layer}` stands for the layer's number: the path of the module and the
    name given to `sow`, or the path and the method whose output is captured ("layers_{layer}/mlp/up/__call__")."""
    combine: Callable[..., Float[Array, "... channel"]] | None = None
    """One array for each name of `reads` -> what the statistic reads; None where `reads` is a single name."""
    statistic: Statistic
    """What the probe averages; its `reads` is for `models.Decoder` only."""
    unit_map: UnitMap

    def __post_init__(self):
        if self.combine is None and len(self.reads) != 1:
            raise PartitionError(
                f"CAPO attachment: reads {len(self.reads)} activations ({', '.join(self.reads)}) and has no `combine`; "
                "give a function of that many arrays, or read one activation"
            )

    def check(self, params: PyTree, shown: PyTree) -> int:
        """Compares the attachment with a model: run once, before training. Arrays or their shapes will do.

        Args:
          params: the parameters: a dict, an `nnx.State`, any pytree.
          shown: what the model captured, as `activations` reads it.

        Returns:
          The number of units of a layer.

        Raises:
          PartitionError: the map does not fit the parameters, an activation is missing, or the statistic gives another
            number of units than the parameters hold.
        """
        units = self.unit_map.units(params)
        layers = jax.eval_shape(self.activations, shown)
        wanted = 1 if self.statistic.layers_are_units else units
        for layer, activation in enumerate(layers):
            flat = jax.ShapeDtypeStruct((1, activation.shape[-1]), activation.dtype)
            found = jax.eval_shape(self.statistic.phi, flat).shape[-1]
            if found != wanted:
                raise PartitionError(self._disagreement(layer, activation.shape, found, wanted, params))
        return units

    def activations(self, shown: PyTree) -> tuple[Float[Array, "... channel"], ...]:
        """What the statistic reads, one array a layer.

        Args:
          shown: for linen, `variables["intermediates"]` of `apply(..., mutable=["intermediates"])`; for nnx, the state
            that `nnx.capture` returns.

        Raises:
          PartitionError: a name that was not captured, or captured more than once.
        """
        named = _by_name(shown)
        combine = self.combine or (lambda activation: activation)
        return tuple(
            combine(*(_found(named, name.replace("{layer}", str(layer)), layer) for name in self.reads))
            for layer in range(self._layers())
        )

    def probe(
        self,
        shown: PyTree,
        source: Int[Array, "row target"],
        role: Int[Array, "row target"],
        probed: Bool[Array, "row target"],
    ) -> Probe:
        """Statistics of a batch, to be added up over batches; see `probe_row`.

        Args:
          shown: as `activations` reads it, every activation [row, slot, channel].
          source: the slot that *predicts* each target: one before its own, where a row is one sequence.
          role: ACTION or ARGS where `probed` (`gradient_roles`).
          probed: which targets count (`probe_targets`).
        """
        at_source = [jnp.take_along_axis(layer, source[:, :, None], axis=1) for layer in self.activations(shown)]
        each = jax.vmap(partial(probe_row, statistic=self.statistic))(at_source, role, probed)
        return jax.tree.map(lambda leaf: leaf.sum(axis=0), each)

    def _layers(self) -> int:
        """How many layers are read: where layers are the units, the map has one layer that holds all of them."""
        first = self.unit_map.slices[0]
        return first.of if self.statistic.layers_are_units and isinstance(first, Whole) else self.unit_map.layers

    def _disagreement(self, layer: int, shape: tuple[int, ...], found: int, wanted: int, params: PyTree) -> str:
        names = ", ".join(name.replace("{layer}", str(layer)) for name in self.reads)
        shapes = {leaf_name(path): list(leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
        mine = [path for at, path, _ in self.unit_map.owned() if at == layer or self.unit_map.layers == 1]
        owned = ", ".join(f"{path} {shapes[path]}" for path in mine[:3])
        return (
            f"CAPO attachment: layer {layer} reads {names} {list(shape)}, of which the statistic makes {found} units, "
            f"but the map wants {wanted}, owners of {owned}; name the activation that belongs to these parameters, or "
            "correct their axes and widths"
        )


def _by_name(tree: PyTree) -> dict[str, Any]:
    """Leaves by name, without the boxes that Flax puts around arrays."""
    boxed = jax.tree_util.GetAttrKey("value")
    return {
        jax.tree_util.keystr(tuple(key for key in path if key != boxed), simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _found(named: dict[str, Any], name: str, layer: int) -> Any:
    """The activation of that name; one that `sow` put alone into a tuple needs no number."""
    if name in named:
        return named[name]
    if f"{name}/1" in named:
        times = [list(leaf.shape) for other, leaf in named.items() if other.rsplit("/", 1)[0] == name]
        raise PartitionError(
            f"CAPO attachment: layer {layer} reads {name!r}, which was captured {len(times)} times, with shapes "
            f"{', '.join(map(str, times))}; name one of them, as in '{name}/0', or call the module once"
        )
    if f"{name}/0" in named:
        return named[f"{name}/0"]
    near = difflib.get_close_matches(name, named, 1, cutoff=0)
    hint = f"the nearest is {near[0]!r} {list(named[near[0]].shape)}; " if near else "nothing was captured; "
    raise PartitionError(
        f"CAPO attachment: layer {layer} reads {name!r}, which the model did not capture; {hint}correct the name, or "
        "`sow` the activation under it"
    )
