"""Queries, keys, values, tree mask and plan -> attention output, by Pallas kernels for Hopper GPUs.

One thread block a head and block of queries (or keys): two warpgroups multiply, a third fetches the tiles that hold a
visible pair. How many there are is data: one compilation serves every tree of a row length.

Their matrix instructions are Hopper's alone: Blackwell, the next generation, has others. JAX's own kernels refuse masks
with CUDA 12.8.0 to 12.9.0, whose assembler has an error; take 12.9.1 or 13 for these too.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from harnessrl_jax.attention.batching import differentiable
from harnessrl_jax.attention.mask import TreeMask, comparisons
from harnessrl_jax.attention.pallas_gpu_kernels import (
    PLAIN,
    ROWS,
    STAGES,
    TENSOR_CORES,
    forward_kernel,
    keys_kernel,
    queries_kernel,
)
from harnessrl_jax.attention.plan import TilePlan
from harnessrl_jax.errors import ModelError

LANES = 64  # widths of a head that the kernels take: multiples of this
WIDEST = 128
LARGEST = 128  # side of a tile: with heads of 128 the kernels then use 196 of the 227 KiB of a Hopper's shared memory


def pallas_gpu_attention(
    q: Float[Array, "query head dim"],
    k: Float[Array, "key kv dim"],
    v: Float[Array, "key kv dim"],
    mask: TreeMask,
    plan: TilePlan,
    *,
    scale: float,
    interpret: Any = False,
) -> tuple[Float[Array, "query head dim"], Float[Array, "query head"]]:
    """`blockwise_attention` on a GPU of compute capability 9.0, forward and backward.

    Args:
      q: queries in bf16 or f16; head h reads key-value head h // (heads / kv heads).
      k: keys.
      v: values.
      mask: which key each query sees. A query that sees none gets 0.
      plan: tiles to visit; blocks of 64 or 128 queries and keys. Its window counts.
      scale: factor of the scores.
      interpret: parameters of Pallas' GPU interpreter, to run the kernels on a CPU, slowly: for tests.

    Returns:
      The attention output, in the type of `q`, and the log-sum-exp of each query's visible scores (0 where it sees
      none), in f32. Differentiable through both.

    Raises:
      ModelError: types, heads or block sizes that the kernels cannot take.

    References:
      Dao 2023, https://arxiv.org/abs/2307.08691; Shah et al. 2024, https://arxiv.org/abs/2407.08608 (one warpgroup
      that fetches, the others multiply)
    """
    if problem := refusal(q, k, plan):
        raise ModelError(f"pallas_gpu attention: {problem}")
    queries, heads, dim = q.shape
    kv = k.shape[1]
    wide = -dim % LANES  # columns of zeros change no product
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, wide))) for x in (q * scale, k, v))
    grouped = q.reshape(queries, kv, heads // kv, dim + wide)
    lists = (plan.by_query, plan.query_start, plan.by_key, plan.key_start)
    out, logsum = _attend(interpret)(grouped, k, v, *comparisons(mask, plan.window), *lists)
    return out.reshape(q.shape)[..., :dim], logsum.reshape(queries, heads)


def refusal(q: Float[Array, "query head dim"], k: Float[Array, "key kv dim"], plan: TilePlan) -> str | None:
    """What the kernels cannot take of these shapes and types and what to do about it; None where they can."""
    block_q, block_k = q.shape[0] // plan.blocks[0], k.shape[0] // plan.blocks[1]
    if q.dtype not in (jnp.bfloat16, jnp.float16) or k.dtype != q.dtype:
        return f"wants bf16 or f16 throughout, got q {q.dtype} and k {k.dtype}; cast them, or use 'blockwise'."
    if q.shape[-1] > WIDEST:
        return f"wants heads of at most {WIDEST}, got {q.shape[-1]}; use 'blockwise'."
    if any(size % ROWS or size > LARGEST for size in (block_q, block_k)):
        return (
            f"the plan has blocks of {block_q} queries and {block_k} keys; wants {ROWS} or {LARGEST}: "
            f"make_plan(mask, block_q={LARGEST}, block_k={LARGEST}), and rows of a multiple of that."
        )
    return None


@cache
def _attend(interpret: Any) -> Callable[..., tuple[Array, Array]]:
    return differentiable(partial(_forward, interpret=interpret), partial(_backward, interpret=interpret))


def _forward(
    q: Array, k: Array, v: Array, places: Array, bounds: Array, *lists: Array, interpret: Any
) -> tuple[Array, Array]:
    by_query, query_start, _, key_start = lists
    q, shape = _flat_heads(q), q.shape
    queries, heads, dim = q.shape
    blocks = query_start.shape[0] - 1
    workers, block_k = queries // blocks // ROWS, k.shape[0] // (key_start.shape[0] - 1)
    out, logsum = _call(
        forward_kernel,
        (by_query, query_start, places, bounds, q, k, v),
        [jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((heads, queries), jnp.float32)],
        [
            _blocks(workers, dim, q),
            _integers(workers, places),
            _blocks(STAGES, dim, k, block_k),
            _blocks(STAGES, dim, v, block_k),
            _integers(STAGES, bounds, block_k),
        ],
        [(workers, 2), (STAGES, 2), (STAGES, 1), (STAGES, workers), (STAGES, workers)],
        (heads, blocks, workers),
        interpret,
    )
    return out.reshape(shape), logsum.T.reshape(shape[:3])


def _backward(
    q: Array, k: Array, v: Array, places: Array, bounds: Array, *rest: Array, interpret: Any
) -> tuple[Array, Array, Array]:
    by_query, query_start, by_key, key_start, logsum, delta, d_out = rest
    q, shape = _flat_heads(q), q.shape
    (queries, heads, dim), keys = q.shape, k.shape[0]
    query_blocks, key_blocks = query_start.shape[0] - 1, key_start.shape[0] - 1
    block_q, block_k = queries // query_blocks, keys // key_blocks
    statistics = jnp.stack([_flat_heads(logsum).T, _flat_heads(delta).T], axis=1)
    inputs = (places, bounds, q, k, v, _flat_heads(d_out), statistics)
    workers = block_q // ROWS
    (dq,) = _call(
        queries_kernel,
        (by_query, query_start, *inputs),
        [jax.ShapeDtypeStruct(q.shape, q.dtype)],
        [
            _blocks(workers, dim, q),
            _blocks(workers, dim, q),
            _integers(workers, places),
            _statistics(workers),
            _blocks(STAGES, dim, k, block_k),
            _blocks(STAGES, dim, v, block_k),
            _integers(STAGES, bounds, block_k),
        ],
        [(workers, 4), (STAGES, 3), (STAGES, workers)],
        (heads, query_blocks, workers),
        interpret,
    )
    workers = block_k // ROWS
    parts = _call(
        keys_kernel,
        (by_key, key_start, *inputs),
        [jax.ShapeDtypeStruct((heads, keys, dim), jnp.float32)] * 2,
        [
            _blocks(workers, dim, k),
            _blocks(workers, dim, v),
            _integers(workers, bounds),
            _blocks(STAGES, dim, q, block_q),
            _blocks(STAGES, dim, q, block_q),
            _integers(STAGES, places, block_q),
            _statistics(STAGES, block_q),
        ],
        [(workers, 3), (STAGES, 4), (STAGES, workers)],
        (heads, key_blocks, workers),
        interpret,
    )
    dk, dv = (x.reshape(*shape[1:3], keys, dim).sum(1).swapaxes(0, 1) for x in parts)
    return dq.reshape(shape), dk.astype(k.dtype), dv.astype(v.dtype)


def _flat_heads(x: Float[Array, "query kv group *dim"]) -> Float[Array, "query head *dim"]:
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])


def _blocks(count: int, dim: int, like: Array, rows: int = ROWS) -> Any:
    return plgpu.SMEM((count, rows, dim), like.dtype)


def _integers(count: int, like: Array, slots: int = ROWS) -> Any:
    return plgpu.SMEM((count, like.shape[0], slots), jnp.int32)


def _statistics(count: int, slots: int = ROWS) -> Any:
    return plgpu.SMEM((count, 2, slots), jnp.float32)


def _call(
    kernel: Callable[..., None],
    inputs: Sequence[Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    buffers: Sequence[Any],
    barriers: Sequence[tuple[int, int]],
    sizes: tuple[int, int, int],
    interpret: Any,
) -> tuple[Array, ...]:
    """Runs a kernel for every (head, block), with so many workers that multiply and one that fetches."""
    heads, blocks, workers = sizes
    return plgpu.kernel(
        partial(kernel, products=PLAIN if interpret else TENSOR_CORES),
        out_type=list(outputs),
        scratch_types=[*buffers, *(plgpu.Barrier(num_barriers=n, num_arrivals=each) for n, each in barriers)],
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        grid=(heads, blocks),
        grid_names=("head", "block"),
        num_threads=workers + 1,
        thread_name="worker",
        interpret=interpret,
    )(*inputs)
