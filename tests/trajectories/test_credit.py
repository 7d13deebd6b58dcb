import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from harnessrl_jax.errors import LineageError, RecordError
from harnessrl_jax.trajectories import (
    Drop,
    build_lineage,
    call_advantages,
    leave_one_out,
    loss_weights,
    process_by_call_index,
    supervised_calls,
)


def outcome(reward, group=None, counted=None):
    size = len(reward)
    return leave_one_out(
        np.array(reward, np.float64),
        np.zeros(size, int) if group is None else np.array(group),
        np.ones(size, bool) if counted is None else np.array(counted),
    )


def process(reward, group=None, index=None):
    zeros = np.zeros(len(reward), int)
    return process_by_call_index(
        np.array(reward, np.float64),
        zeros if group is None else np.array(group),
        zeros if index is None else np.array(index),
    )


def test_leave_one_out_worked_by_hand():
    # The others of the first have mean 1/3, those of the second 2/3.
    np.testing.assert_allclose(outcome([1, 0, 0, 1]), [2 / 3, -2 / 3, -2 / 3, 2 / 3])
    np.testing.assert_allclose(outcome([1, 5, 0, 7], group=[3, 9, 3, 9]), [1, -2, -1, 2])
    assert outcome([1, 0]).dtype == np.float64


def test_groups_without_a_signal_give_exactly_zero():
    assert outcome([0.7]).tolist() == [0.0]
    assert outcome([0.7] * 7).tolist() == [0.0] * 7
    assert outcome([0.1 + 0.2] * 3 + [1.0], group=[0, 0, 0, 1]).tolist() == [0.0] * 4
    assert outcome([]).tolist() == []


def test_members_that_do_not_count_change_nothing_and_are_never_read():
    got = outcome([1, math.nan, 0, math.inf], counted=[True, False, True, False])
    assert got.tolist() == [1, 0, -1, 0]
    assert outcome([1, 0], counted=[True, False]).tolist() == [0, 0]


def test_a_counted_reward_that_is_not_finite_is_refused():
    with pytest.raises(RecordError, match=r"leave_one_out: rewards must be finite, got \[1\.0, nan\]"):
        outcome([1, math.nan])
    with pytest.raises(RecordError, match=r"process_by_call_index: rewards must be finite"):
        process([math.inf, 0.0])


@hypothesis.given(st.lists(st.floats(-10, 10), min_size=2, max_size=9), st.randoms(use_true_random=False))
def test_the_order_of_a_group_does_not_matter(reward, random):
    order = list(range(len(reward)))
    random.shuffle(order)
    shuffled = [reward[place] for place in order]
    np.testing.assert_array_equal(outcome(reward)[order], outcome(shuffled))
    np.testing.assert_array_equal(process(reward)[order], process(shuffled))


def test_one_group_of_leave_one_out_is_the_centred_reward_stretched():
    reward = np.array([0.1, 0.5, 0.9, 0.2])
    np.testing.assert_allclose(outcome(reward), (reward - reward.mean()) * 4 / 3)


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


def test_loss_weights():
    rollout = np.array([4, 4, 9, 4, 4])
    assert loss_weights(rollout, "rollout").tolist() == [0.25, 0.25, 1, 0.25, 0.25]
    assert loss_weights(rollout, "token").tolist() == [1] * 5
    assert loss_weights(np.zeros(0, int), "rollout").tolist() == []
    assert loss_weights(rollout, "rollout").dtype == np.float32
    with pytest.raises(RecordError, match=r"unknown mode 'row'\. Known modes: rollout, token"):
        loss_weights(rollout, "row")


@pytest.fixture
def step(make_call, make_rollout):
    """Rollout a (reward 1) makes three calls, b (reward 0) one."""

    def build(a=None, b=None, **options):
        calls = {
            "a": [make_call(f"a{i}", [1, i], [2, 3], seq=i, rollout_id="a") for i in range(3)],
            "b": [make_call("b0", [1, 0], [4], rollout_id="b")],
        }
        rollouts = [
            make_rollout("a", **({"reward": 1.0} | (a or {}))),
            make_rollout("b", **({"reward": 0.0} | (b or {}))),
        ]
        lineages = [build_lineage(own) for own in calls.values()]
        return call_advantages(rollouts, lineages, **({"process_weight": 0.1} | options))

    return build


