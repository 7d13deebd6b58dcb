"""Log-probabilities, advantages and weights of one row -> the policy-gradient losses without a clipped gradient."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from harnessrl_jax.losses.sums import Sum, masked_log_ratio, weighted_sum


def reinforce(
    logp: Float[Array, " target"], advantage: Float[Array, " target"], weight: Float[Array, " target"]
) -> Sum:
    """Score-function policy-gradient loss of one row, for targets that the current policy sampled.

        L = -Σ_t w_t A_t logp_t

    Only `logp` carries a gradient; values of targets whose weight is 0 are never read. The value of the loss means
    nothing, its gradient does. For targets of another policy multiply the advantage by an importance weight
    (`truncated_importance`).

    Args:
      logp: log π_θ(target | its ancestors) in nats.
      advantage: credit A_t of each target.
      weight: share w_t of each target in the loss, at least 0; 0 is padding.

    Returns:
      The summed loss and the weight it covers.

    References:
      Williams 1992, https://doi.org/10.1007/BF00992696
    """
    credit = jnp.where(weight > 0, lax.stop_gradient(advantage), 0)
    return weighted_sum(-credit * logp, weight)


def cispo(
    logp: Float[Array, " target"],
    logp_behaviour: Float[Array, " target"],
    advantage: Float[Array, " target"],
    weight: Float[Array, " target"],
    *,
    clip_low: float,
    clip_high: float,
) -> Sum:
    """Policy-gradient loss of one row that clips the importance weight and keeps every token's gradient.

        L = -Σ_t w_t sg(clip(ρ_t, 1-ε_lo, 1+ε_hi)) A_t logp_t,   ρ_t = exp(logp_t - logp_behaviour_t)

    Unlike `clipped_surrogate` no token ever loses its gradient. Only `logp` carries one; values of targets whose
    weight is 0 are never read. The log-ratio is cut to ±20 nats before `exp`.

    Args:
      logp: log π_θ(target | its ancestors) in nats, at the current weights.
      logp_behaviour: the same quantity, as the sampler reported it when it drew the target.
      advantage: credit A_t of each target.
      weight: share w_t of each target in the loss, at least 0; 0 is padding.
      clip_low: ε_lo, in [0, 1]; 1 is no lower bound, as in the paper.
      clip_high: ε_hi, at least 0.

    Returns:
      The summed loss and the weight it covers.

    References:
      MiniMax 2025, eq. 4 and 5, https://arxiv.org/abs/2506.13585
    """
    ratio = jnp.exp(masked_log_ratio(logp, logp_behaviour, weight > 0))
    importance = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    # A factor of the advantage carries no gradient.
    return reinforce(logp, importance * advantage, weight)
