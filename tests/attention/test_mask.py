import numpy as np

from harnessrl_jax.attention import row_mask, visible


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
        np.testing.assert_array_equal(np.asarray(visible(row_mask(end))).sum(1), depth + 1)
