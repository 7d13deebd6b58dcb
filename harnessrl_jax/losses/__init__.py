"""Arrays of one packed row -> a summed loss and the weight it covers. Pure functions; `vmap` at the call."""

from harnessrl_jax.losses.clipped import RatioTerms, clipped_surrogate, ratio_terms
from harnessrl_jax.losses.cross_entropy import cross_entropy
from harnessrl_jax.losses.kl import kl_k3
from harnessrl_jax.losses.sums import Sum, masked_log_ratio, weighted_sum

__all__ = [
    "RatioTerms",
    "Sum",
    "clipped_surrogate",
    "cross_entropy",
    "kl_k3",
    "masked_log_ratio",
    "ratio_terms",
    "weighted_sum",
]