def test_the_baseline_counts_rollouts_not_calls(step):
    # Baselines of 1/2 a rollout, not of 3/4 a call.
    assert step().advantages() == {"a0": 1, "a1": 1, "a2": 1, "b0": -1}


def test_a_rollout_without_calls_still_counts(make_call, make_rollout):
    lineage = build_lineage([make_call("a0", [1], [2], rollout_id="a")])
    rollouts = [make_rollout("a", 1.0), make_rollout("b", 0.0)]
    assert call_advantages(rollouts, [lineage], process_weight=0.0).advantages() == {"a0": 1}


def test_each_group_has_its_own_baseline(make_call, make_rollout):
    names = {"a": ("g", 1.0), "b": ("g", 0.0), "c": ("h", 9.0), "d": ("h", 5.0)}
    lineages = [
        build_lineage([make_call(name, [1], [2], rollout_id=name, group_id=group)])
        for name, (group, _) in names.items()
    ]
    rollouts = [make_rollout(name, reward, group_id=group) for name, (group, reward) in names.items()]
    got = call_advantages(rollouts, lineages, process_weight=0.0)
    assert got.advantages() == {"a": 1, "b": -1, "c": 4, "d": -4}


def test_an_infrastructure_failure_is_in_neither_loss_nor_baseline(step):
    got = step(b={"status": "infra_failure", "reward": 0.0})
    assert got.advantages() == {"a0": 0, "a1": 0, "a2": 0}  # a is now alone
    assert got.dropped == {"infra_failure": Drop(calls=1, tokens=1)}


def test_a_policy_failure_keeps_its_reward(step):
    got = step(b={"status": "policy_failure", "reward": 0.25})
    assert got.advantages()["b0"] == -0.75


def test_a_rollout_without_a_reward_is_not_a_failure(step):
    got = step(b={"reward": None})
    assert got.advantages() == {"a0": 0, "a1": 0, "a2": 0}
    assert got.dropped == {"no_reward": Drop(calls=1, tokens=1)}


def test_truncated_rollouts_follow_the_option(step):
    kept = step(b={"status": "truncated"})
    assert kept.advantages()["b0"] == -1
    masked = step(b={"status": "truncated"}, truncated="mask")
    assert masked.advantages() == {"a0": 1, "a1": 1, "a2": 1}  # its reward stays in the baseline
    assert masked.dropped == {"truncated_rollout": Drop(calls=1, tokens=1)}


def test_only_the_last_attempt_is_used(make_call, make_rollout):
    calls = [make_call(f"c{i}", [1], [2, 3], attempt=i) for i in range(2)] + [make_call("d", [1], [2], rollout_id="d")]
    rollouts = [
        make_rollout(reward=0.0, attempt=0),
        make_rollout(reward=1.0, attempt=1),
        make_rollout("d", reward=0.5),
    ]
    got = call_advantages(rollouts, [build_lineage([call]) for call in calls], process_weight=0.0)
    assert got.advantages() == {"c1": 0.5, "d": -0.5}
    assert got.dropped == {"earlier_attempt": Drop(calls=1, tokens=2)}


