"""Predicted values and returns of one row -> the loss of a critic head."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

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


def _error(
    value: Float[Array, " target"], target_return: Float[Array, " target"], weight: Float[Array, " target"]
) -> Float[Array, " target"]:
    counted = weight > 0
    return jnp.where(counted, value, 0) - jnp.where(counted, lax.stop_gradient(target_return), 0)
