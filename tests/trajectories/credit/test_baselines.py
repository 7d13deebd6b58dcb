import itertools
import math
from functools import partial

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from harnessrl_jax.errors import RecordError
from harnessrl_jax.trajectories.credit import (
    group_mean,
    group_std,
    groups_within,
    leave_one_out,
    max_rl,
    rloo,
)


def rloo_without_kl(reward, group, counted):
    return rloo(reward, np.zeros(len(reward)), group, counted, beta=0.1)


ESTIMATORS = {
    "leave_one_out": leave_one_out,
    "group_mean": group_mean,
    "group_std": partial(group_std, floor=1e-6, unbiased=False),
    "group_std_unbiased": partial(group_std, floor=1e-8, unbiased=True),
    "max_rl": max_rl,
    "rloo": rloo_without_kl,
}
every = pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS)


def of(estimator, reward, group=None, counted=None, dtype=np.float64):
    size = len(reward)
    return estimator(
        np.array(reward, dtype),
        np.zeros(size, int) if group is None else np.array(group),
        np.ones(size, bool) if counted is None else np.array(counted),
    )


def test_leave_one_out_worked_by_hand():
    # The others of the first have mean 1/3, those of the second 2/3.
    np.testing.assert_allclose(of(leave_one_out, [1, 0, 0, 1]), [2 / 3, -2 / 3, -2 / 3, 2 / 3])
    np.testing.assert_allclose(of(leave_one_out, [1, 5, 0, 7], group=[3, 9, 3, 9]), [1, -2, -1, 2])


def test_group_mean_worked_by_hand():
    np.testing.assert_allclose(of(group_mean, [3, 1, 1, 0]), [1.75, -0.25, -0.25, -1.25])


def test_group_std_worked_by_hand():
    # 1, 2, 3, 6: mean 3, squares 4 + 1 + 0 + 9 = 14, divided by 4 or by 3.
    deviation = np.array([-2, -1, 0, 3])
    np.testing.assert_allclose(
        of(partial(group_std, floor=0.5, unbiased=False), [1, 2, 3, 6]), deviation / (math.sqrt(3.5) + 0.5)
    )
    np.testing.assert_allclose(
        of(partial(group_std, floor=0.5, unbiased=True), [1, 2, 3, 6]), deviation / (math.sqrt(14 / 3) + 0.5)
    )


def test_max_rl_worked_by_hand():
    np.testing.assert_allclose(of(max_rl, [1, 0, 0, 1]), [1, -1, -1, 1])
    np.testing.assert_allclose(of(max_rl, [0.5, 0.25, 0, 0.25]), [1, 0, -1, 0])


def test_rloo_worked_by_hand():
    # Charged rewards 1 - 0.1 * 5 = 0.5, 0 - 0.1 * 0 = 0, 1 - 0.1 * 10 = 0; the fourth counts nowhere.
    got = rloo(
        np.array([1, 0, 1, math.nan]),
        np.array([5, 0, 10, math.nan]),
        np.zeros(4, int),
        np.array([True, True, True, False]),
        beta=0.1,
    )
    np.testing.assert_allclose(got, [0.5, -0.25, -0.25, 0])


@every
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_groups_without_a_signal_give_exactly_zero(estimator, dtype):
    assert of(estimator, [0.7], dtype=dtype).tolist() == [0.0]
    assert of(estimator, [0.7] * 7, dtype=dtype).tolist() == [0.0] * 7
    assert of(estimator, [0.0] * 3, dtype=dtype).tolist() == [0.0] * 3
    assert of(estimator, [0.1 + 0.2] * 3 + [1.0], group=[0, 0, 0, 1], dtype=dtype).tolist() == [0.0] * 4
    assert of(estimator, [], dtype=dtype).tolist() == []


@every
def test_members_that_do_not_count_change_nothing_and_are_never_read(estimator):
    got = of(estimator, [1, math.nan, 0, math.inf], counted=[True, False, True, False])
    assert got[[1, 3]].tolist() == [0, 0]
    assert got[[0, 2]].tolist() == of(estimator, [1, 0]).tolist()
    assert of(estimator, [1, 0], counted=[True, False]).tolist() == [0, 0]
    assert of(estimator, [1, 0], counted=[False, False]).tolist() == [0, 0]


@every
def test_a_group_knows_nothing_of_the_others(estimator):
    mixed = of(estimator, [1, 0.7, 0, 0.7, 0.25, 0.7], group=[4, 2, 4, 2, 4, 2])
    assert mixed[1::2].tolist() == [0, 0, 0]
    assert mixed[::2].tolist() == of(estimator, [1, 0, 0.25]).tolist()


@every
def test_advantages_of_a_group_sum_to_zero_in_float64(estimator):
    got = of(estimator, [0.1, 0.5, 0.9, 0.2])
    assert got.dtype == np.float64
    assert abs(got.sum()) < 1e-12


