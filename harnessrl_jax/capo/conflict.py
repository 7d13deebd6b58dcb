"""The two roles' gradients before masking, and the partition -> how much the roles disagree, and where."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from harnessrl_jax.capo.roles import ACTION, ARGS
from harnessrl_jax.capo.units import UnitMap, unit_products


class Ratio(NamedTuple):
    """A cosine or a share; 0 and not valid where its denominator is 0."""

    value: Float[Array, "..."]
    valid: Bool[Array, "..."]


class Conflict(NamedTuple):
    """Conflict of the action and args gradients, over the parameters that units own unless it says otherwise."""

    cosine: Ratio
    cosine_all: Ratio
    """Over all parameters, the ungated ones included."""
    cosine_layer: Ratio
    cosine_shared: Ratio
    """Over the units of both partitions."""
    cosine_action_only: Ratio
    cosine_args_only: Ratio
    negative_layers: Float[Array, ""]
    """Share of the layers with a cosine below 0."""
    mass: Ratio
    """Σ_layers min(0, g_a·g_g) / (|g_a| |g_g|), in [-1, 0]."""
    norm: Float[Array, " role"]
    """|g_r| of each role."""
    retained: Ratio
    """|M_r ∘ g_r|² / |g_r|² of each role: how much of a gradient its partition keeps. Not valid before there is one."""
    jaccard_layer: Ratio
    """|both| / |either|; above about 0.8 routing changes little. 0 and not valid for empty partitions."""
    shared_layer: Float[Array, " layer"]
    """Units in both partitions; the next three are likewise counts of units."""
    action_only_layer: Float[Array, " layer"]
    args_only_layer: Float[Array, " layer"]
    neither_layer: Float[Array, " layer"]


def conflict(unit_map: UnitMap, gradients: PyTree, units: Bool[Array, "role layer unit"]) -> Conflict:
    """Measures conflict from gradients that are complete (all rows summed) and not masked yet.

    Args:
      unit_map: which slices the units own.
      gradients: role gradients with a leading role axis, in the order action, args.
      units: the partition.
    """
    products, rest = unit_products(unit_map, gradients)
    shared, either = units.all(axis=0), units.any(axis=0)
    sets = jnp.stack(
        [jnp.ones_like(shared), shared, units[ACTION] & ~units[ARGS], units[ARGS] & ~units[ACTION], ~either]
    )
    # [set, role, role]: products over the units of each set; the first set holds all of them.
    over_sets = jnp.where(sets[:, None, None], products[None], 0).sum(axis=(-2, -1))
    every, layers = over_sets[0], _cosine(products.sum(axis=-1))
    cosines = _cosine(jnp.moveaxis(over_sets, 0, -1))
    of_set = [Ratio(value, valid) for value, valid in zip(*cosines, strict=True)]
    kept = jnp.where(units, jnp.stack([products[ACTION, ACTION], products[ARGS, ARGS]]), 0).sum(axis=(1, 2))
    energy = jnp.stack([every[ACTION, ACTION], every[ARGS, ARGS]])
    norms = jnp.sqrt(energy).prod()
    sizes = sets[1:].sum(axis=-1, dtype=jnp.float32)
    return Conflict(
        cosine=of_set[0],
        cosine_all=_cosine(every + rest),
        cosine_layer=layers,
        cosine_shared=of_set[1],
        cosine_action_only=of_set[2],
        cosine_args_only=of_set[3],
        negative_layers=(layers.value < 0).mean(dtype=every.dtype),
        mass=Ratio(_ratio(jnp.minimum(products[ACTION, ARGS].sum(axis=-1), 0).sum(), norms), norms > 0),
        norm=jnp.sqrt(energy),
        retained=Ratio(_ratio(kept, energy), (energy > 0) & units.any(axis=(1, 2))),
        jaccard_layer=Ratio(_ratio(sizes[0], sizes[:3].sum(axis=0)), either.any(axis=1)),
        shared_layer=sizes[0],
        action_only_layer=sizes[1],
        args_only_layer=sizes[2],
        neither_layer=sizes[3],
    )


def _cosine(products: Float[Array, "role role ..."]) -> Ratio:
    # Two roots: the product of two small squares underflows where their roots do not.
    norms = jnp.sqrt(products[ACTION, ACTION]) * jnp.sqrt(products[ARGS, ARGS])
    return Ratio(_ratio(products[ACTION, ARGS], norms), norms > 0)


def _ratio(part: Array, whole: Array) -> Array:
    return jnp.where(whole > 0, part / jnp.where(whole > 0, whole, 1), 0)
