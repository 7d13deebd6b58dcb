"""Tiles of scores -> attention of one head, and its gradient: the bodies of the GPU kernels.

A thread block has the grid place (head, block of queries or of keys) and walks through the tiles of its block, in the
order of a list in global memory. Its workers are warpgroups. The last one only fetches: it copies what the next tiles
need into a ring of shared memory, and waits where the ring is full. Each of the others keeps 64 rows of the block,
their statistics and their sums in registers from the first tile to the last, so nothing is added between workers.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from harnessrl_jax.attention.plan import tile_full, tile_key, tile_query
from harnessrl_jax.attention.tiles import FLOOR, MASKED, seen_pairs

ROWS = 64  # of a warpgroup's matrix product, and so of a worker
STAGES = 2  # tiles in shared memory: one in use, one under way
LOG2E = math.log2(math.e)  # the hardware's exponential has base 2
Ref = Any  # a Pallas reference has no public type


class Products(NamedTuple):
    """The matrix products of a worker, in f32. The kernels differ in nothing else between a GPU and the interpreter."""

    turned: Callable[[Ref, Ref], Float[Array, "row column"]]
    """a [row, inner] and b [column, inner] in shared memory -> a bᵀ."""
    added: Callable[[Float[Array, "row column"], Float[Array, "row inner"], Ref], Float[Array, "row column"]]
    """sum and a [row, inner] in registers, b [inner, column] in shared memory -> sum + a b."""


def _turned(a: Ref, b: Ref) -> Array:
    def run(sums: Ref) -> Array:
        plgpu.wgmma(sums, a, b.transpose((1, 0)))
        return sums[...]

    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[0]), jnp.float32))


def _added(total: Array, a: Array, b: Ref) -> Array:
    result: Any = pl.run_state(lambda sums: plgpu.wgmma(sums, a, b))(plgpu.WGMMAAccumulatorRef.init(total))
    return result


TENSOR_CORES = Products(_turned, _added)
"""By asynchronous matrix instructions of a warpgroup (WGMMA, compute capability 9.0)."""

PLAIN = Products(
    turned=lambda a, b: _dot(a[...], b[...], 1),
    added=lambda total, a, b: total + _dot(a, b[...], 0),
)
"""The same in JAX. Pallas' interpreter knows no turned operands and no operands in registers."""


