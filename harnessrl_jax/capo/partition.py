"""Unit statistics of the two roles -> the units of each role: the top K of every layer, by a score."""

import math
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Statistic = Float[Array, "role layer unit"]
UnitMask = Bool[Array, "role layer unit"]


def raw_scores(mean: Statistic) -> tuple[Statistic, UnitMask]:
    """q_r = s_r: the most active units. Both roles may get the same ones."""
    return mean, jnp.ones(mean.shape, bool)


def contrast_scores(mean: Statistic) -> tuple[Statistic, UnitMask]:
    """Units that are specific to a role.

        q_action = z(s_action) - z(s_args),   q_args = -q_action,   z: standardised over the units of a layer

    Returns:
      The scores, and which units pass the floor: above the median statistic of their layer for that role, so that a
      unit that hardly fires is not chosen for being quiet in the other role.
    """
    z = _standardised(mean)
    difference = z[0] - z[1]
    return jnp.stack([difference, -difference]), mean > jnp.median(mean, axis=-1, keepdims=True)


def _standardised(mean: Statistic) -> Statistic:
    centred = mean - mean.mean(axis=-1, keepdims=True)
    deviation = jnp.sqrt((centred * centred).mean(axis=-1, keepdims=True))
    return jnp.where(deviation > 0, centred / jnp.where(deviation > 0, deviation, 1), 0)


def units_per_role(units: int, top_fraction: float) -> int:
    """K = ceil(top_fraction · units); products such as 0.1 · 30 that only rounding lifts over an integer stay there."""
    return math.ceil(round(top_fraction * units, 6))


def partition(
    mean: Statistic,
    previous: UnitMask,
    *,
    score: Literal["raw", "contrast"],
    top_fraction: float,
    hysteresis: float,
) -> UnitMask:
    """The K best units of every layer, for each role.

    Units that pass the score's floor come first, the others fill up; ties go to the lower index. A unit of the previous
    partition stays while it ranks in the top `hysteresis · K`.

    Args:
      mean: s_r = S_r / n_r of a `Probe`, roles in the order action, args.
      previous: the partition that is replaced; all False where there was none.
      score: `raw` or `contrast`.
      top_fraction: κ in (0, 1]; K = ceil(κ · units). 1 selects everything.
      hysteresis: at least 1; 1 forgets the previous partition.
    """
    quality, passes = raw_scores(mean) if score == "raw" else contrast_scores(mean)
    units = mean.shape[-1]
    wanted = units_per_role(units, top_fraction)
    rank = _rank(jnp.lexsort((-quality, ~passes), axis=-1))
    stays = previous & (rank < hysteresis * wanted)
    return _rank(jnp.argsort(jnp.where(stays, rank - units, rank), axis=-1, stable=True)) < wanted


def _rank(order: Array) -> Array:
    """Position of each unit in an order along the last axis."""
    return jnp.argsort(order, axis=-1)
