"""Slots dealt to the devices of a context axis: every slot once, whole blocks, even work."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harnessrl_jax.attention import balanced_order, row_mask
from harnessrl_jax.errors import ModelError

SLOTS, BLOCK = 64, 4


@st.composite
def subtree_ends(draw):
    """A row of trees in depth-first order: each slot's parent is some slot on the path to the one before, or none."""
    ends, path = np.arange(1, SLOTS + 1), []
    for slot in range(SLOTS):
        path = path[: len(path) - draw(st.sampled_from([0, 0, 0, 1, 5, SLOTS]))] if path else path
        path = [*path, slot]
        ends[path] = slot + 1
    return ends


def tiles(ends):
    """Key blocks that each query block reads, from the mask written out."""
    i = np.arange(SLOTS)
    seen = (i[None] <= i[:, None]) & (i[:, None] < ends[None])
    return seen.reshape(SLOTS // BLOCK, BLOCK, SLOTS // BLOCK, BLOCK).any(axis=(1, 3)).sum(1)


@settings(max_examples=30)
@given(subtree_ends(), st.sampled_from([1, 2, 4, 8]))
def test_parts_are_whole_blocks_of_even_work(ends, parts):
    order = np.asarray(balanced_order(row_mask(jnp.asarray(ends, jnp.int32)), parts, block=BLOCK))
    np.testing.assert_array_equal(np.sort(order), np.arange(SLOTS))
    blocks = order.reshape(-1, BLOCK)
    np.testing.assert_array_equal(blocks, blocks[:, :1] + np.arange(BLOCK))
    assert (np.diff(order.reshape(parts, -1)) > 0).all()
    work = tiles(ends)[blocks[:, 0] // BLOCK].reshape(parts, -1).sum(1)
    assert work.max() - work.min() <= tiles(ends).max()


def test_a_path_is_dealt_there_and_back():
    order = balanced_order(row_mask(jnp.full(32, 32)), 2, block=4)
    np.testing.assert_array_equal(order[::4] // 4, [0, 3, 4, 7, 1, 2, 5, 6])


def test_a_row_that_cannot_be_dealt_is_refused():
    with pytest.raises(ModelError, match=r"96 slots cannot be dealt to 4 devices in blocks of 16.* multiple of 64"):
        balanced_order(row_mask(jnp.arange(1, 97)), 4, block=16)
