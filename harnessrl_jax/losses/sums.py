"""Values and weights of a row -> a total and the weight it covers; a log-ratio that is safe to exponentiate."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

LOG_RATIO_LIMIT = 20.0
"""Nats. Larger log-ratios are cut before `exp`: e^20 is far outside every clip, and e^89 overflows float32."""


class Sum(NamedTuple):
    """A total and the weight it covers. Add freely over rows and devices; divide once, at the end.

    Scalars for one loss; under `vmap`, arrays of them.
    """

    total: Float[Array, "..."]
    weight: Float[Array, "..."]

    def mean(self) -> Float[Array, "..."]:
        """The total per unit of weight; 0 when nothing was counted."""
        return self.total / jnp.where(self.weight > 0, self.weight, 1)


def weighted_sum(value: Float[Array, " target"], weight: Float[Array, " target"]) -> Sum:
    """Σ weight · value. Where the weight is 0 the value is not read: it may be anything, NaN included."""
    return Sum(total=jnp.where(weight > 0, weight * value, 0).sum(), weight=weight.sum())


def masked_log_ratio(
    logp: Float[Array, " target"], other: Float[Array, " target"], mask: Bool[Array, " target"]
) -> Float[Array, " target"]:
    """`logp - other` in nats, cut to ±20; 0 where `mask` is False, without reading the values there.

    The mask comes before any `exp`: masked afterwards, a NaN would still reach the gradient.
    """
    difference = jnp.where(mask, logp, 0) - jnp.where(mask, other, 0)
    return jnp.clip(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
