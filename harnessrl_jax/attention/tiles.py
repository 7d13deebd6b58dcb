"""Blocks of one row -> attention and its gradient, tile by tile: the arithmetic of blockwise attention.

Every matrix product is of the form [rows, inner] x [inner, columns]: XLA on CPU runs batched products with a
transposed left side at less than half that rate, so each transpose is laid out once, before the loop.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from harnessrl_jax.attention.plan import tile_full, tile_key

MASKED = -1e30  # score of a pair that is not visible
FLOOR = -1e29  # least running maximum: exp(MASKED - FLOOR) is exactly 0, also in a tile without a visible pair

Queries = Float[Array, "query kv group dim"]
Keys = Float[Array, "key kv dim"]
PerQuery = Float[Array, "query kv group"]
Places = Int[Array, "place query"]
Bounds = Int[Array, "bound key"]
Tiles = Int[Array, " tile"]
Starts = Int[Array, " query_block_and_end"]


def forward(
    q: Queries, k: Keys, v: Keys, places: Places, bounds: Bounds, by_query: Tiles, start: Starts, key_blocks: int
) -> tuple[Queries, PerQuery]:
    """Softmax attention of one row with an online softmax, O(query + key) memory.

    Args:
      q: scaled queries, grouped by the key-value head they read.
      k: keys.
      v: values.
      places: of the queries, as from `comparisons`.
      bounds: of the keys, as from `comparisons`.
      by_query: tiles to visit, as in `TilePlan`.
      start: where each query block's tiles start, as in `TilePlan`.
      key_blocks: how many blocks the keys have.

    Returns:
      The output, and the log-sum-exp of every query's visible scores (0 where it sees none), needed to go back.
    """
    query_blocks = start.shape[0] - 1
    wide = jnp.promote_types(q.dtype, jnp.float32)
    queries, places = fold_queries(q, query_blocks), fold_integers(places, query_blocks)
    keys, values = jnp.swapaxes(fold_keys(k, key_blocks), -1, -2), fold_keys(v, key_blocks)
    bounds = fold_integers(bounds, key_blocks)

    def block(arguments: tuple[Array, ...]) -> tuple[Array, Array]:
        qi, places_i, first, end = arguments

        def tile(n: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, out = carry
            j = tile_key(by_query[n])
            scores = masked(product(qi, keys[j]), places_i, bounds[j], tile_full(by_query[n]))
            new_top = jnp.maximum(top, scores.max(-1))
            weights = jnp.exp(scores - new_top[..., None])
            shrink = jnp.exp(top - new_top)
            out = out * shrink[..., None] + product(weights.astype(v.dtype), values[j])
            return new_top, total * shrink + weights.sum(-1), out

        begin = jnp.full(qi.shape[:-1], FLOOR, wide), jnp.zeros(qi.shape[:-1], wide), jnp.zeros(qi.shape, wide)
        top, total, out = lax.fori_loop(first, end, tile, begin)
        some = total > 0.0
        safe = jnp.where(some, total, 1.0)
        return (out / safe[..., None]).astype(q.dtype), jnp.where(some, top + jnp.log(safe), 0.0)

    out, logsum = lax.map(block, (queries, places, start[:-1], start[1:]))
    return unfold_queries(out, q.shape), unfold_queries(logsum[..., None], (*q.shape[:3], 1))[..., 0]


def backward(
    q: Queries,
    k: Keys,
    v: Keys,
    places: Places,
    bounds: Bounds,
    by_query: Tiles,
    start: Starts,
    key_blocks: int,
    logsum: PerQuery,
    delta: PerQuery,
    d_out: Queries,
) -> tuple[Queries, Keys, Keys]:
    """Gradient of `forward` with respect to q, k and v; scores are recomputed tile by tile.

    Args:
      q: as given to `forward`.
      k: as given to `forward`.
      v: as given to `forward`.
      places: as given to `forward`.
      bounds: as given to `forward`.
      by_query: as given to `forward`.
      start: as given to `forward`.
      key_blocks: as given to `forward`.
      logsum: what `forward` returned.
      delta: what a weight's cotangent loses to the normalisation; see `differentiable`.
      d_out: cotangent of the output.

    Returns:
      Cotangents of q, k and v.
    """
    query_blocks = start.shape[0] - 1
    wide = jnp.promote_types(q.dtype, jnp.float32)
    queries, d_outs = fold_queries(q, query_blocks), fold_queries(d_out, query_blocks)
    logsums, deltas = (fold_queries(x[..., None], query_blocks) for x in (logsum, delta))
    keys, values = fold_keys(k, key_blocks), fold_keys(v, key_blocks)
    keys_t, values_t = jnp.swapaxes(keys, -1, -2), jnp.swapaxes(values, -1, -2)
    places, bounds = fold_integers(places, query_blocks), fold_integers(bounds, key_blocks)

    def block(carry: tuple[Array, Array], arguments: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        qi, d_out_i, logsum_i, delta_i, places_i, first, end = arguments
        qi_t, d_out_t = lax.optimization_barrier((jnp.swapaxes(qi, -1, -2), jnp.swapaxes(d_out_i, -1, -2)))

        def tile(n: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dq, dk_t, dv_t = carry
            j = tile_key(by_query[n])
            scores = masked(product(qi, keys_t[j]), places_i, bounds[j], tile_full(by_query[n]))
            weights = jnp.exp(scores - logsum_i)
            d_scores = weights * (product(d_out_i, values_t[j]) - delta_i)
            weights, d_scores = weights.astype(q.dtype), d_scores.astype(q.dtype)
            dk_t = dk_t.at[j].add(product(qi_t, d_scores))
            dv_t = dv_t.at[j].add(product(d_out_t, weights))
            return dq + product(d_scores, keys[j]), dk_t, dv_t

        dq, dk_t, dv_t = lax.fori_loop(first, end, tile, (jnp.zeros(qi.shape, wide), *carry))
        return (dk_t, dv_t), dq.astype(q.dtype)

    begin = jnp.zeros(keys_t.shape, wide), jnp.zeros(values_t.shape, wide)
    arguments = (queries, d_outs, logsums, deltas, places, start[:-1], start[1:])
    (dk_t, dv_t), dq = lax.scan(block, begin, arguments)
    unfold_keys = lambda x, like: x.transpose(0, 3, 1, 2).reshape(like.shape).astype(like.dtype)
    return unfold_queries(dq, q.shape), unfold_keys(dk_t, k), unfold_keys(dv_t, v)


def masked(scores: Array, places: Array, bounds: Array, full: Bool[Array, ""]) -> Array:
    """The scores of one tile [kv, group * block_q, block_k], MASKED where the pair is not visible.

    The branch is not only for the full tiles, which are left as they are: without it XLA for CPU fuses the slice of the
    bounds into the comparisons, and a masked tile takes as long as three of the products.
    """

    def hidden(scores: Array) -> Array:
        seen = seen_pairs(jnp.tile(places, scores.shape[1] // places.shape[1])[..., None], bounds[:, None, :])
        return jnp.where(seen[None], scores, MASKED)

    return lax.cond(full, lambda scores: scores, hidden, scores)


def seen_pairs(places: Sequence[Array] | Array, bounds: Sequence[Array] | Array) -> Bool[Array, "rows columns"]:
    """Which pairs are visible, from the integers of `comparisons`: places along one axis, bounds along the other."""
    seen = (bounds[0] <= places[0]) & (places[0] < bounds[1])
    return seen & (places[1] < bounds[2]) if len(places) > 1 else seen


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


def fold_integers(x: Int[Array, "row slot"], blocks: int) -> Int[Array, "block row slot_in_block"]:
    """Places or bounds, block by block."""
    return x.reshape(x.shape[0], blocks, -1).swapaxes(0, 1)
