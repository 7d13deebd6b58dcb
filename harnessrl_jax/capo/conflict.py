"""The two roles' gradients before masking, and the partition -> how much the roles disagree, and where."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from harnessrl_jax.capo.roles import ACTION, ARGS
from harnessrl_jax.capo.units import UnitMap, unit_products


class Cosine(NamedTuple):
    """A cosine of two gradients; 0 and not valid where one of them is 0."""

    value: Float[Array, "..."]
    valid: Bool[Array, "..."]


class Conflict(NamedTuple):
    """Conflict of the action and args gradients, over the parameters that units own unless it says otherwise."""

    cosine: Cosine
    cosine_all: Cosine
    """Over all parameters, the ungated ones included."""
    cosine_layer: Cosine
    cosine_shared: Cosine
    """Over the units of both partitions."""
    cosine_action_only: Cosine
    cosine_args_only: Cosine
    negative_layers: Float[Array, ""]
    """Share of the layers with a cosine below 0."""
    mass: Float[Array, ""]
    """Σ_layers min(0, g_a·g_g) / (|g_a| |g_g|), in [-1, 0]."""
    norm: Float[Array, " role"]
    """|g_r|"""
    retained: Float[Array, " role"]
    """|M_r ∘ g_r|² / |g_r|²: how much of a gradient its partition keeps; 0 for a gradient of 0."""
    jaccard_layer: Cosine
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
    of_set = [Cosine(value, valid) for value, valid in zip(*cosines, strict=True)]
    kept = jnp.where(units, jnp.stack([products[ACTION, ACTION], products[ARGS, ARGS]]), 0).sum(axis=(1, 2))
    energy = jnp.stack([every[ACTION, ACTION], every[ARGS, ARGS]])
    sizes = sets[1:].sum(axis=-1, dtype=jnp.float32)
    return Conflict(
        cosine=of_set[0],
        cosine_all=_cosine(every + rest),
        cosine_layer=layers,
        cosine_shared=of_set[1],
        cosine_action_only=of_set[2],
        cosine_args_only=of_set[3],
        negative_layers=(layers.value < 0).mean(dtype=every.dtype),
        mass=_ratio(jnp.minimum(products[ACTION, ARGS].sum(axis=-1), 0).sum(), jnp.sqrt(energy).prod()),
        norm=jnp.sqrt(energy),
        retained=_ratio(kept, energy),
        jaccard_layer=Cosine(_ratio(sizes[0], sizes[:3].sum(axis=0)), either.any(axis=1)),
        shared_layer=sizes[0],
        action_only_layer=sizes[1],
        args_only_layer=sizes[2],
        neither_layer=sizes[3],
    )


def _cosine(products: Float[Array, "role role ..."]) -> Cosine:
    # Two roots: the product of two small squares underflows where their roots do not.
    norms = jnp.sqrt(products[ACTION, ACTION]) * jnp.sqrt(products[ARGS, ARGS])
    return Cosine(_ratio(products[ACTION, ARGS], norms), norms > 0)


def _ratio(part: Array, whole: Array) -> Array:
    return jnp.where(whole > 0, part / jnp.where(whole > 0, whole, 1), 0)
