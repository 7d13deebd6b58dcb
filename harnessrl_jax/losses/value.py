"""Predicted values and returns of one row -> the loss of a critic head."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from harnessrl_jax.losses.sums import Sum, weighted_sum


def value_loss(
    value: Float[Array, " target"], target_return: Float[Array, " target"], weight: Float[Array, " target"]
) -> Sum:
    """Squared error of a critic head on one row.

        L = ½ Σ_t w_t (V_t - G_t)²

    This is also the warm start: with Monte-Carlo returns and the policy held fixed, train the head alone on it before
    its values enter any advantage. Only `value` carries a gradient; values of targets whose weight is 0 are never read.

    Args:
      value: V_t, the critic's prediction before each target, in units of reward.
      target_return: G_t, what it should predict.
      weight: share w_t of each target in the loss, at least 0; 0 is padding.

    Returns:
      The summed loss and the weight it covers.
    """
    return weighted_sum(0.5 * _error(value, target_return, weight) ** 2, weight)


def clipped_value_loss(
    value: Float[Array, " target"],
    value_behaviour: Float[Array, " target"],
    target_return: Float[Array, " target"],
    weight: Float[Array, " target"],
    *,
    clip: float,
) -> Sum:
    """`value_loss` that does not reward moving the prediction further than `clip` from its value at collection time.

        L = ½ Σ_t w_t max((V_t - G_t)², (V_old,t + clip(V_t - V_old,t, -ε, ε) - G_t)²)

    Only `value` carries a gradient; values of targets whose weight is 0 are never read.

    Args:
      value: V_t, the critic's prediction before each target, in units of reward.
      value_behaviour: V_old, its prediction when the returns were computed.
      target_return: G_t, what it should predict.
      weight: share w_t of each target in the loss, at least 0; 0 is padding.
      clip: ε, at least 0, in units of reward.

    Returns:
      The summed loss and the weight it covers.

    References:
      OpenAI Baselines `ppo2`; Andrychowicz et al. 2021, https://arxiv.org/abs/2006.05990
    """
    old = jnp.where(weight > 0, lax.stop_gradient(value_behaviour), 0)
    moved = jnp.clip(jnp.where(weight > 0, value, 0) - old, -clip, clip)
    plain, held = _error(value, target_return, weight), _error(old + moved, target_return, weight)
    return weighted_sum(0.5 * jnp.maximum(plain**2, held**2), weight)


class ValueMoments(NamedTuple):
    """Weighted sums of returns G and of errors V - G. Add them freely."""

    weight: Float[Array, "..."]
    g: Float[Array, "..."]
    gg: Float[Array, "..."]
    error: Float[Array, "..."]
    error_squared: Float[Array, "..."]

    def explained_variance(self) -> tuple[Float[Array, "..."], Bool[Array, "..."]]:
        """1 - Var(V - G) / Var(G), at most 1, and whether it is defined: 1 is a perfect critic, 0 a constant one.

        It is not defined, and 0, where the returns are constant to rounding.
        """
        weight = jnp.where(self.weight > 0, self.weight, 1)
        g, gg, error, squared = (each / weight for each in self[1:])
        spread = gg - g * g
        valid = (self.weight > 0) & (spread > 16 * jnp.finfo(gg.dtype).eps * gg)
        return jnp.where(valid, 1 - (squared - error * error) / jnp.where(valid, spread, 1), 0), valid


def value_moments(
    value: Float[Array, " target"], target_return: Float[Array, " target"], weight: Float[Array, " target"]
) -> ValueMoments:
    """Sums over the targets of one row, without gradient.

    Args:
      value: V_t, the critic's prediction before each target, in units of reward.
      target_return: G_t, what it should predict.
      weight: how much each target counts; where it is 0 nothing is read.
    """
    error = lax.stop_gradient(_error(value, target_return, weight))
    g = lax.stop_gradient(jnp.where(weight > 0, target_return, 0))
    return ValueMoments(weight.sum(), *((weight * each).sum() for each in (g, g * g, error, error * error)))


def _error(
    value: Float[Array, " target"], target_return: Float[Array, " target"], weight: Float[Array, " target"]
) -> Float[Array, " target"]:
    counted = weight > 0
    return jnp.where(counted, value, 0) - jnp.where(counted, lax.stop_gradient(target_return), 0)
