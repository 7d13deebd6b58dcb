"""Targets and the id of the segment each belongs to -> sums over segments, at fixed shapes.

A segment is what the caller's ids say: a call, a rollout, or the whole row where all ids are equal. Ids are any
integers, in any order. Segments end with the row; for one that lies in several rows, flatten the rows into one.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from harnessrl_jax.losses.sums import LOG_RATIO_LIMIT, masked_log_ratio


def segment_sum(
    value: Float[Array, " target"], segment: Int[Array, " target"], mask: Bool[Array, " target"]
) -> Float[Array, " target"]:
    """At each target, the sum of `value` over its segment; 0 where `mask` is False, without reading values there."""
    number = _numbers(segment)
    total = jax.ops.segment_sum(jnp.where(mask, value, 0), number, num_segments=len(segment))
    return jnp.where(mask, total[number], 0)


def segment_size(segment: Int[Array, " target"], mask: Bool[Array, " target"]) -> Float[Array, " target"]:
    """At each target, how many targets its segment has; 0 where `mask` is False.

    `1 / segment_size` are weights under which every segment counts once.
    """
    return segment_sum(jnp.ones(segment.shape, jnp.float32), segment, mask)


def segment_log_ratio(
    logp: Float[Array, " target"],
    other: Float[Array, " target"],
    segment: Int[Array, " target"],
    mask: Bool[Array, " target"],
) -> Float[Array, " target"]:
    """Log Π ρ over each target's segment, in nats, cut to ±20; the log-ratio of a sequence under two policies.

    With ρ = exp(logp - other), each cut to ±20 nats too. 0 where `mask` is False, without reading the values there.
    """
    total = segment_sum(masked_log_ratio(logp, other, mask), segment, mask)
    return jnp.clip(total, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def segment_mean_log_ratio(
    logp: Float[Array, " target"],
    other: Float[Array, " target"],
    segment: Int[Array, " target"],
    mask: Bool[Array, " target"],
) -> Float[Array, " target"]:
    """Log of the geometric mean of ρ over each target's segment, in nats: it does not grow with the length.

    With ρ = exp(logp - other), each cut to ±20 nats. 0 where `mask` is False, without reading the values there.
    """
    total = segment_sum(masked_log_ratio(logp, other, mask), segment, mask)
    return total / jnp.where(mask, segment_size(segment, mask), 1)


def _numbers(segment: Int[Array, " target"]) -> Int[Array, " target"]:
    """Equal ids -> equal numbers, from 0 up: there are at most as many segments as targets."""
    segment = jnp.asarray(segment)  # NumPy ids cannot be indexed by a traced order
    order = jnp.argsort(segment)
    ordered = segment[order]
    number = jnp.cumsum(jnp.diff(ordered, prepend=ordered[:1]) != 0, dtype=jnp.int32)
    return jnp.zeros(segment.shape, jnp.int32).at[order].set(number, unique_indices=True)
