"""Subtree ends of a packed row -> which key each query may see, as a few integers a token."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from harnessrl_jax.errors import ModelError


class TreeMask(NamedTuple):
    """Visibility as intervals: query i sees key j iff `lo[j] <= t[i] < hi[j]`.

    With depth-first indices, `t` is the place of the query, `lo` the place of the key and `hi` the end of the
    key's subtree, so a query sees itself and its ancestors. Nothing here depends on where a token lies in memory:
    queries and keys may be permuted, sharded or concatenated, and their numbers may differ.

    The depths are needed by sliding windows only: a window counts tokens along the path from the root, not slots.
    """

    t: Int[Array, " query"]
    lo: Int[Array, " key"]
    hi: Int[Array, " key"]
    query_depth: Int[Array, " query"] | None = None
    key_depth: Int[Array, " key"] | None = None


def row_mask(subtree_end: Int[Array, " slot"]) -> TreeMask:
    """The mask of one packed row whose slots are in depth-first order.

    Args:
      subtree_end: index one past the last descendant of each slot; own index + 1 for padding, which therefore
        sees only itself.

    Returns:
      The mask, with as many queries as keys, and depths counted from the first slot of each tree.
    """
    slots = subtree_end.shape[0]
    index, end = jnp.arange(slots, dtype=jnp.int32), jnp.asarray(subtree_end, jnp.int32)
    # As many subtrees are open at a slot as it has ancestors and itself.
    closed = jnp.zeros(slots + 1, jnp.int32).at[end].add(1)[:slots]
    depth = index - jnp.cumsum(closed, dtype=jnp.int32)
    return TreeMask(t=index, lo=index, hi=end, query_depth=depth, key_depth=depth)


def comparisons(mask: TreeMask, window: int | None) -> tuple[Int[Array, "place query"], Int[Array, "bound key"]]:
    """The mask as the kernels read it: integers to compare, one array for the queries and one for the keys.

    Args:
      mask: intervals, and depths where there is a window.
      window: a query sees keys less than this many tokens above it on its path, itself included; None means all.

    Returns:
      Places and bounds: a pair is visible iff `bounds[0] <= places[0] < bounds[1]` and, with a window, also
      `places[1] < bounds[2]`. The size of the arrays tells which of the two it is.

    Raises:
      ModelError: a window below 1, or one for a mask without depths.
    """
    places, bounds = (mask.t,), (mask.lo, mask.hi)
    if window is not None:
        query_depth, key_depth = depths(mask, window)
        places, bounds = (*places, query_depth), (*bounds, key_depth + window)
    return jnp.stack(places), jnp.stack(bounds)


def depths(mask: TreeMask, window: int) -> tuple[Int[Array, " query"], Int[Array, " key"]]:
    """The depths of queries and keys, once it is clear that the window and the mask have a meaning together."""
    if window < 1:
        raise ModelError(f"tree attention: window is {window}; give at least 1 (the token itself), or None for all.")
    if mask.query_depth is None or mask.key_depth is None:
        raise ModelError(
            f"tree attention: window is {window}, but the mask has no depths; give TreeMask query_depth and key_depth."
        )
    return mask.query_depth, mask.key_depth


def visible(mask: TreeMask, window: int | None = None) -> Bool[Array, "query key"]:
    """The mask written out: True where the query sees the key. O(query * key) memory."""
    t = mask.t[:, None]
    inside = (mask.lo[None, :] <= t) & (t < mask.hi[None, :])
    if window is None:
        return inside
    query_depth, key_depth = depths(mask, window)
    return inside & (query_depth[:, None] - key_depth[None, :] < window)
