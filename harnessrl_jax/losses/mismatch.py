"""Log-probabilities of the trainer and the sampler -> how far the two policies are apart, in sums that add."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from harnessrl_jax.losses.sums import masked_log_ratio


class RatioMoments(NamedTuple):
    """Weighted sums of importance ratios ρ = π_trainer / π_sampler over samples of the sampler. Add them freely."""

    weight: Float[Array, "..."]
    ratio: Float[Array, "..."]
    ratio_squared: Float[Array, "..."]
    excess: Float[Array, "..."]
    """Of ρ - 1 - log ρ."""

    def effective_share(self) -> Float[Array, "..."]:
        """Effective sample size / samples, (Σ w ρ)² / (Σ w Σ w ρ²): 1 where all ratios agree; 1 without samples."""
        found = self.weight > 0
        size = self.ratio**2 / jnp.where(found, self.weight * self.ratio_squared, 1)
        return jnp.where(found, size, 1)

    def kl(self) -> Float[Array, "..."]:
        """Estimate of KL(sampler || trainer) in nats, never negative; 0 without samples."""
        return self.excess / jnp.where(self.weight > 0, self.weight, 1)

    def chi2(self) -> Float[Array, "..."]:
        """Estimate of χ²(trainer || sampler) = E[ρ²] - 1, the variance of the weights when their mean is 1.

        Negative only by chance of the sample; 0 without samples.
        """
        found = self.weight > 0
        return jnp.where(found, self.ratio_squared / jnp.where(found, self.weight, 1) - 1, 0)


def ratio_moments(log_ratio: Float[Array, " target"], weight: Float[Array, " target"]) -> RatioMoments:
    """Sums over the targets of one row, without gradient.

    Args:
      log_ratio: log ρ in nats, cut to ±20: of tokens (`masked_log_ratio`), or of sequences (`segment_log_ratio`) with
        `1 / segment_size` as weight, so that each sequence counts once.
      weight: how much each target counts; where it is 0 the log-ratio is not read.
    """
    counted = weight > 0
    log_ratio = jnp.where(counted, lax.stop_gradient(log_ratio), 0)
    ratio = jnp.exp(log_ratio)
    # For small d the rounding error of exp(d) - 1 would be larger than all of d²/2.
    return RatioMoments(
        weight.sum(),
        (weight * ratio).sum(),
        (weight * ratio**2).sum(),
        (weight * (jnp.expm1(log_ratio) - log_ratio)).sum(),
    )


class ProbabilityMoments(NamedTuple):
    """Weighted sums of the trainer's probabilities p and of their differences d from the sampler's. Add them freely.

    Differences, not the sampler's own moments: the two probabilities are nearly equal, and their small disagreement
    would be lost to rounding in a difference of large sums.
    """

    weight: Float[Array, "..."]
    p: Float[Array, "..."]
    pp: Float[Array, "..."]
    d: Float[Array, "..."]
    dd: Float[Array, "..."]
    pd: Float[Array, "..."]

    def correlation(self) -> tuple[Float[Array, "..."], Bool[Array, "..."]]:
        """Pearson correlation of the two probabilities, in [-1, 1], and whether it is defined.

        It is not defined, and 0, where either probability is constant to rounding. Healthy runs report above 0.99.
        """
        weight = jnp.where(self.weight > 0, self.weight, 1)
        p, pp, d, dd, pd = (each / weight for each in self[1:])
        cross, moved = pd - p * d, dd - d * d
        first = pp - p * p
        second = first - 2 * cross + moved
        rounding = 16 * jnp.finfo(pp.dtype).eps * pp
        valid = (self.weight > 0) & (first > rounding) & (second > rounding)
        scale = jnp.where(valid, jnp.sqrt(jnp.where(valid, first * second, 1)), 1)
        return jnp.where(valid, jnp.clip((first - cross) / scale, -1, 1), 0), valid


def probability_moments(
    logp: Float[Array, " target"], logp_sampler: Float[Array, " target"], weight: Float[Array, " target"]
) -> ProbabilityMoments:
    """Sums over the targets of one row, without gradient.

    Args:
      logp: the trainer's log-probability of what was sampled, nats.
      logp_sampler: the sampler's.
      weight: how much each target counts; where it is 0 nothing is read.
    """
    counted = weight > 0
    p = jnp.exp(jnp.where(counted, lax.stop_gradient(logp), 0))
    log_ratio = lax.stop_gradient(masked_log_ratio(logp, logp_sampler, counted))
    d = -p * jnp.expm1(-log_ratio)
    return ProbabilityMoments(weight.sum(), *((weight * each).sum() for each in (p, p * p, d, d * d, p * d)))
