"""Log-probabilities and weights of one row -> the supervised loss."""

from jaxtyping import Array, Float

from harnessrl_jax.losses.sums import Sum, weighted_sum


def cross_entropy(logp: Float[Array, " target"], weight: Float[Array, " target"]) -> Sum:
    """L = -Σ_t w_t logp_t in nats. Log-probabilities of targets whose weight is 0 are never read."""
    return weighted_sum(-logp, weight)
