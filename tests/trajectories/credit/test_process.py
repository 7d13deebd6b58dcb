import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from harnessrl_jax.errors import RecordError
from harnessrl_jax.trajectories.credit import group_std, process_by_call_index, stage_normalised, turn_relative

HALF_ROOT = math.sqrt(0.5)


def process(reward, group=None, index=None, dtype=np.float64):
    zeros = np.zeros(len(reward), int)
    return process_by_call_index(
        np.array(reward, dtype),
        zeros if group is None else np.array(group),
        zeros if index is None else np.array(index),
    )


def stage(reward, stages, rollout, group=None, dtype=np.float64):
    group = np.zeros(len(reward), int) if group is None else np.array(group)
    return stage_normalised(np.array(reward, dtype), group, np.array(stages), np.array(rollout), floor=1e-9)


def turns(reward, rollout, turn, group=None, **changes):
    group = np.zeros(len(reward), int) if group is None else np.array(group)
    options = {"gamma": 0.5, "future_weight": 0.5, "floor": 1e-9} | changes
    return turn_relative(np.array(reward), group, np.array(rollout), np.array(turn), **options)


def test_process_reward_worked_by_hand():
    # index 0: 1, 0, 0.5 -> mean 0.5, population std sqrt(1/6); index 1: one member; group 7: another agent
    std = math.sqrt(1 / 6) + 1e-6
    got = process([1, 0, 0.5, 3, 9], group=[0, 0, 0, 0, 7], index=[0, 0, 0, 1, 0])
    np.testing.assert_allclose(got, [0.5 / std, -0.5 / std, 0, 0, 0])
    assert got[3:].tolist() == [0, 0]


def test_process_reward_is_bounded():
    # A leave-one-out standard deviation would divide by nothing here.
    assert np.abs(process([1, 0, 0, 0])).max() < math.sqrt(3)
    assert np.abs(process([0, *[0.95] * 7])).max() < math.sqrt(7)
    assert np.abs(process([0.7, 0.7 + 1e-16, 0.7])).max() < 1e-9
    assert process([0.7] * 5).tolist() == [0] * 5
    assert process([0.7] * 7, dtype=np.float32).tolist() == [0] * 7


def test_a_process_reward_that_is_not_finite_is_refused():
    with pytest.raises(RecordError, match=r"process_by_call_index: rewards must be finite, got \[inf, 0\.0\]"):
        process([math.inf, 0.0])


@hypothesis.given(st.lists(st.floats(-10, 10), min_size=2, max_size=9), st.randoms(use_true_random=False))
def test_the_order_of_the_calls_does_not_matter(reward, random):
    order = list(range(len(reward)))
    random.shuffle(order)
    np.testing.assert_array_equal(process(reward)[order], process([reward[place] for place in order]))


def test_a_stage_is_compared_with_itself():
    # Plans 1 and 0, answers 30 and 10: the scale of one stage does not reach the other.
    np.testing.assert_allclose(stage([1, 30, 0, 10], [0, 1, 0, 1], [0, 0, 1, 1]), [1, 1, -1, -1], rtol=1e-6)


def test_a_rollout_that_loops_in_a_stage_counts_once():
    # Rollout 0 is there three times: mean 1/2 a rollout, not 3/4 a call.
    np.testing.assert_allclose(stage([1, 1, 1, 0], [0] * 4, [0, 0, 0, 1]), [1, 1, 1, -1], rtol=1e-6)
    # Its calls differ: mean 1/2, variance (1/4 + 0) / 2.
    root = math.sqrt(2)
    np.testing.assert_allclose(stage([1, 0, 0.5], [0] * 3, [0, 0, 1]), [root, -root, 0], atol=1e-8)


def test_one_stage_and_one_call_a_rollout_is_grpo():
    reward, numbers = np.array([0.1, 0.5, 0.9, 0.2]), np.arange(4)
    want = group_std(reward, numbers * 0, np.ones(4, bool), floor=1e-9, unbiased=False)
    np.testing.assert_allclose(stage(reward, [3] * 4, numbers), want, rtol=1e-14)


