"""The two roles' gradients -> factors with which units of both partitions add them: less conflict."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from harnessrl_jax.capo.roles import ACTION, ARGS
from harnessrl_jax.capo.settings import Shared
from harnessrl_jax.capo.units import UnitMap, expand, unit_products

BISECTIONS = 40
"""Halvings of [0, 1] in CAGrad's search: more than float32 can tell apart."""


def shared_factors(
    unit_map: UnitMap, gradients: PyTree, units: Bool[Array, "role layer unit"], *, how: Shared, cagrad: float
) -> Float[Array, "role layer unit"]:
    """What to multiply each role's gradient by before the two are added; 1 outside the units of both partitions.

    All of these act on one layer's shared units at a time, seen as two vectors g_a and g_g, and are linear in them:

    - `sum`: 1 and 1.
    - `pcgrad`: where g_a · g_g < 0, each loses its part along the other's original direction.
    - `cagrad`: d = g_0 + c |g_0| g_w / |g_w| with g_0 = (g_a + g_g) / 2, g_w = w g_a + (1 - w) g_g and w in [0, 1]
      minimising g_w · g_0 + c |g_0| |g_w|; returned as 2 d, which is the sum at c = 0.
    - `drop_smaller`: where g_a · g_g < 0, the longer one alone.

    Args:
      unit_map: which entries the units own.
      gradients: the role gradients, complete and not masked, roles in the order action, args.
      units: the partition; all False during warm-up, when nothing is shared.
      how: which of them.
      cagrad: c in [0, 1).

    References:
      Yu et al. 2020, https://arxiv.org/abs/2001.06782; Liu et al. 2021, eq. 4, https://arxiv.org/abs/2110.14048
    """
    products, _ = unit_products(unit_map, gradients)
    shared = units[ACTION] & units[ARGS]
    over = jnp.where(shared, products, 0).sum(axis=-1)
    action, dot, args = over[ACTION, ACTION], over[ACTION, ARGS], over[ARGS, ARGS]
    one = jnp.ones_like(dot)
    match how:
        case "sum":
            factors = (one, one)
        case "pcgrad":
            lost = jnp.minimum(dot, 0)
            # g_a - (dot / |g_g|²) g_g + g_g - (dot / |g_a|²) g_a, gathered by vector.
            factors = (1 - _ratio(lost, action), 1 - _ratio(lost, args))
        case "drop_smaller":
            against = dot < 0
            factors = (jnp.where(against & (action < args), 0, one), jnp.where(against & (action >= args), 0, one))
        case "cagrad":
            weight, scale = _cagrad(action, dot, args, cagrad)
            factors = (1 + 2 * scale * weight, 1 + 2 * scale * (1 - weight))
    return jnp.where(shared, jnp.stack(factors)[:, :, None], 1)


def scaled(unit_map: UnitMap, gradients: PyTree, factors: Float[Array, "role layer unit"]) -> PyTree:
    """The role gradients f_r ∘ g_r, for gradients with a leading role axis.

    Ungated parameters and roles beyond `factors` keep f = 1.
    """
    like = jax.tree.map(lambda leaf: leaf[0], gradients)
    roles = len(jax.tree.leaves(gradients)[0])
    apart = [jax.tree.map(lambda leaf, role=role: leaf[role], gradients) for role in range(roles)]
    for role, factor in enumerate(factors):
        by_leaf = expand(unit_map, like, factor, jnp.ones(()))
        apart[role] = jax.tree.map(lambda g, f: (f * g).astype(g.dtype), apart[role], by_leaf)
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *apart)


def _cagrad(action: Array, dot: Array, args: Array, c: float) -> tuple[Array, Array]:
    """The weight w and c |g_0| / |g_w| of each layer."""
    radius = c * jnp.sqrt(jnp.maximum(action + 2 * dot + args, 0)) / 2

    def norm(w: Array) -> Array:
        return jnp.sqrt(jnp.maximum(w * w * action + 2 * w * (1 - w) * dot + (1 - w) * (1 - w) * args, 0))

    def slope(w: Array) -> Array:
        # The objective is convex in w, so its derivative changes sign once.
        return (action - args) / 2 + radius * _ratio(w * action + (1 - 2 * w) * dot - (1 - w) * args, norm(w))

    def halve(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = (low + high) / 2
        rising = slope(middle) > 0
        return jnp.where(rising, low, middle), jnp.where(rising, middle, high)

    low, high = jax.lax.fori_loop(0, BISECTIONS, halve, (jnp.zeros_like(dot), jnp.ones_like(dot)))
    weight = (low + high) / 2
    return weight, _ratio(radius, norm(weight))


def _ratio(part: Array, whole: Array) -> Array:
    return jnp.where(whole > 0, part / jnp.where(whole > 0, whole, 1), 0)