def _dot(a: Array, b: Array, inner_of_b: int) -> Array:
    return lax.dot_general(a, b, (((1,), (inner_of_b,)), ((), ())), preferred_element_type=jnp.float32)


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
    q_own: Ref,
    places_own: Ref,
    k_ring: Ref,
    v_ring: Ref,
    bounds_ring: Ref,
    own_here: Ref,
    k_here: Ref,
    v_here: Ref,
    k_free: Ref,
    v_free: Ref,
    *,
    products: Products,
) -> None:
    """Output and log-sum-exp of one query block, with an online softmax."""
    head, key_head = lax.axis_index("head"), _key_head(q, k)
    worker, workers = lax.axis_index("worker"), q_own.shape[0]
    # In depth-first order later queries see more keys: the dearest blocks go first.
    block = start.shape[0] - 2 - lax.axis_index("block")
    first, end = start[block], start[block + 1]
    block_k, dim = k_ring.shape[1:]

    @pl.when(worker == workers)
    def _() -> None:
        _take_registers(workers, fetch=True)

        def copy(n: Array, slot: Array) -> None:
            keys = pl.ds(tile_key(tiles[n]) * block_k, block_k)
            plgpu.copy_gmem_to_smem(k.at[keys, key_head], k_ring.at[slot], k_here.at[slot])
            plgpu.copy_gmem_to_smem(bounds.at[:, keys], bounds_ring.at[slot], k_here.at[slot])
            plgpu.copy_gmem_to_smem(v.at[keys, key_head], v_ring.at[slot], v_here.at[slot])

        _fetch(first, end, copy, (k_free, v_free))

    @pl.when(worker < workers)
    def _() -> None:
        _take_registers(workers, fetch=False)
        rows = pl.ds((block * workers + worker) * ROWS, ROWS)
        mine = q_own.at[worker]
        plgpu.copy_gmem_to_smem(q.at[rows, head], mine, own_here.at[worker])
        plgpu.copy_gmem_to_smem(places.at[:, rows], places_own.at[worker], own_here.at[worker])
        plgpu.barrier_wait(own_here.at[worker])

        def visit(n: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, sum_out = carry
            slot, full = lax.rem(n - first, STAGES), tile_full(tiles[n])
            plgpu.barrier_wait(k_here.at[slot])
            scores = products.turned(mine, k_ring.at[slot])
            scores = _masked(scores, full, places_own.at[worker], bounds_ring.at[slot], 0)
            plgpu.barrier_arrive(k_free.at[slot])
            new = jnp.maximum(top, scores.max(1) * LOG2E)
            weights, shrink = jnp.exp2(scores * LOG2E - _spread(new, scores, 0)), jnp.exp2(top - new)
            total = total * shrink + weights.sum(1)
            plgpu.barrier_wait(v_here.at[slot])
            sum_out = products.added(sum_out * _spread(shrink, sum_out, 0), weights.astype(v.dtype), v_ring.at[slot])
            plgpu.barrier_arrive(v_free.at[slot])
            return new, total, sum_out

        zero = jnp.zeros(ROWS, jnp.float32)
        begin = zero + FLOOR, zero, jnp.zeros((ROWS, dim), jnp.float32)
        top, total, sum_out = lax.fori_loop(first, end, visit, begin)
        some = total > 0.0
        safe = jnp.where(some, total, 1.0)
        logsum[head, rows] = jnp.where(some, top / LOG2E + jnp.log(safe), 0.0)
        _write((sum_out / _spread(safe, sum_out, 0)).astype(out.dtype), mine, out.at[rows, head])


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
    q_own: Ref,
    d_out_own: Ref,
    places_own: Ref,
    statistics_own: Ref,
    k_ring: Ref,
    v_ring: Ref,
    bounds_ring: Ref,
    own_here: Ref,
    ring_here: Ref,
    ring_free: Ref,
    *,
    products: Products,
) -> None:
    """Cotangent of one query block; `statistics` has the log-sum-exp and delta of each query."""
    head, key_head = lax.axis_index("head"), _key_head(q, k)
    worker, workers = lax.axis_index("worker"), q_own.shape[0]
    block = start.shape[0] - 2 - lax.axis_index("block")
    first, end = start[block], start[block + 1]
    block_k, dim = k_ring.shape[1:]

    @pl.when(worker == workers)
    def _() -> None:
        _take_registers(workers, fetch=True)

        def copy(n: Array, slot: Array) -> None:
            keys = pl.ds(tile_key(tiles[n]) * block_k, block_k)
            plgpu.copy_gmem_to_smem(k.at[keys, key_head], k_ring.at[slot], ring_here.at[slot])
            plgpu.copy_gmem_to_smem(v.at[keys, key_head], v_ring.at[slot], ring_here.at[slot])
            plgpu.copy_gmem_to_smem(bounds.at[:, keys], bounds_ring.at[slot], ring_here.at[slot])

        _fetch(first, end, copy, (ring_free,))

    @pl.when(worker < workers)
    def _() -> None:
        _take_registers(workers, fetch=False)
        rows, here = pl.ds((block * workers + worker) * ROWS, ROWS), own_here.at[worker]
        plgpu.copy_gmem_to_smem(q.at[rows, head], q_own.at[worker], here)
        plgpu.copy_gmem_to_smem(d_out.at[rows, head], d_out_own.at[worker], here)
        plgpu.copy_gmem_to_smem(places.at[:, rows], places_own.at[worker], here)
        plgpu.copy_gmem_to_smem(statistics.at[head, :, rows], statistics_own.at[worker], here)
        plgpu.barrier_wait(here)
        logsum, delta = statistics_own[worker, 0] * LOG2E, statistics_own[worker, 1]

        def visit(n: Array, sum_dq: Array) -> Array:
            slot, full = lax.rem(n - first, STAGES), tile_full(tiles[n])
            plgpu.barrier_wait(ring_here.at[slot])
            for keys in _chunks(block_k):
                k_part, v_part = k_ring.at[slot, keys], v_ring.at[slot, keys]
                scores = products.turned(q_own.at[worker], k_part)
                scores = _masked(scores, full, places_own.at[worker], bounds_ring.at[slot, :, keys], 0)
                weights = jnp.exp2(scores * LOG2E - _spread(logsum, scores, 0))
                d_weights = products.turned(d_out_own.at[worker], v_part)
                d_scores = weights * (d_weights - _spread(delta, scores, 0))
                sum_dq = products.added(sum_dq, d_scores.astype(k.dtype), k_part)
            plgpu.barrier_arrive(ring_free.at[slot])
            return sum_dq

        sum_dq = lax.fori_loop(first, end, visit, jnp.zeros((ROWS, dim), jnp.float32))
        _write(sum_dq.astype(dq.dtype), q_own.at[worker], dq.at[rows, head])


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
    k_own: Ref,
    v_own: Ref,
    bounds_own: Ref,
    q_ring: Ref,
    d_out_ring: Ref,
    places_ring: Ref,
    statistics_ring: Ref,
    own_here: Ref,
    ring_here: Ref,
    ring_free: Ref,
    *,
    products: Products,
) -> None:
    """What one query head adds to the cotangents of one block of keys and values. Scores are [key, query] here."""
    head, key_head = lax.axis_index("head"), _key_head(q, k)
    worker, workers = lax.axis_index("worker"), k_own.shape[0]
    block = lax.axis_index("block")
    first, end = start[block], start[block + 1]
    block_q, dim = q_ring.shape[1:]

    @pl.when(worker == workers)
    def _() -> None:
        _take_registers(workers, fetch=True)

        def copy(n: Array, slot: Array) -> None:
            rows, here = pl.ds(tile_query(tiles[n]) * block_q, block_q), ring_here.at[slot]
            plgpu.copy_gmem_to_smem(q.at[rows, head], q_ring.at[slot], here)
            plgpu.copy_gmem_to_smem(d_out.at[rows, head], d_out_ring.at[slot], here)
            plgpu.copy_gmem_to_smem(places.at[:, rows], places_ring.at[slot], here)
            plgpu.copy_gmem_to_smem(statistics.at[head, :, rows], statistics_ring.at[slot], here)

        _fetch(first, end, copy, (ring_free,))

    @pl.when(worker < workers)
    def _() -> None:
        _take_registers(workers, fetch=False)
        keys, here = pl.ds((block * workers + worker) * ROWS, ROWS), own_here.at[worker]
        plgpu.copy_gmem_to_smem(k.at[keys, key_head], k_own.at[worker], here)
        plgpu.copy_gmem_to_smem(v.at[keys, key_head], v_own.at[worker], here)
        plgpu.copy_gmem_to_smem(bounds.at[:, keys], bounds_own.at[worker], here)
        plgpu.barrier_wait(here)

        def visit(n: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            sum_dk, sum_dv = carry
            slot, full = lax.rem(n - first, STAGES), tile_full(tiles[n])
            plgpu.barrier_wait(ring_here.at[slot])
            for rows in _chunks(block_q):
                q_part, d_out_part = q_ring.at[slot, rows], d_out_ring.at[slot, rows]
                scores = products.turned(k_own.at[worker], q_part)
                scores = _masked(scores, full, places_ring.at[slot, :, rows], bounds_own.at[worker], 1)
                logsum, delta = statistics_ring[slot, 0, rows] * LOG2E, statistics_ring[slot, 1, rows]
                weights = jnp.exp2(scores * LOG2E - _spread(logsum, scores, 1))
                sum_dv = products.added(sum_dv, weights.astype(d_out.dtype), d_out_part)
                d_weights = products.turned(v_own.at[worker], d_out_part)
                d_scores = weights * (d_weights - _spread(delta, scores, 1))
                sum_dk = products.added(sum_dk, d_scores.astype(q.dtype), q_part)
            plgpu.barrier_arrive(ring_free.at[slot])
            return sum_dk, sum_dv

        zero = jnp.zeros((ROWS, dim), jnp.float32)
        dk[head, keys], dv[head, keys] = lax.fori_loop(first, end, visit, (zero, zero))


def _chunks(size: int) -> list[Any]:
    """A block in parts whose scores still fit into registers, beside the sums."""
    return [pl.ds(begin, ROWS) for begin in range(0, size, ROWS)]


def _key_head(q: Ref, k: Ref) -> Array:
    """The key-value head that this thread block's queries read."""
    return lax.axis_index("head") // (q.shape[1] // k.shape[1])


def _take_registers(workers: int, *, fetch: bool) -> None:
    """Three warpgroups start with a third of the registers each; the one that only fetches gives most of its own away.

    Two start with as many as an instruction can name.
    """
    if workers > 1:
        plgpu.set_max_registers(40 if fetch else 232, action="decrease" if fetch else "increase")


def _fetch(first: Array, end: Array, copy: Callable[[Array, Array], None], free: tuple[Ref, ...]) -> None:
    """Runs `copy(n, slot)` for each n, as soon as all barriers say that the slot is free; waits for the last reader."""

    def wait(n: Array) -> None:
        for barriers in free:
            plgpu.barrier_wait(barriers.at[lax.rem(n - first, STAGES)])

    def step(n: Array, _: None) -> None:
        pl.when(n - first >= STAGES)(partial(wait, n))
        copy(n, lax.rem(n - first, STAGES))

    lax.fori_loop(first, end, step, None)
    lax.fori_loop(jnp.maximum(first, end - STAGES), end, lambda n, _: wait(n), None)


def _spread(x: Float[Array, " some"], like: Float[Array, "row column"], axis: int) -> Float[Array, "row column"]:
    """A value a row (axis 0) or a column (axis 1) -> the same for each pair."""
    return lax.broadcast_in_dim(x, like.shape, (axis,))


def _masked(scores: Array, full: Array, places: Ref, bounds: Ref, query_axis: int) -> Array:
    """MASKED where a pair is not visible; nothing is compared where the whole tile is."""

    def compare(scores: Array) -> Array:
        along = lambda ref, axis: [_spread(ref[n], scores, axis) for n in range(ref.shape[0])]
        seen = seen_pairs(along(places, query_axis), along(bounds, 1 - query_axis))
        return jnp.where(seen, scores, MASKED)

    return lax.cond(full, lambda scores: scores, compare, scores)


def _write(value: Array, buffer: Ref, target: Ref) -> None:
    """Registers -> shared memory -> global memory."""
    buffer[...] = value
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, target)
    plgpu.wait_smem_to_gmem(0)
