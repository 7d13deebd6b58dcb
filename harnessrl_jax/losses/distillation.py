"""A student's and a teacher's predictions on one row -> credit for each token, or a distance over the vocabulary.

The tokens are the student's own samples: on-policy distillation corrects the mistakes that the student makes.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from harnessrl_jax.losses.sums import Sum, masked_log_ratio, weighted_sum


def self_distilled_advantage(
    advantage: Float[Array, " target"],
    logp: Float[Array, " target"],
    logp_teacher: Float[Array, " target"],
    mask: Bool[Array, " target"],
    *,
    mix: float | Float[Array, ""],
    clip_low: float,
    clip_high: float,
) -> Float[Array, " target"]:
    """Advantages whose size a teacher decides and whose sign stays the verifier's.

        A'_t = A_t ((1-λ) + λ clip(exp(sign(A_t) (logp_teacher_t - logp_t)), 1-ε_lo, 1+ε_hi))

    The teacher is the same model with privileged context, such as the reference answer: a token that it would rather
    have said counts more in a success and less in a failure. No gradient; values where `mask` is False are never
    read, and the result is 0 there.

    Args:
      advantage: credit A_t of each target from the verifier.
      logp: log-probability of the target under the student, nats.
      logp_teacher: the same under the teacher.
      mask: the targets that are trained.
      mix: λ in [0, 1]; 0 leaves the advantages alone. The paper lowers it from 0.5 to 0 over 50 steps.
      clip_low: ε_lo in [0, 1]: a positive factor keeps the sign.
      clip_high: ε_hi, at least 0.

    References:
      RLSD, https://arxiv.org/abs/2604.03128
    """
    credit = jnp.where(mask, lax.stop_gradient(advantage), 0)
    surprise = lax.stop_gradient(masked_log_ratio(logp_teacher, logp, mask))
    factor = jnp.clip(jnp.exp(jnp.sign(credit) * surprise), 1 - clip_low, 1 + clip_high)
    return credit * ((1 - mix) + mix * factor)


def distillation_advantage(
    logp: Float[Array, " target"], logp_teacher: Float[Array, " target"], mask: Bool[Array, " target"]
) -> Float[Array, " target"]:
    """logp_teacher - logp of each target, in nats, cut to ±20 and without gradient; 0 where `mask` is False.

    As the advantage of `reinforce`, on the student's own samples, the mean gradient is that of
    `reverse_kl(student || teacher)` of each token given its context, from one log-probability of the teacher a token.

    References:
      Gu et al. 2023 (MiniLLM), https://arxiv.org/abs/2306.08543; Agarwal et al. 2023 (GKD),
      https://arxiv.org/abs/2306.13649
    """
    return lax.stop_gradient(masked_log_ratio(logp_teacher, logp, mask))


def reverse_kl(
    logits: Float[Array, "target vocab"], logits_teacher: Float[Array, "target vocab"], weight: Float[Array, " target"]
) -> Sum:
    """L = Σ_t w_t KL(student || teacher) over the vocabulary, in nats: the student keeps to what the teacher would say.

    Only `logits` carries a gradient; rows of targets whose weight is 0 are never read.

    Args:
      logits: the student's, before the softmax.
      logits_teacher: the teacher's, finite wherever the student's are.
      weight: share w_t of each target in the loss, at least 0; 0 is padding.

    References:
      Agarwal et al. 2023 (GKD), https://arxiv.org/abs/2306.13649
    """
    student, teacher = _log_softmaxes(logits, logits_teacher, weight)
    return weighted_sum(_kl(student, teacher), weight)


def forward_kl(
    logits: Float[Array, "target vocab"], logits_teacher: Float[Array, "target vocab"], weight: Float[Array, " target"]
) -> Sum:
    """L = Σ_t w_t KL(teacher || student) over the vocabulary, in nats: the student covers all the teacher would say.

    Arguments and masking as in `reverse_kl`, with the student's logits finite wherever the teacher's are.
    """
    student, teacher = _log_softmaxes(logits, logits_teacher, weight)
    return weighted_sum(_kl(teacher, student), weight)


def _log_softmaxes(
    logits: Float[Array, "target vocab"], logits_teacher: Float[Array, "target vocab"], weight: Float[Array, " target"]
) -> tuple[Float[Array, "target vocab"], Float[Array, "target vocab"]]:
    counted = weight[:, None] > 0
    student, teacher = (jnp.where(counted, each, 0) for each in (logits, lax.stop_gradient(logits_teacher)))
    return jax.nn.log_softmax(student, axis=-1), jax.nn.log_softmax(teacher, axis=-1)


def _kl(p: Float[Array, "target vocab"], q: Float[Array, "target vocab"]) -> Float[Array, " target"]:
    """KL(p || q) of each row, from log-probabilities. A token that p never says adds nothing."""
    never = jnp.isneginf(p)
    difference = jnp.where(never, 0, p) - jnp.where(never, 0, q)
    return (jnp.exp(p) * difference).sum(axis=-1)
