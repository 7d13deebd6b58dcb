"""Unit statistics of the two roles -> the units of each role: the top K of every layer, by a score."""

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Statistic = Float[Array, "role layer unit"]
UnitMask = Bool[Array, "role layer unit"]


class RandomScore(NamedTuple):
    """Ranks units by lot, always the same for one seed: the control that tells specific units from few units."""

    seed: int


Score = Literal["raw", "contrast", "entropy"] | RandomScore


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


def entropy_scores(mean: Statistic) -> tuple[Statistic, UnitMask]:
    """Units whose activity belongs to one role, as in LAPE.

        p_r = s_r / (s_action + s_args),   H = -Σ_r p_r ln p_r,   q_r = ±(ln 2 - H), positive for the role of larger s_r

    Returns:
      The scores, and which units pass the floor: assigned to the role, and above the 95th percentile of the statistics
      of both roles over their layer.

    References:
      Tang et al. 2024, https://arxiv.org/abs/2402.16438
    """
    total = mean.sum(axis=0, keepdims=True)
    share = jnp.where(total > 0, mean / jnp.where(total > 0, total, 1), 0.5)
    entropy = -jnp.where(share > 0, share * jnp.log(jnp.where(share > 0, share, 1)), 0).sum(axis=0)
    mine = mean >= mean[::-1]
    floor = jnp.quantile(jnp.concatenate([mean[0], mean[1]], axis=-1), 0.95, axis=-1, keepdims=True)
    certain = jnp.maximum(jnp.log(2.0) - entropy, 0)
    return jnp.where(mine, certain[None], -certain[None]), mine & (mean > floor[None])


def random_scores(mean: Statistic, seed: int) -> tuple[Statistic, UnitMask]:
    """Scores that read nothing of the statistics but their shape. Returns them, and that every unit passes."""
    return jax.random.uniform(jax.random.key(seed), mean.shape), jnp.ones(mean.shape, bool)


def _scores(mean: Statistic, score: Score) -> tuple[Statistic, UnitMask]:
    match score:
        case "raw":
            return raw_scores(mean)
        case "contrast":
            return contrast_scores(mean)
        case "entropy":
            return entropy_scores(mean)
        case RandomScore(seed):
            return random_scores(mean, seed)


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
    eligible: UnitMask,
    *,
    score: Score,
    top_fraction: float,
    hysteresis: float,
) -> UnitMask:
    """The K best units of every layer, for each role.

    Units that pass the score's floor come first, the others fill up; ties go to the lower index. A unit of the previous
    partition stays while it ranks in the top `hysteresis · K`. A unit that is not eligible is never chosen, even if a
    layer then has fewer than K.

    Args:
      mean: s_r = S_r / n_r of a `Probe`, roles in the order action, args.
      previous: the partition that is replaced; all False where there was none.
      eligible: units of which enough was seen.
      score: `raw`, `contrast`, `entropy`, or a `RandomScore`.
      top_fraction: κ in (0, 1]; K = ceil(κ · units). 1 selects everything.
      hysteresis: at least 1; 1 forgets the previous partition.
    """
    quality, passes = _scores(mean, score)
    units = mean.shape[-1]
    wanted = units_per_role(units, top_fraction)
    rank = _rank(jnp.lexsort((-quality, ~passes, ~eligible), axis=-1))
    stays = previous & (rank < hysteresis * wanted)
    chosen = _rank(jnp.argsort(jnp.where(stays, rank - units, rank), axis=-1, stable=True)) < wanted
    return chosen & eligible


def _rank(order: Array) -> Array:
    """Position of each unit in an order along the last axis."""
    return jnp.argsort(order, axis=-1)
