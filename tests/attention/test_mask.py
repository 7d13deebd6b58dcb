import numpy as np
import pytest

from harnessrl_jax.attention import TreeMask, row_mask, visible
from harnessrl_jax.errors import ModelError


def test_a_small_forest_by_hand():
    # slots: 0 root, 1 and 2 its children, 3 child of 2, 4 another root, 5 padding
    see = visible(row_mask(np.array([4, 2, 4, 4, 5, 6])))
    want = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    np.testing.assert_array_equal(see, np.array(want, bool))


def test_a_row_sees_as_many_keys_as_it_is_deep(row):
    for seed in range(20):
        depth, end = row(seed, 64, 50)
        mask = row_mask(end)
        np.testing.assert_array_equal(np.asarray(visible(mask)).sum(1), depth + 1)
        np.testing.assert_array_equal(mask.query_depth, depth)
        np.testing.assert_array_equal(mask.key_depth, depth)


def test_a_window_counts_depth_and_not_slots(row):
    # slots: 0 root with the children 1 and 4, a chain 1 2 3, another 4 5
    see = visible(row_mask(np.array([6, 4, 4, 4, 6, 6])), 2)
    want = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [1, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]
    np.testing.assert_array_equal(see, np.array(want, bool))
    for seed in range(10):
        depth, end = row(seed, 64, 50)
        np.testing.assert_array_equal(np.asarray(visible(row_mask(end), 5)).sum(1), np.minimum(depth + 1, 5))


@pytest.mark.parametrize("size", [0, -3])
def test_an_empty_window_is_refused(size):
    with pytest.raises(ModelError, match=rf"window is {size}; give at least 1"):
        visible(row_mask(np.arange(1, 5)), size)


def test_a_window_needs_depths():
    mask = TreeMask(*row_mask(np.arange(1, 5))[:3])
    with pytest.raises(ModelError, match=r"window is 2, but the mask has no depths; give TreeMask query_depth"):
        visible(mask, 2)
