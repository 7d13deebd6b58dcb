import numpy as np
import pytest

from harnessrl_jax.attention import TreeMask, make_plan, row_mask, tile_full, tile_key, tile_query, visible
from harnessrl_jax.errors import ModelError


def tiles_in(plan):
    """The plan as two boolean matrices of tiles, kept and full; both lists say the same, block by block."""
    kept, full = np.zeros((2, *plan.blocks), bool)
    for words, start, number in [
        (plan.by_query, plan.query_start, tile_query),
        (plan.by_key, plan.key_start, tile_key),
    ]:
        words = np.asarray(words)[: start[-1]]
        np.testing.assert_array_equal(np.asarray(number(words)), np.repeat(np.arange(len(start) - 1), np.diff(start)))
        seen = np.zeros_like(kept)
        seen[tile_query(words), tile_key(words)] = True
        assert seen.sum() == len(words)
        if number is tile_key:
            np.testing.assert_array_equal(seen, kept)
        kept = seen
        full[tile_query(words), tile_key(words)] = tile_full(words)
    return kept, full


def tiles_with_a_visible_pair(mask, block_q, block_k, window=None, reduce=np.any):
    pairs = np.asarray(visible(mask, window))
    return reduce(pairs.reshape(pairs.shape[0] // block_q, block_q, -1, block_k), (1, 3))


@pytest.mark.parametrize(("block_q", "block_k"), [(8, 8), (4, 16), (16, 4)])
def test_a_depth_first_row_keeps_exactly_the_tiles_it_needs(row, block_q, block_k):
    some_skipped = 0
    for seed in range(10):
        _, end = row(seed, 64, 56)
        mask = row_mask(end)
        kept, full = tiles_in(make_plan(mask, block_q=block_q, block_k=block_k))
        np.testing.assert_array_equal(kept, tiles_with_a_visible_pair(mask, block_q, block_k))
        np.testing.assert_array_equal(full, tiles_with_a_visible_pair(mask, block_q, block_k, reduce=np.all))
        some_skipped += np.tril(np.ones_like(kept)).sum() - kept.sum() if block_q == block_k else 1
    assert some_skipped > 0


@pytest.mark.parametrize("window", [None, 3])
def test_shuffled_intervals_never_lose_a_visible_pair(row, window):
    rng = np.random.default_rng(0)
    for seed in range(10):
        mask = row_mask(row(seed, 64, 64)[1])
        queries, keys = rng.permutation(64)[:32], rng.permutation(64)
        mask = TreeMask(mask.t[queries], mask.lo[keys], mask.hi[keys], mask.query_depth[queries], mask.key_depth[keys])
        kept, full = tiles_in(make_plan(mask, window=window, block_q=8, block_k=8))
        assert not (tiles_with_a_visible_pair(mask, 8, 8, window) & ~kept).any()
        assert not (full & ~tiles_with_a_visible_pair(mask, 8, 8, window, np.all)).any()


def test_a_window_empties_the_tiles_far_above_it():
    chain = row_mask(np.full(64, 64))
    kept, full = tiles_in(make_plan(chain, window=9, block_q=8, block_k=8))
    np.testing.assert_array_equal(kept, np.tri(8, dtype=bool) & ~np.tri(8, k=-2, dtype=bool))
    assert not full.any()
    kept, full = tiles_in(make_plan(chain, window=17, block_q=8, block_k=8))
    np.testing.assert_array_equal(kept, np.tri(8, dtype=bool) & ~np.tri(8, k=-3, dtype=bool))
    np.testing.assert_array_equal(full, np.eye(8, k=-1, dtype=bool))


def test_a_row_shorter_than_a_block_is_one_tile(row):
    assert make_plan(row_mask(row(0, 24, 20)[1])).blocks == (1, 1)


def test_a_block_that_does_not_divide_is_refused(row):
    mask = row_mask(row(0, 24, 20)[1])
    with pytest.raises(ModelError, match=r"make_plan: block_k 9 does not divide 24 slots\. Choose a row length"):
        make_plan(mask, block_q=8, block_k=9)
