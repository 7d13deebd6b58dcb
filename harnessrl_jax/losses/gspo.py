"""Log-probabilities of sequences inside one row -> policy-gradient losses with one ratio for each sequence."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from harnessrl_jax.losses.clipped import clipped_gain
from harnessrl_jax.losses.segments import segment_mean_log_ratio
from harnessrl_jax.losses.sums import Sum, weighted_sum


def gspo(
    logp: Float[Array, " target"],
    logp_behaviour: Float[Array, " target"],
    advantage: Float[Array, " target"],
    weight: Float[Array, " target"],
    segment: Int[Array, " target"],
    *,
    clip_low: float,
    clip_high: float,
) -> Sum:
    """Sequence-level clipped policy-gradient loss of one row.

        L = -Σ_t w_t min(s A_t, clip(s, 1-ε_lo, 1+ε_hi) A_t)
        s = exp(mean over the targets u of t's sequence of logp_u - logp_behaviour_u)

    The mean runs over the targets with weight above 0 that carry the same `segment` id: prompts, tool output and
    padding never enter it. The ids say what a sequence is, and results must say which was used: `row.call` for one
    call, `row.rollout` for a rollout, zeros for the row. A sequence must lie in this row whole; flatten a batch into
    one row for rollouts that span several.

    With w = 1 / (targets of the sequence) each sequence weighs 1, as in the paper. Only `logp` carries a gradient.
    Values of targets whose weight is 0 are never read. Log-ratios are cut to ±20 nats.

    Args:
      logp: log π_θ(target | its ancestors) in nats, at the current weights.
      logp_behaviour: the same quantity, as the sampler reported it when it drew the target.
      advantage: credit A_t of each target; in the paper equal within a sequence.
      weight: share w_t of each target in the loss, at least 0; 0 is padding.
      segment: id of the sequence of each target.
      clip_low: ε_lo, in [0, 1); 3e-4 in the paper, far below a token-level clip since s is a mean.
      clip_high: ε_hi, at least 0; 4e-4 in the paper.

    Returns:
      The summed loss and the weight it covers.

    References:
      Zheng et al. 2025, eq. 5 and 7, https://arxiv.org/abs/2507.18071
    """
    counted = weight > 0
    log_ratio = segment_mean_log_ratio(logp, lax.stop_gradient(logp_behaviour), segment, counted)
    credit = jnp.where(counted, lax.stop_gradient(advantage), 0)
    return weighted_sum(-clipped_gain(jnp.exp(log_ratio), credit, clip_low=clip_low, clip_high=clip_high), weight)


def gspo_token(
    logp: Float[Array, " target"],
    log_ratio: Float[Array, " target"],
    advantage: Float[Array, " target"],
    weight: Float[Array, " target"],
    *,
    clip_low: float,
    clip_high: float,
) -> Sum:
    """GSPO in the form whose gradient stays with each token, for advantages or losses that differ inside a sequence.

        L = -Σ_t w_t min(s_t A_t, clip(s_t, 1-ε_lo, 1+ε_hi) A_t),   s_t = sg(s) π_θ(t) / sg(π_θ(t))

    Value and, for equal advantages and weights inside a sequence, gradient are those of `gspo`. The ratio s is given,
    so it may come from a whole batch, and a loss that selects some tokens by weight (a role) still uses the ratio of
    the whole sequence and changes the log-probabilities of its own tokens alone.

    Args:
      logp: log π_θ(target | its ancestors) in nats, at the current weights.
      log_ratio: log s of each target's sequence in nats: `segment_mean_log_ratio` over all its trainable targets.
      advantage: credit A_t of each target.
      weight: share w_t of each target in the loss, at least 0; where it is 0 nothing is read.
      clip_low: ε_lo, in [0, 1).
      clip_high: ε_hi, at least 0.

    Returns:
      The summed loss and the weight it covers.

    References:
      Zheng et al. 2025, section 4.3 (GSPO-token), https://arxiv.org/abs/2507.18071
    """
    counted = weight > 0
    own = jnp.where(counted, logp, 0)
    sequence = jnp.where(counted, lax.stop_gradient(log_ratio), 0)
    ratio = jnp.exp(sequence + own - lax.stop_gradient(own))
    credit = jnp.where(counted, lax.stop_gradient(advantage), 0)
    return weighted_sum(-clipped_gain(ratio, credit, clip_low=clip_low, clip_high=clip_high), weight)
