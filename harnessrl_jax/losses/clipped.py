"""Log-probabilities, advantages and weights of one row -> the clipped policy-gradient losses and ratio statistics."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from harnessrl_jax.errors import LossError
from harnessrl_jax.losses.sums import Sum, masked_log_ratio, weighted_sum


def clipped_surrogate(
    logp: Float[Array, " target"],
    logp_behaviour: Float[Array, " target"],
    advantage: Float[Array, " target"],
    weight: Float[Array, " target"],
    *,
    clip_low: float,
    clip_high: float,
) -> Sum:
    """Clipped-ratio policy-gradient loss of one packed row.

        L = -Σ_t w_t min(ρ_t A_t, clip(ρ_t, 1-ε_lo, 1+ε_hi) A_t)
        ρ_t = exp(logp_t - logp_behaviour_t)

    Only `logp` carries a gradient. Values of targets whose weight is 0 are never read, so they may be anything, NaN
    included. The log-ratio is cut to ±20 nats before `exp`.

    Args:
      logp: log π_θ(target | its ancestors) in nats, at the current weights.
      logp_behaviour: the same quantity, as the sampler reported it when it drew the target.
      advantage: credit A_t of each target, already normalised.
      weight: share w_t of each target in the loss, at least 0; 0 is padding.
      clip_low: ε_lo, in [0, 1).
      clip_high: ε_hi, at least 0.

    Returns:
      The summed loss and the weight it covers.

    References:
      Schulman et al. 2017, eq. 7, https://arxiv.org/abs/1707.06347; separate bounds: Yu et al. 2025,
      https://arxiv.org/abs/2503.14476
    """
    counted = weight > 0
    ratio = jnp.exp(masked_log_ratio(logp, lax.stop_gradient(logp_behaviour), counted))
    credit = jnp.where(counted, lax.stop_gradient(advantage), 0)
    return weighted_sum(-clipped_gain(ratio, credit, clip_low=clip_low, clip_high=clip_high), weight)


def dual_clipped_surrogate(
    logp: Float[Array, " target"],
    logp_behaviour: Float[Array, " target"],
    advantage: Float[Array, " target"],
    weight: Float[Array, " target"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> Sum:
    """`clipped_surrogate` whose gain is bounded from below where the advantage is negative.

        L = -Σ_t w_t (max(C_t, c A_t) if A_t < 0 else C_t),   C_t = min(ρ_t A_t, clip(ρ_t, 1-ε_lo, 1+ε_hi) A_t)

    The plain clip leaves ρ A unbounded for A < 0: a token that became far more likely can dominate a batch. Above
    ρ = c its loss is the constant -c A and its gradient 0.

    Args:
      logp: as in `clipped_surrogate`, like the arguments that follow.
      logp_behaviour: of the sampler.
      advantage: credit.
      weight: share in the loss.
      clip_low: ε_lo, in [0, 1).
      clip_high: ε_hi, at least 0.
      dual_clip: c, above 1 + ε_hi to act only where the plain clip does not; 3 in the paper.

    Returns:
      The summed loss and the weight it covers.

    Raises:
      LossError: `dual_clip` is not above 1, where it would turn the loss of on-policy targets off.

    References:
      Ye et al. 2020, https://arxiv.org/abs/1912.09729
    """
    if dual_clip <= 1:
        raise LossError(f"dual_clipped_surrogate: dual_clip must be above 1, got {dual_clip}; the usual value is 3.")
    counted = weight > 0
    ratio = jnp.exp(masked_log_ratio(logp, lax.stop_gradient(logp_behaviour), counted))
    credit = jnp.where(counted, lax.stop_gradient(advantage), 0)
    gain = clipped_gain(ratio, credit, clip_low=clip_low, clip_high=clip_high)
    return weighted_sum(-jnp.where(credit < 0, jnp.maximum(gain, dual_clip * credit), gain), weight)


def clipped_gain(
    ratio: Float[Array, " target"], credit: Float[Array, " target"], *, clip_low: float, clip_high: float
) -> Float[Array, " target"]:
    """min(ρ A, clip(ρ, 1-ε_lo, 1+ε_hi) A) of each target; both must be finite, padding included."""
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    return jnp.minimum(ratio * credit, clipped * credit)


class RatioTerms(NamedTuple):
    """How far the current policy is from the one that sampled, target by target; 0 where the weight is 0."""

    ratio: Float[Array, " target"]
    """ρ"""
    kl: Float[Array, " target"]
    """ρ - 1 - log ρ in nats: its mean over samples of the behaviour estimates KL(behaviour || current)."""
    cut: Float[Array, " target"]
    """1 where the clip stops the gradient."""
    difference: Float[Array, " target"]
    """|log ρ| in nats: sampler against trainer, as long as both hold the same weights."""


def ratio_terms(
    logp: Float[Array, " target"],
    logp_behaviour: Float[Array, " target"],
    advantage: Float[Array, " target"],
    weight: Float[Array, " target"],
    *,
    clip_low: float,
    clip_high: float,
) -> RatioTerms:
    """What `clipped_surrogate` does to each target; same arguments, no gradient."""
    counted = weight > 0
    log_ratio = lax.stop_gradient(masked_log_ratio(logp, logp_behaviour, counted))
    ratio = jnp.exp(log_ratio)
    cut = ((ratio > 1 + clip_high) & (advantage > 0)) | ((ratio < 1 - clip_low) & (advantage < 0))
    terms = RatioTerms(ratio, ratio - 1 - log_ratio, cut.astype(ratio.dtype), jnp.abs(log_ratio))
    return RatioTerms(*(jnp.where(counted, term, 0) for term in terms))