def test_every_state_and_kind_of_call_that_is_not_trained_has_its_reason(make_call, make_rollout):
    calls = [
        make_call("live", [1], [2], seq=0),
        make_call("frozen", [1], [2], seq=1, agent="judge", trainable=False),
        make_call("lost", [3], [2, 2], seq=2, delivered=False),
        make_call("tried", [4], [2, 2, 2], seq=3, request_digest="x", delivered=False),
        make_call("again", [4], [2], seq=4, request_digest="x"),
        make_call("empty", [5], [], seq=5),
    ]
    stray = build_lineage([make_call("stray", [1], [2], rollout_id="unfinished")])
    got = call_advantages([make_rollout()], [build_lineage(calls), stray], process_weight=0.0)
    assert set(got.advantages()) == {"live", "again"}
    assert got.dropped == {
        "empty_output": Drop(calls=1, tokens=0),
        "frozen_agent": Drop(calls=1, tokens=1),
        "no_rollout": Drop(calls=1, tokens=1),
        "superseded": Drop(calls=1, tokens=3),
        "undelivered": Drop(calls=1, tokens=2),
    }


def test_process_rewards_meet_at_the_call_index_of_the_agent(make_call, make_rollout):
    # Central calls of a at 0 and 1; a superseded call of b takes no index; the sub-agent has its own group.
    a = [
        make_call("a0", [1], [2], seq=0, rollout_id="a"),
        make_call("as", [9], [2], seq=1, rollout_id="a", agent="sub"),
        make_call("a1", [1, 2], [2], seq=2, rollout_id="a"),
    ]
    b = [
        make_call("bx", [1], [3], seq=0, rollout_id="b", request_digest="x", delivered=False),
        make_call("b0", [1], [3], seq=1, rollout_id="b", request_digest="x"),
        make_call("b1", [1, 3], [3], seq=2, rollout_id="b"),
    ]
    rollouts = [
        make_rollout("a", 1.0, process_rewards={"a0": 1.0, "as": 5.0, "a1": 0.5}),
        make_rollout("b", 1.0, process_rewards={"bx": 7.0, "b0": 0.0, "b1": 0.5}),
    ]
    got = call_advantages(rollouts, [build_lineage(a), build_lineage(b)], process_weight=0.1).advantages()
    half = 0.1 * 0.5 / 0.500001
    assert got == pytest.approx({"a0": half, "as": 0, "a1": 0, "b0": -half, "b1": 0}, rel=1e-12)
    assert (got["as"], got["a1"], got["b1"]) == (0, 0, 0)


def test_supervised_calls_have_advantage_one(make_call, make_rollout):
    lineages = [
        build_lineage([make_call("a", [1], [2], rollout_id="a"), make_call("b", [1], [], rollout_id="a", seq=1)]),
        build_lineage([make_call("c", [1], [2], rollout_id="c")]),
    ]
    got = supervised_calls([make_rollout("a", 1.0), make_rollout("c", 0.0)], lineages)
    assert got.advantages() == {"a": 1.0, "c": 1.0}
    assert [credited.success for credited in got.calls] == [True, False]
    assert got.dropped == {"empty_output": Drop(calls=1, tokens=0)}


def test_success_is_an_outcome_above_zero(step):
    assert {c.call.call_id: c.success for c in step().calls} == {"a0": True, "a1": True, "a2": True, "b0": False}


def test_records_that_disagree_are_refused(make_call, make_rollout):
    lineage = build_lineage([make_call("a", [1], [2])])
    with pytest.raises(LineageError, match=r"Rollout 'r', attempt 0, was given twice"):
        call_advantages([make_rollout(), make_rollout()], [lineage], process_weight=0.0)
    with pytest.raises(LineageError, match=r"Lineage of rollout 'r', attempt 0, was given twice"):
        call_advantages([make_rollout()], [lineage, lineage], process_weight=0.0)
    with pytest.raises(LineageError, match=r"call 'a' has group 'group', its rollout has group 'other'"):
        call_advantages([make_rollout(group_id="other")], [lineage], process_weight=0.0)
    with pytest.raises(LineageError, match=r"process_rewards name 'z', which the rollout did not call.*Known calls: a"):
        call_advantages([make_rollout(process_rewards={"z": 1.0})], [lineage], process_weight=0.0)
    other = build_lineage([make_call("a", [1], [2], rollout_id="q")])
    with pytest.raises(LineageError, match=r"call_id 'a' is also used in rollout 'r'"):
        call_advantages([make_rollout()], [lineage, other], process_weight=0.0)
