"""A row's mask -> an order of its slots whose equal parts, one a device, cost the same attention; gathering of keys."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from harnessrl_jax.attention.mask import TreeMask
from harnessrl_jax.attention.plan import BLOCK
from harnessrl_jax.errors import ModelError


def balanced_order(mask: TreeMask, parts: int, *, block: int = BLOCK) -> Int[Array, " slot"]:
    """The order in which the slots of a row are dealt to the devices of a context axis.

    A block of queries costs as many tiles as it has key blocks to read, which grows with its depth: contiguous parts
    would be uneven. Blocks are dealt from the dearest to the cheapest, there and back (1 2 3 3 2 1), so that the costs
    of two parts differ by at most that of one block. Attention needs no order: it compares the integers of the mask.

    Args:
      mask: intervals of a whole row, as many queries as keys.
      parts: devices along the axis.
      block: slots that stay together; a shorter part is one block.

    Returns:
      A permutation: the slots of the first part, then those of the second, and so on; ascending in each part.

    Raises:
      ModelError: the row cannot be cut into equal parts of whole blocks.
    """
    slots = mask.t.shape[0]
    size = min(block, slots // parts)
    if size < 1 or slots % (parts * size):
        raise ModelError(
            f"balanced_order: {slots} slots cannot be dealt to {parts} devices in blocks of {block}. "
            f"Choose a row length that is a multiple of {parts * block}."
        )
    blocks = slots // size
    t, lo, hi = (x.reshape(blocks, size) for x in (mask.t, mask.lo, mask.hi))
    reads = (lo.min(1)[None, :] <= t.max(1)[:, None]) & (hi.max(1)[None, :] > t.min(1)[:, None])
    rank = jnp.argsort(jnp.argsort(-reads.sum(1), stable=True))
    turn, place = rank // parts, rank % parts
    part = jnp.where(turn % 2 == 0, place, parts - 1 - place)
    order = jnp.argsort(part, stable=True)
    return (order[:, None] * size + jnp.arange(size)[None, :]).reshape(-1)
