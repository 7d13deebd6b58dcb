"""Where a sampler's weights and states lie: on one device, or over a mesh by the rules that training splits by."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from harnessrl_jax.training import DECODER_RULES, parameter_specs

CACHE_AXES = 4  # slot, key-value head, length, dimension of the head: what only keys and values have


class Placement(NamedTuple):
    """Shardings of trees of arrays, or of their shapes.

    Attributes:
      weights: of parameters.
      states: of decoding states, prefixes and kept chunks.
      spread: whether there are several devices, so that results have to be put back where they belong.
    """

    weights: Callable[[Any], Any]
    states: Callable[[Any], Any]
    spread: bool

    def settle(self, tree: Any) -> Any:
        """The tree where it belongs. The compiler lays results as it likes, and each new layout would compile anew."""
        return jax.device_put(tree, self.states(tree)) if self.spread else tree


def on_device(device: Any = None) -> Placement:
    """Everything on one device; the first if None."""
    sharding = SingleDeviceSharding(device or jax.devices()[0])
    return Placement(lambda tree: sharding, lambda tree: jax.tree.map(lambda _: sharding, tree), spread=False)


def over_mesh(mesh: Mesh) -> Placement:
    """Weights by `DECODER_RULES`; keys and values by their heads over `tensor` where these divide; the rest everywhere.

    Args:
      mesh: with axes as from `training.make_mesh`.
    """

    def state(leaf: Any) -> NamedSharding:
        split = leaf.ndim == CACHE_AXES and leaf.shape[1] % mesh.shape["tensor"] == 0
        return NamedSharding(mesh, PartitionSpec(None, "tensor") if split else PartitionSpec())

    def weights(params: Any) -> Any:
        is_spec = lambda leaf: isinstance(leaf, PartitionSpec)
        specs = parameter_specs(params, mesh, DECODER_RULES)
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)

    return Placement(weights, lambda tree: jax.tree.map(state, tree), spread=True)
