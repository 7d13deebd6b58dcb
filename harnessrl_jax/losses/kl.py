"""Log-probabilities under two policies -> the distance that keeps the trained one near the other.

Three estimates of KL(π_θ || π_ref) from tokens that π_θ sampled. They differ in value and, as losses, in gradient:

| | value | gradient, in the mean over samples of π_θ |
|---|---|---|
| k1 | unbiased, any sign | 0: a loss cannot use it; subtract it from the reward instead |
| k2 | biased, at least 0 | that of KL(π_θ || π_ref) |
| k3 | unbiased, at least 0, low variance | that of KL(π_ref || π_θ) |
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from harnessrl_jax.losses.sums import Sum, masked_log_ratio, weighted_sum


def kl_k1(
    logp: Float[Array, " target"], logp_reference: Float[Array, " target"], weight: Float[Array, " target"]
) -> Sum:
    """Unbiased estimate of KL(π_θ || π_ref) from samples of π_θ, in nats.

        L = -Σ_t w_t d_t,   d_t = logp_reference_t - logp_t, cut to ±20

    For reports and rewards: as a loss its mean gradient is 0. Only `logp` carries a gradient; values of targets whose
    weight is 0 are never read.

    References:
      Schulman 2020, http://joschu.net/blog/kl-approx.html
    """
    return weighted_sum(-masked_log_ratio(lax.stop_gradient(logp_reference), logp, weight > 0), weight)


def kl_k2(
    logp: Float[Array, " target"], logp_reference: Float[Array, " target"], weight: Float[Array, " target"]
) -> Sum:
    """Half the squared log-ratio, in nats²: near KL(π_θ || π_ref) when the policies are near, with its gradient.

        L = ½ Σ_t w_t d_t²,   d_t = logp_reference_t - logp_t, cut to ±20

    Over samples of π_θ the mean gradient is exactly that of KL(π_θ || π_ref). Only `logp` carries a gradient; values
    of targets whose weight is 0 are never read.

    References:
      Schulman 2020, http://joschu.net/blog/kl-approx.html
    """
    return weighted_sum(0.5 * masked_log_ratio(lax.stop_gradient(logp_reference), logp, weight > 0) ** 2, weight)


def kl_k3(
    logp: Float[Array, " target"], logp_reference: Float[Array, " target"], weight: Float[Array, " target"]
) -> Sum:
    """Low-variance estimate of KL(π_θ || π_ref) from samples of π_θ, in nats, never negative.

        L = Σ_t w_t (exp(d_t) - 1 - d_t),   d_t = logp_reference_t - logp_t, cut to ±20

    Only `logp` carries a gradient; values of targets whose weight is 0 are never read.

    References:
      Schulman 2020, http://joschu.net/blog/kl-approx.html
    """
    log_ratio = masked_log_ratio(lax.stop_gradient(logp_reference), logp, weight > 0)
    return weighted_sum(jnp.exp(log_ratio) - 1 - log_ratio, weight)
