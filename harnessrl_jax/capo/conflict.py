"""The two roles' gradients before masking, and the partition -> how much the roles disagree, and where."""

from typing import Any, NamedTuple

import jax
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
    norm_action: Float[Array, ""]
    norm_args: Float[Array, ""]
    retained_action: Float[Array, ""]
    """|M_a ∘ g_a|² / |g_a|²: how much of the gradient its partition keeps; 0 for a gradient of 0."""
    retained_args: Float[Array, ""]
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
    action, args = (jax.tree.map(lambda leaf, role=role: leaf[role], gradients) for role in (ACTION, ARGS))
    square_a, square_g = unit_products(unit_map, action, action), unit_products(unit_map, args, args)
    both = unit_products(unit_map, action, args)

    def cosine(where: Array, axis: int | None) -> Cosine:
        parts = (jnp.where(where, product, 0).sum(axis) for product in (both, square_a, square_g))
        return _cosine(*parts)

    shared, only_a, only_g = units[0] & units[1], units[0] & ~units[1], units[1] & ~units[0]
    either, every = units.any(axis=0), jnp.ones_like(shared)
    layers = cosine(every, 1)
    norms = jnp.sqrt(square_a.sum()), jnp.sqrt(square_g.sum())
    return Conflict(
        cosine=cosine(every, None),
        cosine_all=_cosine(_inner(action, args), _inner(action, action), _inner(args, args)),
        cosine_layer=layers,
        cosine_shared=cosine(shared, None),
        cosine_action_only=cosine(only_a, None),
        cosine_args_only=cosine(only_g, None),
        negative_layers=(layers.value < 0).mean(dtype=both.dtype),
        mass=_ratio(jnp.minimum(both.sum(axis=1), 0).sum(), norms[0] * norms[1]),
        norm_action=norms[0],
        norm_args=norms[1],
        retained_action=_ratio(jnp.where(units[0], square_a, 0).sum(), square_a.sum()),
        retained_args=_ratio(jnp.where(units[1], square_g, 0).sum(), square_g.sum()),
        jaccard_layer=Cosine(_ratio(_count(shared), _count(either)), either.any(axis=1)),
        shared_layer=_count(shared),
        action_only_layer=_count(only_a),
        args_only_layer=_count(only_g),
        neither_layer=_count(~either),
    )


def _cosine(both: Array, square_a: Array, square_g: Array) -> Cosine:
    # Two roots: the product of two small squares underflows where their roots do not.
    norms = jnp.sqrt(square_a) * jnp.sqrt(square_g)
    return Cosine(_ratio(both, norms), norms > 0)


def _ratio(part: Array, whole: Array) -> Array:
    return jnp.where(whole > 0, part / jnp.where(whole > 0, whole, 1), 0)


def _count(units: Bool[Array, "layer unit"]) -> Float[Array, " layer"]:
    return units.sum(axis=1, dtype=jnp.float32)


def _inner(left: PyTree, right: PyTree) -> Float[Array, ""]:
    products: list[Any] = [
        (a.astype(dtype) * b.astype(dtype)).sum()
        for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
        for dtype in (jnp.promote_types(a.dtype, jnp.float32),)
    ]
    return sum(products, jnp.zeros(()))
