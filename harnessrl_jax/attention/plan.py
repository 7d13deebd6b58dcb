"""A tree mask -> which tiles of the score matrix hold a visible pair: the work list of blockwise attention."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from harnessrl_jax.attention.mask import TreeMask
from harnessrl_jax.errors import ModelError

BLOCK = 64  # slots a side; measured best on CPU for rows of 512 to 4096 slots (tests/benchmarks/attention.py)


class TilePlan(NamedTuple):
    """For every query block, the key blocks it must read.

    Depends on the mask alone: build it once per row and use it in every layer. Its shape also carries the block
    sizes, so a plan fits exactly the rows it was made for.
    """

    key_block: Int[Array, "query_block key_block"]  # blocks to read come first, the rest is never read
    active: Int[Array, " query_block"]  # how many to read


def make_plan(mask: TreeMask, *, block_q: int = BLOCK, block_k: int = BLOCK) -> TilePlan:
    """Finds the tiles that hold at least one visible pair, from minima and maxima of each block.

    A tile may be kept although it is empty (never the other way round); for rows in depth-first order the test
    is exact. O(query_blocks * key_blocks) integer operations, no data-dependent shapes.

    Args:
      mask: intervals of one row.
      block_q: queries in a tile; a shorter row is one block.
      block_k: keys in a tile.

    Returns:
      The plan.

    Raises:
      ModelError: a block does not divide its axis.
    """
    t = _blocks("block_q", mask.t, block_q)
    lo, hi = _blocks("block_k", mask.lo, block_k), _blocks("block_k", mask.hi, block_k)
    starts_before = lo.min(1)[None, :] <= t.max(1)[:, None]
    ends_after = hi.max(1)[None, :] > t.min(1)[:, None]
    needed = starts_before & ends_after
    order = jnp.argsort(~needed, axis=1, stable=True)
    return TilePlan(key_block=order.astype(jnp.int32), active=needed.sum(1, dtype=jnp.int32))


def _blocks(name: str, value: Int[Array, " slot"], size: int) -> Int[Array, "block slot"]:
    slots = value.shape[0]
    size = min(size, slots)
    if size < 1 or slots % size:
        raise ModelError(
            f"make_plan: {name} {size} does not divide {slots} slots. Choose a row length that is a multiple of it."
        )
    return value.reshape(-1, size)
