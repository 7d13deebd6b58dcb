"""Arrays of one packed row -> a summed loss and the weight it covers. Pure functions; `vmap` at the call."""

from harnessrl_jax.losses.authorship import authored_weight, keep_segment_weight
from harnessrl_jax.losses.clipped import (
    RatioTerms,
    clipped_gain,
    clipped_surrogate,
    dual_clipped_surrogate,
    ratio_terms,
)
from harnessrl_jax.losses.cross_entropy import cross_entropy
from harnessrl_jax.losses.distillation import distillation_advantage, forward_kl, reverse_kl, self_distilled_advantage
from harnessrl_jax.losses.entropy import entropy, entropy_loss
from harnessrl_jax.losses.gspo import gspo, gspo_token
from harnessrl_jax.losses.importance import masked_importance, truncated_importance, veto, within_band
from harnessrl_jax.losses.kl import kl_k1, kl_k2, kl_k3
from harnessrl_jax.losses.mismatch import ProbabilityMoments, RatioMoments, probability_moments, ratio_moments
from harnessrl_jax.losses.offline import advantage_weighted_regression, linear_baseline, return_probabilities
from harnessrl_jax.losses.reinforce import cispo, reinforce
from harnessrl_jax.losses.segments import segment_log_ratio, segment_mean_log_ratio, segment_size, segment_sum
from harnessrl_jax.losses.shaping import cost_aware_reward, exploration_weight, overlong_penalty
from harnessrl_jax.losses.sums import Sum, masked_log_ratio, weighted_sum
from harnessrl_jax.losses.value import ValueMoments, clipped_value_loss, value_loss, value_moments

__all__ = [
    "ProbabilityMoments",
    "RatioMoments",
    "RatioTerms",
    "Sum",
    "ValueMoments",
    "advantage_weighted_regression",
    "authored_weight",
    "cispo",
    "clipped_gain",
    "clipped_surrogate",
    "clipped_value_loss",
    "cost_aware_reward",
    "cross_entropy",
    "distillation_advantage",
    "dual_clipped_surrogate",
    "entropy",
    "entropy_loss",
    "exploration_weight",
    "forward_kl",
    "gspo",
    "gspo_token",
    "keep_segment_weight",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "linear_baseline",
    "masked_importance",
    "masked_log_ratio",
    "overlong_penalty",
    "probability_moments",
    "ratio_moments",
    "ratio_terms",
    "reinforce",
    "return_probabilities",
    "reverse_kl",
    "segment_log_ratio",
    "segment_mean_log_ratio",
    "segment_size",
    "segment_sum",
    "self_distilled_advantage",
    "truncated_importance",
    "value_loss",
    "value_moments",
    "veto",
    "weighted_sum",
    "within_band",
]
