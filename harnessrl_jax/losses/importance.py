"""Log-ratios of the trainer's and the sampler's policy -> importance weights and the targets to keep.

The weights that sampled a token and the weights that train on it can disagree: other kernels, other precision, an
update in between. With ρ = π_trainer / π_sampler of what was sampled, taken from

- a token: `masked_log_ratio(logp_trainer, logp_sampler, mask)`: low variance, biased;
- a sequence: `segment_log_ratio`: unbiased, but it explodes with the length;
- a sequence, per token: `segment_mean_log_ratio`: only to reject, never as a weight,

multiply the advantage by what these functions return. The clipped losses are positively homogeneous in the advantage,
so that is the same as to multiply the loss; the denominators keep counting what is rejected.

References: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; verl,
`rollout_corr_math.md`.
"""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from harnessrl_jax.errors import LossError
from harnessrl_jax.losses.segments import segment_sum


def truncated_importance(
    log_ratio: Float[Array, " target"], mask: Bool[Array, " target"], *, limit: float
) -> Float[Array, " target"]:
    """min(ρ, C), without gradient; 0 where `mask` is False, without reading the ratio there.

    Args:
      log_ratio: log ρ of the target or of its sequence, nats.
      mask: the targets that are trained.
      limit: C, above 0; 2 is usual for tokens, 2 to 10 for sequences, and inf truncates nothing.

    Raises:
      LossError: `limit` is not above 0.
    """
    if not limit > 0:
        raise LossError(f"truncated_importance: limit must be above 0, got {limit}; 2 is usual for tokens.")
    ratio = jnp.exp(jnp.where(mask, lax.stop_gradient(log_ratio), 0))
    return jnp.where(mask, jnp.minimum(ratio, limit), 0)


def masked_importance(
    log_ratio: Float[Array, " target"], mask: Bool[Array, " target"], *, low: float, high: float
) -> Float[Array, " target"]:
    """ρ where low <= ρ <= high and 0 elsewhere, without gradient: an outlier is left out instead of truncated.

    Args:
      log_ratio: log ρ of the target or of its sequence, nats.
      mask: the targets that are trained.
      low: smallest ratio kept, at least 0.
      high: largest ratio kept.

    Raises:
      LossError: the band is empty.
    """
    kept = within_band(log_ratio, mask, low=low, high=high)
    return jnp.where(kept, jnp.exp(jnp.where(kept, lax.stop_gradient(log_ratio), 0)), 0)


def within_band(
    log_ratio: Float[Array, " target"], mask: Bool[Array, " target"], *, low: float, high: float
) -> Bool[Array, " target"]:
    """Whether low <= ρ <= high; False where `mask` is False, without reading the ratio there.

    With `segment_mean_log_ratio` this is geometric rejection: whole sequences are kept or rejected, and since their
    mean ratio is close to 1 the band is narrow, about 1 ± 0.001.

    Args:
      log_ratio: log ρ, nats.
      mask: the targets that are trained.
      low: smallest ratio kept, at least 0.
      high: largest ratio kept.

    Raises:
      LossError: the band is empty.
    """
    if not 0 <= low <= high:
        raise LossError(f"within_band: wanted 0 <= low <= high, got low {low} and high {high}.")
    # The comparison is made on logs: rounding of exp near 1 is as large as the narrow bands in use.
    log_low, log_high = math.log(low) if low > 0 else -math.inf, math.log(high) if high > 0 else -math.inf
    value = jnp.where(mask, log_ratio, 0)
    return mask & (value >= log_low) & (value <= log_high)


def veto(
    log_ratio: Float[Array, " target"], segment: Int[Array, " target"], mask: Bool[Array, " target"], *, floor: float
) -> Bool[Array, " target"]:
    """False for every target of a sequence in which any token has ρ below `floor`, and where `mask` is False.

    One token that the trainer calls impossible means that the sequence was not sampled from this policy.

    Args:
      log_ratio: log ρ of each target, nats; not read where `mask` is False.
      segment: id of the sequence of each target.
      mask: the targets that are trained.
      floor: smallest ratio allowed, above 0; 1e-4 is usual. Log-ratios that were cut to ±20 cannot fall below 2e-9.

    Raises:
      LossError: `floor` is not above 0.
    """
    if not floor > 0:
        raise LossError(f"veto: floor must be above 0, got {floor}; 1e-4 is usual.")
    impossible = jnp.where(mask, log_ratio, 0) < math.log(floor)
    return mask & (segment_sum(impossible.astype(jnp.float32), segment, mask) == 0)