@every
def test_a_counted_reward_that_is_not_a_number_is_refused(estimator):
    with pytest.raises(RecordError, match=r"rewards must be finite, got \[1\.0, nan\].*Do not count members"):
        of(estimator, [1, math.nan])
    with pytest.raises(RecordError, match=r"rewards must be finite, got \[inf, 0\.0\]"):
        of(estimator, [math.inf, 0])
    with pytest.raises(RecordError, match=r"rewards must lie within ±1e\+100, got \[1e\+200, 0\.0\]"):
        of(estimator, [1e200, 0])


@every
def test_arrays_of_different_lengths_are_refused(estimator):
    with pytest.raises(RecordError, match=r"wanted flat arrays of one length, got shapes reward \[2\].*counted \[1\]"):
        estimator(np.zeros(2), np.zeros(2, int), np.ones(1, bool))


@every
def test_a_mask_of_integers_is_refused(estimator):
    with pytest.raises(RecordError, match=r"counted must be an array of bool, got int64\. Use counted\.astype\(bool\)"):
        of(estimator, [1, 0], counted=[1, 0])


@every
@hypothesis.given(st.lists(st.floats(0, 10), min_size=2, max_size=9), st.randoms(use_true_random=False))
def test_the_order_of_a_group_does_not_matter(estimator, reward, random):
    order = list(range(len(reward)))
    random.shuffle(order)
    shuffled = [reward[place] for place in order]
    np.testing.assert_array_equal(of(estimator, reward)[order], of(estimator, shuffled))


@hypothesis.given(st.lists(st.floats(-10, 10), min_size=2, max_size=12))
def test_the_standard_deviation_of_the_whole_group_bounds_the_advantage(reward):
    size = len(reward)
    for unbiased, bound in ((False, math.sqrt(size - 1)), (True, (size - 1) / math.sqrt(size))):
        got = of(partial(group_std, floor=1e-6, unbiased=unbiased), reward)
        assert np.abs(got).max() <= bound * (1 + 1e-9)


def test_estimators_are_multiples_of_one_another():
    reward = np.array([0.1, 0.5, 0.9, 0.2])
    centred = reward - reward.mean()
    np.testing.assert_allclose(of(leave_one_out, reward), centred * 4 / 3)
    np.testing.assert_allclose(of(rloo_without_kl, reward), centred * 4 / 3)
    np.testing.assert_allclose(of(group_mean, reward), centred)
    np.testing.assert_allclose(of(max_rl, reward), centred / reward.mean())
    np.testing.assert_allclose(
        of(partial(group_std, floor=1e-12, unbiased=True), reward), centred / np.std(reward, ddof=1)
    )


def expected_gradient(estimator, size, p):
    """E[1/n Σ A_i d log π(r_i) / dp] over all outcomes of n draws that succeed with chance p."""
    total = 0.0
    for outcome in itertools.product([0, 1], repeat=size):
        chance = math.prod(p if r else 1 - p for r in outcome)
        score = np.array([1 / p if r else -1 / (1 - p) for r in outcome])
        total += chance * (of(estimator, outcome) * score).mean()
    return total


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_gradients_have_the_expectation_that_is_claimed(size, p):
    # J = p: its derivative is 1. log p cut after n - 1 terms: 1 + (1-p) + ... + (1-p)^(n-2).
    assert expected_gradient(leave_one_out, size, p) == pytest.approx(1)
    assert expected_gradient(group_mean, size, p) == pytest.approx((size - 1) / size)
    assert expected_gradient(max_rl, size, p) == pytest.approx(sum((1 - p) ** k for k in range(size - 1)))


def test_groups_cut_by_harness_or_agent():
    group, harness = np.array([0, 0, 0, 0, 1]), np.array([5, 6, 5, 6, 5])
    fine = groups_within(group, harness)
    assert [np.flatnonzero(fine == number).tolist() for number in np.unique(fine)] == [[0, 2], [1, 3], [4]]
    got = of(leave_one_out, [1, 10, 0, 30, 7], group=fine)
    assert got.tolist() == [1, -20, -1, 20, 0]
    with pytest.raises(RecordError, match=r"groups_within: wanted flat arrays of one length"):
        groups_within(group, harness[:2])


def test_numbers_out_of_range_are_refused():
    reward, group, counted = np.ones(2), np.zeros(2, int), np.ones(2, bool)
    with pytest.raises(RecordError, match=r"group_std: floor must be a finite number above 0, got 0"):
        group_std(reward, group, counted, floor=0, unbiased=False)
    with pytest.raises(RecordError, match=r"max_rl: rewards must be at least 0, got \[1\.0, -1\.0\]"):
        max_rl(np.array([1.0, -1.0]), group, counted)
    with pytest.raises(RecordError, match=r"rloo: beta must be a finite number of at least 0, got -1"):
        rloo(reward, reward, group, counted, beta=-1)
    with pytest.raises(RecordError, match=r"rloo: kl must be finite"):
        rloo(reward, reward * math.nan, group, counted, beta=0.1)
