"""Blocks of one row -> attention and its gradient, tile by tile: the arithmetic of blockwise attention.

Every matrix product is of the form [rows, inner] x [inner, columns]: XLA on CPU runs batched products with a
transposed left side at less than half that rate, so each transpose is laid out once, before the loop.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from harnessrl_jax.attention.mask import TreeMask
from harnessrl_jax.attention.plan import TilePlan

MASKED = -1e30  # score of a pair that is not visible
FLOOR = -1e29  # least running maximum: exp(MASKED - FLOOR) is exactly 0, also in a tile without a visible pair

Queries = Float[Array, "query kv group dim"]
Keys = Float[Array, "key kv dim"]
LogSum = Float[Array, "query_block kv group_query"]


def forward(q: Queries, k: Keys, v: Keys, mask: TreeMask, plan: TilePlan) -> tuple[Queries, LogSum]:
    """Softmax attention of one row with an online softmax, O(query + key) memory.

    Args:
      q: scaled queries, grouped by the key-value head they read.
      k: keys.
      v: values.
      mask: intervals of the row.
      plan: tiles to visit.

    Returns:
      The output, and the log-sum-exp of every query's visible scores (0 where it sees none), needed to go back.
    """
    query_blocks, key_blocks = plan.key_block.shape
    wide = jnp.promote_types(q.dtype, jnp.float32)
    queries, places = fold_queries(q, query_blocks), mask.t.reshape(query_blocks, -1)
    keys, values = jnp.swapaxes(fold_keys(k, key_blocks), -1, -2), fold_keys(v, key_blocks)
    lo, hi = mask.lo.reshape(key_blocks, -1), mask.hi.reshape(key_blocks, -1)

    def block(arguments: tuple[Array, ...]) -> tuple[Array, Array]:
        qi, ti, order, active = arguments

        def tile(n: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, out = carry
            j = order[n]
            scores = masked_scores(qi, keys[j], ti, lo[j], hi[j])
            new_top = jnp.maximum(top, scores.max(-1))
            weights = jnp.exp(scores - new_top[..., None])
            shrink = jnp.exp(top - new_top)
            out = out * shrink[..., None] + product(weights.astype(v.dtype), values[j])
            return new_top, total * shrink + weights.sum(-1), out

        start = jnp.full(qi.shape[:-1], FLOOR, wide), jnp.zeros(qi.shape[:-1], wide), jnp.zeros(qi.shape, wide)
        top, total, out = lax.fori_loop(0, active, tile, start)
        some = total > 0.0
        safe = jnp.where(some, total, 1.0)
        return (out / safe[..., None]).astype(q.dtype), jnp.where(some, top + jnp.log(safe), 0.0)

    out, logsum = lax.map(block, (queries, places, plan.key_block, plan.active))
    return unfold_queries(out, q.shape), logsum


def backward(
    q: Queries, k: Keys, v: Keys, mask: TreeMask, plan: TilePlan, out: Queries, logsum: LogSum, d_out: Queries
) -> tuple[Queries, Keys, Keys]:
    """Gradient of `forward` with respect to q, k and v; scores are recomputed tile by tile.

    Args:
      q: as given to `forward`.
      k: as given to `forward`.
      v: as given to `forward`.
      mask: as given to `forward`.
      plan: as given to `forward`.
      out: what `forward` returned.
      logsum: what `forward` returned.
      d_out: cotangent of `out`.

    Returns:
      Cotangents of q, k and v.
    """
    query_blocks, key_blocks = plan.key_block.shape
    wide = jnp.promote_types(q.dtype, jnp.float32)
    queries, d_outs = fold_queries(q, query_blocks), fold_queries(d_out, query_blocks)
    shared = (fold_queries(out, query_blocks).astype(wide) * d_outs.astype(wide)).sum(-1)
    keys, values = fold_keys(k, key_blocks), fold_keys(v, key_blocks)
    keys_t, values_t = jnp.swapaxes(keys, -1, -2), jnp.swapaxes(values, -1, -2)
    places = mask.t.reshape(query_blocks, -1)
    lo, hi = mask.lo.reshape(key_blocks, -1), mask.hi.reshape(key_blocks, -1)

    def block(carry: tuple[Array, Array], arguments: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        qi, d_out_i, logsum_i, shared_i, ti, order, active = arguments
        qi_t, d_out_t = lax.optimization_barrier((jnp.swapaxes(qi, -1, -2), jnp.swapaxes(d_out_i, -1, -2)))

        def tile(n: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dq, dk_t, dv_t = carry
            j = order[n]
            weights = jnp.exp(masked_scores(qi, keys_t[j], ti, lo[j], hi[j]) - logsum_i[..., None])
            d_scores = weights * (product(d_out_i, values_t[j]) - shared_i[..., None])
            weights, d_scores = weights.astype(q.dtype), d_scores.astype(q.dtype)
            dk_t = dk_t.at[j].add(product(qi_t, d_scores))
            dv_t = dv_t.at[j].add(product(d_out_t, weights))
            return dq + product(d_scores, keys[j]), dk_t, dv_t

        dq, dk_t, dv_t = lax.fori_loop(0, active, tile, (jnp.zeros(qi.shape, wide), *carry))
        return (dk_t, dv_t), dq.astype(q.dtype)

    start = jnp.zeros(keys_t.shape, wide), jnp.zeros(values_t.shape, wide)
    arguments = (queries, d_outs, logsum, shared, places, plan.key_block, plan.active)
    (dk_t, dv_t), dq = lax.scan(block, start, arguments)
    unfold_keys = lambda x, like: x.transpose(0, 3, 1, 2).reshape(like.shape).astype(like.dtype)
    return unfold_queries(dq, q.shape), unfold_keys(dk_t, k), unfold_keys(dv_t, v)


def masked_scores(qi: Array, keys_t: Array, t: Array, lo: Array, hi: Array) -> Array:
    """Scores of one tile [kv, group * block_q, block_k], MASKED where the pair is not visible."""
    t = jnp.tile(t, qi.shape[-2] // t.shape[0])[:, None]
    seen = (lo[None, :] <= t) & (t < hi[None, :])
    return jnp.where(seen[None], product(qi, keys_t), MASKED)


def product(a: Float[Array, "kv rows inner"], b: Float[Array, "kv inner columns"]) -> Float[Array, "kv rows columns"]:
    """Matrix product per key-value head, accumulated in at least f32."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return lax.dot_general(a, b, (((2,), (1,)), ((0,), (0,))), preferred_element_type=wide)


def fold_queries(x: Queries, blocks: int) -> Float[Array, "query_block kv group_query dim"]:
    """Query blocks, with the heads of one group and the queries of a block in one axis."""
    slots, kv, group, dim = x.shape
    folded = x.reshape(blocks, slots // blocks, kv, group, dim).transpose(0, 2, 3, 1, 4)
    return folded.reshape(blocks, kv, group * (slots // blocks), dim)


def unfold_queries(x: Float[Array, "query_block kv group_query dim"], shape: tuple[int, ...]) -> Queries:
    """The inverse of `fold_queries`."""
    slots, kv, group, dim = shape
    unfolded = x.reshape(x.shape[0], kv, group, slots // x.shape[0], dim).transpose(0, 3, 1, 2, 4)
    return unfolded.reshape(shape)


def fold_keys(x: Keys, blocks: int) -> Float[Array, "key_block kv block dim"]:
    """Key blocks with the head axis first."""
    slots, kv, dim = x.shape
    return x.reshape(blocks, slots // blocks, kv, dim).transpose(0, 2, 1, 3)
