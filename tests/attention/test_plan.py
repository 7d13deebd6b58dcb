import numpy as np
import pytest

from harnessrl_jax.attention import TreeMask, make_plan, row_mask, visible
from harnessrl_jax.errors import ModelError


def tiles_in(plan):
    """The plan as a boolean matrix of tiles."""
    kept = np.zeros(plan.key_block.shape, bool)
    for i, (order, active) in enumerate(zip(np.asarray(plan.key_block), np.asarray(plan.active), strict=True)):
        assert sorted(order) == list(range(len(order)))
        kept[i, order[:active]] = True
    return kept


def tiles_with_a_visible_pair(mask, block_q, block_k):
    pairs = np.asarray(visible(mask))
    return pairs.reshape(pairs.shape[0] // block_q, block_q, -1, block_k).any((1, 3))


@pytest.mark.parametrize(("block_q", "block_k"), [(8, 8), (4, 16), (16, 4)])
def test_a_depth_first_row_keeps_exactly_the_tiles_it_needs(row, block_q, block_k):
    some_skipped = 0
    for seed in range(10):
        _, end = row(seed, 64, 56)
        mask = row_mask(end)
        kept = tiles_in(make_plan(mask, block_q=block_q, block_k=block_k))
        np.testing.assert_array_equal(kept, tiles_with_a_visible_pair(mask, block_q, block_k))
        some_skipped += np.tril(np.ones_like(kept)).sum() - kept.sum() if block_q == block_k else 1
    assert some_skipped > 0


def test_shuffled_intervals_never_lose_a_visible_pair(row):
    rng = np.random.default_rng(0)
    for seed in range(10):
        mask = row_mask(row(seed, 64, 64)[1])
        queries, keys = rng.permutation(64)[:32], rng.permutation(64)
        mask = TreeMask(mask.t[queries], mask.lo[keys], mask.hi[keys])
        kept = tiles_in(make_plan(mask, block_q=8, block_k=8))
        assert not (tiles_with_a_visible_pair(mask, 8, 8) & ~kept).any()


def test_a_row_shorter_than_a_block_is_one_tile(row):
    assert make_plan(row_mask(row(0, 24, 20)[1])).key_block.shape == (1, 1)


def test_a_block_that_does_not_divide_is_refused(row):
    mask = row_mask(row(0, 24, 20)[1])
    with pytest.raises(ModelError, match=r"make_plan: block_k 9 does not divide 24 slots\. Choose a row length"):
        make_plan(mask, block_q=8, block_k=9)
