"""One tile of scores at a time -> attention of one key-value head, and its gradient: the bodies of the TPU kernels.

Each runs on the grid (key-value head, tile), tiles in the order of a list that lies in scalar memory. The blocks that
a tile needs are fetched by Pallas; what accumulates over the tiles of one query block, or of one key block, stays in
scratch memory from its first tile to its last. Rows of a block are the queries of all heads of a group, [group, query].

Integers and statistics of the rows come as columns of eight where rows lie along sublanes, and as rows of eight where
they lie along lanes, so that nothing has to be turned inside a kernel.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from harnessrl_jax.attention.plan import tile_full, tile_key, tile_query
from harnessrl_jax.attention.tiles import FLOOR, MASKED, seen_pairs

LANES, EIGHT = 128, 8
Ref = Any  # a Pallas reference has no public type


def forward_kernel(
    tiles: Ref,
    start: Ref,
    places: Ref,
    bounds: Ref,
    q: Ref,
    k: Ref,
    v: Ref,
    out: Ref,
    logsum: Ref,
    top: Ref,
    total: Ref,
    sum_out: Ref,
    *,
    window: bool,
) -> None:
    """Output and log-sum-exp of one query block, with an online softmax. Statistics are the same in every lane."""
    tile, first, last = _step(tiles, start, tile_query)

    @pl.when(first)
    def _() -> None:
        top[...] = jnp.full_like(top, FLOOR)
        total[...] = jnp.zeros_like(total)
        sum_out[...] = jnp.zeros_like(sum_out)

    def visit(partly: bool) -> None:
        scores = _dot_rows(q[...], k[...])
        if partly:
            scores = jnp.where(_seen(places, bounds, scores.shape[0], window), scores, MASKED)
        old = top[...]
        new = jnp.maximum(old, scores.max(1, keepdims=True))
        weights, shrink = jnp.exp(scores - new[:, :1]), jnp.exp(old - new)
        top[...] = new
        total[...] = total[...] * shrink + weights.sum(1, keepdims=True)
        sum_out[...] = sum_out[...] * shrink[:, :1] + _dot(weights.astype(v.dtype), v[...])

    _visit(tile, visit)

    @pl.when(last)
    def _() -> None:
        some = total[...] > 0.0
        safe = jnp.where(some, total[...], 1.0)
        out[...] = (sum_out[...] / safe[:, :1]).astype(out.dtype)
        logsum[...] = jnp.where(some, top[...] + jnp.log(safe), 0.0)


def queries_kernel(
    tiles: Ref,
    start: Ref,
    places: Ref,
    bounds: Ref,
    q: Ref,
    k: Ref,
    v: Ref,
    d_out: Ref,
    statistics: Ref,
    dq: Ref,
    sum_dq: Ref,
    *,
    window: bool,
) -> None:
    """Cotangent of one query block; `statistics` has the log-sum-exp and delta of each row as its first columns."""
    tile, first, last = _step(tiles, start, tile_query)

    @pl.when(first)
    def _() -> None:
        sum_dq[...] = jnp.zeros_like(sum_dq)

    def visit(partly: bool) -> None:
        scores = _dot_rows(q[...], k[...])
        if partly:
            scores = jnp.where(_seen(places, bounds, scores.shape[0], window), scores, MASKED)
        weights = jnp.exp(scores - statistics[:, 0:1])
        d_scores = weights * (_dot_rows(d_out[...], v[...]) - statistics[:, 1:2])
        sum_dq[...] += _dot(d_scores.astype(k.dtype), k[...])

    _visit(tile, visit)

    @pl.when(last)
    def _() -> None:
        dq[...] = sum_dq[...].astype(dq.dtype)


def keys_kernel(
    tiles: Ref,
    start: Ref,
    places: Ref,
    bounds: Ref,
    q: Ref,
    k: Ref,
    v: Ref,
    d_out: Ref,
    statistics: Ref,
    dk: Ref,
    dv: Ref,
    sum_dk: Ref,
    sum_dv: Ref,
    *,
    window: bool,
) -> None:
    """Cotangents of one block of keys and values. Scores are [key, row] here, so all products are plain ones."""
    tile, first, last = _step(tiles, start, tile_key)

    @pl.when(first)
    def _() -> None:
        sum_dk[...] = jnp.zeros_like(sum_dk)
        sum_dv[...] = jnp.zeros_like(sum_dv)

    def visit(partly: bool) -> None:
        scores = _dot_rows(k[...], q[...])
        if partly:
            rows = [places[n : n + 1, :] for n in range(1 + window)]
            columns = [bounds[:, n : n + 1] for n in range(2 + window)]
            scores = jnp.where(seen_pairs(rows, columns), scores, MASKED)
        weights = jnp.exp(scores - statistics[0:1, :])
        d_scores = weights * (_dot_rows(v[...], d_out[...]) - statistics[1:2, :])
        sum_dv[...] += _dot(weights.astype(d_out.dtype), d_out[...])
        sum_dk[...] += _dot(d_scores.astype(q.dtype), q[...])

    _visit(tile, visit)

    @pl.when(last)
    def _() -> None:
        dk[...] = sum_dk[...].astype(dk.dtype)
        dv[...] = sum_dv[...].astype(dv.dtype)


def _step(tiles: Ref, start: Ref, block_of: Callable[[Array], Array]) -> tuple[Array, Array, Array]:
    """The tile of this grid step, and whether it is the first and the last of its block."""
    step = pl.program_id(1)
    tile = tiles[step]
    block = block_of(tile)
    return tile, step == start[block], step + 1 == start[block + 1]


def _visit(tile: Int[Array, ""], visit: Callable[[bool], None]) -> None:
    """Runs the tile's arithmetic, without a mask where every pair is visible."""
    full = tile_full(tile)
    pl.when(full)(partial(visit, False))
    pl.when(jnp.logical_not(full))(partial(visit, True))


def _seen(places: Ref, bounds: Ref, rows: int, window: bool) -> Bool[Array, "row key"]:
    """Visible pairs, with rows along sublanes; the heads of a group have the same places."""
    every = jnp.tile(places[...], (rows // places.shape[0], 1))
    columns = [every[:, n : n + 1] for n in range(1 + window)]
    return seen_pairs(columns, [bounds[n : n + 1, :] for n in range(2 + window)])


def _dot(a: Float[Array, "row inner"], b: Float[Array, "inner column"]) -> Float[Array, "row column"]:
    return lax.dot(a, b, precision=_precision(a), preferred_element_type=jnp.float32)


def _dot_rows(a: Float[Array, "row inner"], b: Float[Array, "column inner"]) -> Float[Array, "row column"]:
    """The product with the second matrix turned."""
    dims = (((1,), (1,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=_precision(a), preferred_element_type=jnp.float32)


def _precision(x: Array) -> lax.Precision:
    """f32 stays f32: the default of the hardware would round it to bf16."""
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
