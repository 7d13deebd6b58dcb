"""Log-probabilities under two policies -> the distance that keeps the trained one near the other."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from harnessrl_jax.losses.sums import Sum, masked_log_ratio, weighted_sum


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
