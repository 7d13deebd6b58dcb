"""Activations at the slots that predict a role's tokens -> additive statistics of the units, per role."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from harnessrl_jax.capo.roles import ACTION, ARGS, any_of, number_of_owners
from harnessrl_jax.models import Activation, ExpertUnits


class Statistic(NamedTuple):
    """What the probe averages: φ of one activation of every layer. Must not be negative."""

    reads: Activation
    """For `models.Decoder`, what the row function should collect."""
    phi: Callable[[Float[Array, "target channel"]], Float[Array, "target unit"]]
    layers_are_units: bool = False
    """True where a layer is one unit: the layers' values become the units of one layer."""


class Probe(NamedTuple):
    """Sums, so that any split of the targets over rows, devices and batches adds to the same statistic."""

    total: Float[Array, "role layer unit"]
    """S: sum of φ(activation) over the probed targets of the role. float32."""
    tokens: Float[Array, "role layer unit"]
    """n: over how many targets; differs between units only where an expert saw some of the targets."""
    dropped: Float[Array, ""]
    """Targets left out because an activation was not finite."""

    def mean(self) -> Float[Array, "role layer unit"]:
        """The statistic s = S / n; 0 where nothing was seen."""
        return self.total / jnp.maximum(self.tokens, 1)


RELU = Statistic("hidden", lambda hidden: jnp.maximum(hidden, 0))
"""Mean positive activation of an MLP neuron."""
UP_RELU = Statistic("up", lambda up: jnp.maximum(up, 0))
"""Mean positive part of the up projection alone, as in a public re-implementation of the paper."""
ABSOLUTE = Statistic("hidden", jnp.abs)
"""Mean magnitude, for neurons that also matter when negative."""
FIRE = Statistic("gate", lambda gate: (gate > 0).astype(gate.dtype))
"""How often a neuron's gate is open, as in LAPE (Tang et al. 2024, https://arxiv.org/abs/2402.16438)."""
POSITIVE_SHARE = Statistic("residual", lambda x: (x > 0).mean(axis=-1, keepdims=True, dtype=x.dtype), True)
"""For whole layers: the share of positive entries of the layer's output."""


def head_norm(kv_heads: int) -> Statistic:
    """For attention heads: the norm of what a key-value head's queries hand to the output projection."""

    def norms(heads: Float[Array, "target channel"]) -> Float[Array, "target unit"]:
        grouped = heads.reshape(len(heads), kv_heads, -1)
        return jnp.sqrt((grouped * grouped).sum(axis=-1))

    return Statistic("heads", norms)


def probe_targets(
    role: Int[Array, "row target"], rollout: Int[Array, "row target"], success: Bool[Array, "row target"]
) -> tuple[Bool[Array, "row target"], Int[Array, ""]]:
    """The targets that the probe reads: those of successful rollouts that hold both roles.

    Args:
      role: ACTION, ARGS or anything else (not probed), from `gradient_roles`.
      rollout: number of the target's rollout.
      success: True where the rollout's outcome was positive.

    Returns:
      The targets to probe, and of how many rollouts they are.
    """
    action, args = success & (role == ACTION), success & (role == ARGS)
    probed = (action | args) & any_of(rollout, action) & any_of(rollout, args)
    return probed, number_of_owners(rollout, probed)


def probe_row(
    units: Sequence[Float[Array, "target channel"] | ExpertUnits],
    role: Int[Array, " target"],
    probed: Bool[Array, " target"],
    *,
    statistic: Statistic,
) -> Probe:
    """Statistics of one row.

        S_r[l, j] = Σ_t m^r_t φ(h^l_t[j]),   n_r = Σ_t m^r_t

    Args:
      units: per layer, activations h at the slot that *predicts* each target, never at the target's own slot; for
        experts, the sums run over the targets that each expert saw, and others are never read.
      role: ACTION or ARGS where `probed`.
      probed: which targets count (`probe_targets`). Activations of the others are never read.
      statistic: what to average.

    A target with a non-finite activation in any layer is left out and counted: a whole row is not, because which
    targets share a row is an accident of packing.
    """
    layers = [_activation(layer) for layer in units]
    finite = jnp.stack([(jnp.isfinite(layer) | ~seen).all(axis=-1) for layer, seen in layers]).all(axis=0)
    used = probed & finite
    member = (jnp.stack([role == ACTION, role == ARGS]) & used[None, :]).astype(jnp.float32)

    def sums(layer: Array, seen: Array) -> tuple[Array, Array]:
        read = used[:, None] & seen
        value = jnp.where(read, statistic.phi(jnp.where(read, layer, 0)), 0)
        total = jnp.matmul(member, value, precision="highest")
        return total, jnp.broadcast_to(jnp.matmul(member, read.astype(jnp.float32)), total.shape)

    parts = [jnp.stack(part, axis=1) for part in zip(*(sums(*layer) for layer in layers), strict=True)]
    if statistic.layers_are_units:
        parts = [part.swapaxes(1, 2) for part in parts]
    return Probe(*parts, (probed & ~finite).sum(dtype=jnp.float32))


def _activation(layer: Array | ExpertUnits) -> tuple[Float[Array, "target unit"], Bool[Array, "target unit"]]:
    """The values, and which of them exist; the latter may have size 1 along the units."""
    if not isinstance(layer, ExpertUnits):
        return lax.stop_gradient(layer).astype(jnp.float32), jnp.ones((len(layer), 1), bool)
    values = lax.stop_gradient(layer.activation).astype(jnp.float32)
    seen = jnp.broadcast_to(layer.routed[:, :, None], values.shape)
    return values.reshape(len(values), -1), seen.reshape(len(values), -1)