def test_stages_without_a_signal_give_exactly_zero():
    assert stage([0.7] * 7, [0] * 7, range(7), dtype=np.float32).tolist() == [0] * 7
    assert stage([1, 0, 0.5], [0, 0, 0], [4, 4, 4]).tolist() == [0] * 3  # one rollout alone, whatever it did
    assert stage([1, 0], [0, 0], [0, 1], group=[0, 1]).tolist() == [0] * 2
    assert stage([], [], []).tolist() == []
    with pytest.raises(RecordError, match=r"stage_normalised: rewards must be finite"):
        stage([math.nan, 0], [0, 0], [0, 1])
    with pytest.raises(RecordError, match=r"stage_normalised: wanted flat arrays of one length"):
        stage([1.0, 0], [0], [0, 1])


def test_turns_worked_by_hand():
    # Rollouts 110, 10, 011. Futures: turn 0 has 1 * (1 + 0.5 * 0) = 1, 0 and 0 (gated); turn 1 has 0, 0 and 1.
    # Two equal values and one other have standardised values of ±√½ and ∓2√½.
    got = turns([1, 1, 0, 1, 0, 0, 1, 1], [0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 2, 0, 1, 0, 1, 2]) / HALF_ROOT
    np.testing.assert_allclose(got[[0, 3, 5]], [1 + 1, 1 - 0.5, -2 - 0.5], rtol=1e-6)
    np.testing.assert_allclose(got[[1, 4, 6]], [1 - 0.5, -2 - 0.5, 1 + 1], rtol=1e-6)
    np.testing.assert_allclose(got[[2, 7]] * HALF_ROOT, [-1, 1], rtol=1e-6)


def test_a_wrong_turn_earns_nothing_from_what_follows():
    # Both futures after turn 0 are 1; without the gate they would be equal and the second term 0.
    gated = turns([1, 1, 0, 1], [0, 0, 1, 1], [0, 1, 0, 1])
    assert gated[0] == pytest.approx(1.5)
    assert turns([1, 1, 0, 1], [0, 0, 1, 1], [0, 1, 0, 1], future_weight=0.0)[0] == pytest.approx(1)


def test_later_turns_are_discounted():
    # Turn 0 is right in both, then 0 1 against 1 0: futures 0.5 and 1 with γ = 0.5, equal with γ = 1.
    reward, rollout, turn = [1, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]
    np.testing.assert_allclose(turns(reward, rollout, turn)[[0, 3]], [-0.5, 0.5], rtol=1e-6)
    assert turns(reward, rollout, turn, gamma=1.0)[[0, 3]].tolist() == [0, 0]


def test_turns_without_a_signal_give_exactly_zero():
    assert turns([1, 1, 1, 1], [0, 0, 1, 1], [0, 1, 0, 1]).tolist() == [0] * 4
    assert turns([1, 0], [0, 0], [0, 1]).tolist() == [0] * 2
    assert turns([1, 0], [0, 0], [0, 0], group=[0, 1]).tolist() == [0] * 2


def test_turns_that_make_no_sense_are_refused():
    with pytest.raises(RecordError, match=r"turn rewards must be 0 or 1, got \[0\.5\]"):
        turns([0.5], [0], [0])
    with pytest.raises(RecordError, match=r"turn_relative: rewards must be finite"):
        turns([math.nan], [0], [0])
    with pytest.raises(RecordError, match=r"turns of a rollout must be 0, 1, \.\.\. once each, got \[0, 2\]"):
        turns([1, 1], [0, 0], [0, 2])
    with pytest.raises(RecordError, match=r"gamma must lie in 0\.\.1, got 1\.5"):
        turns([1], [0], [0], gamma=1.5)
    with pytest.raises(RecordError, match=r"future_weight must be a finite number of at least 0, got -1"):
        turns([1], [0], [0], future_weight=-1)
