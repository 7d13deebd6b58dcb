"""Unit activations at the slots that predict a role's tokens -> additive statistics of the units, per role."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from harnessrl_jax.capo.roles import ACTION, ARGS, any_of, number_of_owners

Phi = Callable[[Float[Array, "target unit"]], Float[Array, "target unit"]]


class Probe(NamedTuple):
    """Sums, so that any split of the targets over rows, devices and batches adds to the same statistic."""

    total: Float[Array, "role layer unit"]
    """S: sum of φ(activation) over the probed targets of the role. float32."""
    tokens: Float[Array, " role"]
    """n: how many targets were summed."""
    dropped: Float[Array, ""]
    """Targets left out because an activation was not finite."""


def relu(activation: Float[Array, "target unit"]) -> Float[Array, "target unit"]:
    """φ: positive part; the statistic is then the mean positive activation."""
    return jnp.maximum(activation, 0)


def absolute(activation: Float[Array, "target unit"]) -> Float[Array, "target unit"]:
    """φ: magnitude, for units that also matter when negative."""
    return jnp.abs(activation)


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
    units: Sequence[Float[Array, "target unit"]],
    role: Int[Array, " target"],
    probed: Bool[Array, " target"],
    *,
    phi: Phi,
) -> Probe:
    """Statistics of one row.

        S_r[l, j] = Σ_t m^r_t φ(h^l_t[j]),   n_r = Σ_t m^r_t

    Args:
      units: per layer, activations h at the slot that *predicts* each target, never at the target's own slot.
      role: ACTION or ARGS where `probed`.
      probed: which targets count (`probe_targets`). Activations of the others are never read.
      phi: what to average, `relu` or `absolute`.

    A target with a non-finite activation in any layer is left out and counted: a whole row is not, because which
    targets share a row is an accident of packing.
    """
    values = [lax.stop_gradient(layer).astype(jnp.float32) for layer in units]
    finite = jnp.stack([jnp.isfinite(layer).all(axis=-1) for layer in values]).all(axis=0)
    used = probed & finite
    member = (jnp.stack([role == ACTION, role == ARGS]) & used[None, :]).astype(jnp.float32)
    sums = [jnp.matmul(member, jnp.where(used[:, None], phi(layer), 0), precision="highest") for layer in values]
    return Probe(jnp.stack(sums, axis=1), member.sum(axis=-1), (probed & ~finite).sum(dtype=jnp.float32))
