"""Queries, keys, values, tree mask and plan -> attention output, by Pallas kernels for TPUs.

The grid has one step a tile that holds a visible pair, so its length is data: one compilation serves every tree of a
row length. All heads that share a key-value head go through one matrix product.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from harnessrl_jax.attention.batching import differentiable
from harnessrl_jax.attention.mask import TreeMask, comparisons
from harnessrl_jax.attention.pallas_tpu_kernels import EIGHT, LANES, forward_kernel, keys_kernel, queries_kernel
from harnessrl_jax.attention.plan import TilePlan, tile_key, tile_query
from harnessrl_jax.errors import ModelError

SCALAR_BYTES = 512 * 1024  # for one tile list: half of a core's scalar memory


def pallas_tpu_attention(
    q: Float[Array, "query head dim"],
    k: Float[Array, "key kv dim"],
    v: Float[Array, "key kv dim"],
    mask: TreeMask,
    plan: TilePlan,
    *,
    scale: float,
    interpret: bool = False,
) -> tuple[Float[Array, "query head dim"], Float[Array, "query head"]]:
    """`blockwise_attention` on a TPU, forward and backward.

    Args:
      q: queries in f32 or bf16; head h reads key-value head h // (heads / kv heads).
      k: keys.
      v: values.
      mask: which key each query sees. A query that sees none gets 0.
      plan: tiles to visit; blocks of queries a multiple of 16, of keys a multiple of 128. Its window counts.
      scale: factor of the scores.
      interpret: run the kernels' meaning on any platform, slowly: for tests.

    Returns:
      The attention output, in the type of `q`, and the log-sum-exp of each query's visible scores (0 where it sees
      none), in f32. Differentiable through both.

    Raises:
      ModelError: types or block sizes that the kernels cannot take.

    References:
      Dao 2023, https://arxiv.org/abs/2307.08691; the form of the kernels follows JAX's splash attention.
    """
    _check(q, plan, k.shape[0])
    queries, heads, dim = q.shape
    kv = k.shape[1]
    grouped = (q * scale).reshape(queries, kv, heads // kv, dim)
    lists = (plan.by_query, plan.query_start, plan.by_key, plan.key_start)
    out, logsum = _attend(interpret)(grouped, k, v, *comparisons(mask, plan.window), *lists)
    return out.reshape(q.shape), logsum.reshape(queries, heads)


def _check(q: Array, plan: TilePlan, keys: int) -> None:
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        raise ModelError(
            f"pallas_tpu attention: wants f32 or bf16, got {q.dtype}; cast q, k and v, or use 'blockwise'."
        )
    block_q, block_k = q.shape[0] // plan.blocks[0], keys // plan.blocks[1]
    if block_q % 16 or block_k % LANES:
        raise ModelError(
            f"pallas_tpu attention: the plan has blocks of {block_q} queries and {block_k} keys; wants multiples of 16 "
            "and 128: make_plan(mask, block_q=128, block_k=256), and rows of a multiple of that."
        )
    size = 4 * plan.by_query.shape[-1]
    if size > SCALAR_BYTES:
        raise ModelError(
            f"pallas_tpu attention: a list of {size // 4} tiles does not fit into scalar memory ({SCALAR_BYTES // 4}); "
            f"take larger blocks than {block_q} queries and {block_k} keys."
        )


@cache
def _attend(interpret: bool) -> Callable[..., tuple[Array, Array]]:
    return differentiable(partial(_forward, interpret=interpret), partial(_backward, interpret=interpret))


class _Sizes(NamedTuple):
    """Of one row."""

    kv: int
    group: int
    dim: int
    query_blocks: int
    key_blocks: int
    block_q: int
    block_k: int

    @property
    def rows(self) -> int:
        return self.group * self.block_q


def _sizes(q: Array, k: Array, query_start: Array, key_start: Array) -> _Sizes:
    queries, kv, group, dim = q.shape
    query_blocks, key_blocks = query_start.shape[0] - 1, key_start.shape[0] - 1
    return _Sizes(kv, group, dim, query_blocks, key_blocks, queries // query_blocks, k.shape[0] // key_blocks)


def _forward(
    q: Array, k: Array, v: Array, places: Array, bounds: Array, *lists: Array, interpret: bool
) -> tuple[Array, Array]:
    by_query, query_start, _, key_start = lists
    s = _sizes(q, k, query_start, key_start)
    out, logsum = _call(
        partial(forward_kernel, window=len(places) > 1),
        (by_query, query_start),
        [
            (_columns(places, s.query_blocks), _spec(tile_query, s.block_q, EIGHT, heads=False)),
            (_rows(bounds, s.key_blocks), _spec(tile_key, EIGHT, s.block_k, heads=False)),
            (_fold_queries(q, s), _spec(tile_query, s.rows, s.dim)),
            (_fold_keys(k, s), _spec(tile_key, s.block_k, s.dim)),
            (_fold_keys(v, s), _spec(tile_key, s.block_k, s.dim)),
        ],
        [
            (jax.ShapeDtypeStruct((s.kv, s.query_blocks, s.rows, s.dim), q.dtype), tile_query),
            (jax.ShapeDtypeStruct((s.kv, s.query_blocks, s.rows, LANES), jnp.float32), tile_query),
        ],
        [(s.rows, LANES), (s.rows, LANES), (s.rows, s.dim)],
        interpret,
    )
    return _unfold_queries(out, s), _unfold_queries(logsum[..., :1], s)[..., 0]


def _backward(
    q: Array, k: Array, v: Array, places: Array, bounds: Array, *rest: Array, interpret: bool
) -> tuple[Array, Array, Array]:
    by_query, query_start, by_key, key_start, logsum, delta, d_out = rest
    s = _sizes(q, k, query_start, key_start)
    statistics = _fold_queries(jnp.stack([logsum, delta], axis=-1), s)
    folded = [
        (_fold_queries(q, s), _spec(tile_query, s.rows, s.dim)),
        (_fold_keys(k, s), _spec(tile_key, s.block_k, s.dim)),
        (_fold_keys(v, s), _spec(tile_key, s.block_k, s.dim)),
        (_fold_queries(d_out, s), _spec(tile_query, s.rows, s.dim)),
    ]
    (dq,) = _call(
        partial(queries_kernel, window=len(places) > 1),
        (by_query, query_start),
        [
            (_columns(places, s.query_blocks), _spec(tile_query, s.block_q, EIGHT, heads=False)),
            (_rows(bounds, s.key_blocks), _spec(tile_key, EIGHT, s.block_k, heads=False)),
            *folded,
            (_pad(statistics, -1), _spec(tile_query, s.rows, EIGHT)),
        ],
        [(jax.ShapeDtypeStruct((s.kv, s.query_blocks, s.rows, s.dim), q.dtype), tile_query)],
        [(s.rows, s.dim)],
        interpret,
    )
    dk, dv = _call(
        partial(keys_kernel, window=len(places) > 1),
        (by_key, key_start),
        [
            (jnp.tile(_rows(places, s.query_blocks), s.group), _spec(tile_query, EIGHT, s.rows, heads=False)),
            (_columns(bounds, s.key_blocks), _spec(tile_key, s.block_k, EIGHT, heads=False)),
            *folded,
            (_pad(jnp.swapaxes(statistics, -1, -2), -2), _spec(tile_query, EIGHT, s.rows)),
        ],
        [(jax.ShapeDtypeStruct((s.kv, s.key_blocks, s.block_k, s.dim), x.dtype), tile_key) for x in (k, v)],
        [(s.block_k, s.dim)] * 2,
        interpret,
    )
    return _unfold_queries(dq, s), _unfold_keys(dk, k), _unfold_keys(dv, v)


def _call(
    kernel: Callable[..., None],
    scalars: tuple[Int[Array, " tile"], Int[Array, " block_and_end"]],
    inputs: Sequence[tuple[Array, pl.BlockSpec]],
    outputs: Sequence[tuple[jax.ShapeDtypeStruct, Callable[[Array], Array]]],
    scratch: Sequence[tuple[int, int]],
    interpret: bool,
) -> tuple[Array, ...]:
    """Runs the kernel over every key-value head and every tile; blocks without a tile come out as 0."""
    _, start = scalars
    results = pl.pallas_call(
        kernel,
        out_shape=tuple(shape for shape, _ in outputs),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(outputs[0][0].shape[0], start[-1]),
            in_specs=[spec for _, spec in inputs],
            out_specs=tuple(_spec(block_of, *shape.shape[2:]) for shape, block_of in outputs),
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
    )(*scalars, *(x for x, _ in inputs))
    visited = (start[1:] > start[:-1])[None, :, None, None]
    return tuple(jnp.where(visited, x, jnp.zeros_like(x)) for x in results)


def _spec(block_of: Callable[[Array], Array], rows: int, columns: int, *, heads: bool = True) -> pl.BlockSpec:
    """The block [rows, columns] that a tile needs of an array [kv, block, rows, columns], or [block, ...]."""
    if heads:
        return pl.BlockSpec(
            (None, None, rows, columns), lambda head, step, tiles, _: (head, block_of(tiles[step]), 0, 0)
        )
    return pl.BlockSpec((None, rows, columns), lambda head, step, tiles, _: (block_of(tiles[step]), 0, 0))


def _columns(x: Int[Array, "integer slot"], blocks: int) -> Int[Array, "block slot eight"]:
    """Places or bounds, block by block, with slots along sublanes."""
    return _pad(x.T, -1).reshape(blocks, -1, EIGHT)


def _rows(x: Int[Array, "integer slot"], blocks: int) -> Int[Array, "block eight slot"]:
    """Places or bounds, block by block, with slots along lanes."""
    return _columns(x, blocks).swapaxes(1, 2)


def _pad(x: Array, axis: int) -> Array:
    """Zeros up to a size of eight along an axis."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, EIGHT - x.shape[axis])
    return jnp.pad(x, widths)


def _fold_queries(x: Float[Array, "query kv group any"], s: _Sizes) -> Float[Array, "kv block row any"]:
    parts = x.reshape(s.query_blocks, s.block_q, s.kv, s.group, -1).transpose(2, 0, 3, 1, 4)
    return parts.reshape(s.kv, s.query_blocks, s.rows, -1)


def _unfold_queries(x: Float[Array, "kv block row any"], s: _Sizes) -> Float[Array, "query kv group any"]:
    parts = x.reshape(s.kv, s.query_blocks, s.group, s.block_q, -1).transpose(1, 3, 0, 2, 4)
    return parts.reshape(s.query_blocks * s.block_q, s.kv, s.group, -1)


def _fold_keys(x: Float[Array, "key kv dim"], s: _Sizes) -> Float[Array, "kv block slot dim"]:
    return x.reshape(s.key_blocks, s.block_k, s.kv, s.dim).transpose(2, 0, 1, 3)


def _unfold_keys(x: Float[Array, "kv block slot dim"], like: Float[Array, "key kv dim"]) -> Float[Array, "key kv dim"]:
    return x.transpose(1, 2, 0, 3).reshape(like.shape)
