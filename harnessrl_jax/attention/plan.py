"""A tree mask -> which tiles of the score matrix hold a visible pair: the work list of the attention kernels."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from harnessrl_jax.attention.mask import TreeMask, depths
from harnessrl_jax.errors import ModelError

BLOCK = 64  # slots a side; measured best on CPU for rows of 512 to 4096 slots (tests/benchmarks/attention.py)
BITS = 15  # of a block's number inside a tile's word


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("by_query", "query_start", "by_key", "key_start"),
    meta_fields=("window",),
)
@dataclasses.dataclass(frozen=True)
class TilePlan:
    """The tiles that hold a visible pair, once in the order of the queries and once in the order of the keys.

    A tile is one integer: `tile_query`, `tile_key` and `tile_full` read it. The tiles of query block i stand at
    `query_start[i]` to `query_start[i + 1]` of `by_query`, and the same for keys; what follows the last is never read.

    Depends on the mask and the window alone: build it once per row and window, and use it in every layer. Its shape
    also carries the block sizes, so a plan fits exactly the rows it was made for.
    """

    by_query: Int[Array, " tile"]
    query_start: Int[Array, " query_block_and_end"]
    by_key: Int[Array, " tile"]
    key_start: Int[Array, " key_block_and_end"]
    window: int | None = None

    @property
    def blocks(self) -> tuple[int, int]:
        """How many blocks the queries and the keys have."""
        return self.query_start.shape[-1] - 1, self.key_start.shape[-1] - 1


def tile_query(tile: Int[Array, "*tile"]) -> Int[Array, "*tile"]:
    """Query block of a tile."""
    return (tile >> BITS) & ((1 << BITS) - 1)


def tile_key(tile: Int[Array, "*tile"]) -> Int[Array, "*tile"]:
    """Key block of a tile."""
    return tile & ((1 << BITS) - 1)


def tile_full(tile: Int[Array, "*tile"]) -> Bool[Array, "*tile"]:
    """Whether every pair of a tile is visible, so that nothing has to be masked."""
    return (tile >> (2 * BITS)) > 0


def make_plan(mask: TreeMask, *, window: int | None = None, block_q: int = BLOCK, block_k: int = BLOCK) -> TilePlan:
    """Finds the tiles that hold at least one visible pair, from minima and maxima of each block.

    A tile may be kept although it is empty (never the other way round); for rows in depth-first order and no window
    the test is exact. O(query_blocks * key_blocks) integer operations, no data-dependent shapes.

    Args:
      mask: intervals of one row.
      window: that of the layers which will use the plan.
      block_q: queries in a tile; a shorter row is one block.
      block_k: keys in a tile.

    Returns:
      The plan.

    Raises:
      ModelError: a block does not divide its axis, there are too many blocks, or the window does not fit the mask.
    """
    t = _blocks("block_q", mask.t, block_q)
    lo, hi = _blocks("block_k", mask.lo, block_k), _blocks("block_k", mask.hi, block_k)
    first, last = t.min(1)[:, None], t.max(1)[:, None]
    needed = (lo.min(1)[None, :] <= last) & (hi.max(1)[None, :] > first)
    full = (lo.max(1)[None, :] <= first) & (hi.min(1)[None, :] > last)
    if window is not None:
        below, above = depths(mask, window)
        below, above = _blocks("block_q", below, block_q), _blocks("block_k", above, block_k)
        needed &= below.min(1)[:, None] - above.max(1)[None, :] < window
        full &= below.max(1)[:, None] - above.min(1)[None, :] < window
    query_block = jnp.arange(needed.shape[0], dtype=jnp.int32)[:, None]
    key_block = jnp.arange(needed.shape[1], dtype=jnp.int32)[None, :]
    tiles = (full.astype(jnp.int32) << (2 * BITS)) | (query_block << BITS) | key_block
    return TilePlan(*_listed(tiles, needed), *_listed(tiles.T, needed.T), window=window)


def _blocks(name: str, value: Int[Array, " slot"], size: int) -> Int[Array, "block slot"]:
    slots = value.shape[0]
    size = min(size, slots)
    if size < 1 or slots % size:
        raise ModelError(
            f"make_plan: {name} {size} does not divide {slots} slots. Choose a row length that is a multiple of it."
        )
    if slots // size >= 1 << BITS:
        raise ModelError(f"make_plan: {slots} slots in blocks of {name} {size} are too many; take larger blocks.")
    return value.reshape(-1, size)


def _listed(tiles: Int[Array, "row column"], needed: Bool[Array, "row column"]) -> tuple[Array, Array]:
    """The needed tiles, row by row without gaps, and where each row starts (and the last ends)."""
    flat, rank = needed.reshape(-1), jnp.cumsum(needed.reshape(-1), dtype=jnp.int32) - 1
    size = flat.shape[0]
    place = jnp.where(flat, rank, size)  # those that are not needed fall behind the end
    words = jnp.zeros(size, jnp.int32).at[place].set(tiles.reshape(-1), mode="drop")
    end = jnp.cumsum(needed.sum(1, dtype=jnp.int32), dtype=jnp.int32)
    return words, jnp.concatenate([jnp.zeros(1, jnp.int32), end])
