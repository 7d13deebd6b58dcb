"""Subtree ends of a packed row -> which key each query may see, as three integers a token."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class TreeMask(NamedTuple):
    """Visibility as intervals: query i sees key j iff `lo[j] <= t[i] < hi[j]`.

    With depth-first indices, `t` is the place of the query, `lo` the place of the key and `hi` the end of the
    key's subtree, so a query sees itself and its ancestors. Nothing here depends on where a token lies in memory:
    queries and keys may be permuted, sharded or concatenated, and their numbers may differ.
    """

    t: Int[Array, " query"]
    lo: Int[Array, " key"]
    hi: Int[Array, " key"]


def row_mask(subtree_end: Int[Array, " slot"]) -> TreeMask:
    """The mask of one packed row whose slots are in depth-first order.

    Args:
      subtree_end: index one past the last descendant of each slot; own index + 1 for padding, which therefore
        sees only itself.

    Returns:
      The mask, with as many queries as keys.
    """
    index = jnp.arange(subtree_end.shape[0], dtype=jnp.int32)
    return TreeMask(t=index, lo=index, hi=subtree_end.astype(jnp.int32))


def visible(mask: TreeMask) -> Bool[Array, "query key"]:
    """The mask written out: True where the query sees the key. O(query * key) memory."""
    t = mask.t[:, None]
    return (mask.lo[None, :] <= t) & (t < mask.hi[None, :])
