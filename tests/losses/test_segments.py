"""Sums over segments: against a dictionary, and blind to ids and masked targets."""

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from harnessrl_jax import losses

TARGETS = 7
IDS = st.lists(st.sampled_from([-(2**31), -1, 0, 3, 2**31 - 1]), min_size=TARGETS, max_size=TARGETS)
MASKS = st.lists(st.booleans(), min_size=TARGETS, max_size=TARGETS)
segment_sum, segment_size = jax.jit(losses.segment_sum), jax.jit(losses.segment_size)
segment_log_ratio, segment_mean_log_ratio = map(jax.jit, (losses.segment_log_ratio, losses.segment_mean_log_ratio))


@given(IDS, MASKS)
def test_sums_are_those_of_a_dictionary(ids, mask):
    value = np.arange(1, TARGETS + 1, dtype=np.float32)
    totals: dict[int, tuple[float, int]] = {}
    for each, number, keep in zip(ids, value, mask, strict=True):
        total, size = totals.get(each, (0, 0))
        totals[each] = (total + number * keep, size + keep)
    spoiled = np.where(mask, value, np.nan)
    segment = np.array(ids, np.int32)
    np.testing.assert_array_equal(
        segment_sum(spoiled, segment, np.array(mask)), [totals[i][0] * m for i, m in zip(ids, mask, strict=True)]
    )
    np.testing.assert_array_equal(
        segment_size(segment, np.array(mask)), [totals[i][1] * m for i, m in zip(ids, mask, strict=True)]
    )


def test_ratios_worked_by_hand():
    # log ρ = 1, 3 in one sequence and -2 in another: the products are e^4 and e^-2, the geometric means e^2 and e^-2.
    logp, other = np.array([0.0, 0.0, np.nan, -3.0]), np.array([-1.0, -3.0, np.nan, -1.0])
    segment, mask = np.array([5, 5, 5, 2]), np.array([True, True, False, True])
    np.testing.assert_allclose(segment_log_ratio(logp, other, segment, mask), [4, 4, 0, -2])
    np.testing.assert_allclose(segment_mean_log_ratio(logp, other, segment, mask), [2, 2, 0, -2])


def test_a_long_product_is_cut_and_a_mean_is_not_moved_by_it():
    logp, other = np.zeros(50), np.full(50, -3.0)
    segment, mask = np.zeros(50, np.int32), np.ones(50, bool)
    np.testing.assert_array_equal(segment_log_ratio(logp, other, segment, mask), 20)
    np.testing.assert_allclose(segment_mean_log_ratio(logp, other, segment, mask), 3, rtol=1e-6)


def test_a_row_without_targets_has_no_segments():
    nothing = np.zeros(0)
    assert segment_sum(nothing, np.zeros(0, np.int32), np.zeros(0, bool)).shape == (0,)
