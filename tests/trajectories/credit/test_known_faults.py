"""Faults of advantages and loss scales that were reported of other trainers: the smallest input of each."""

import math
from functools import partial

import numpy as np
import pytest

from harnessrl_jax.errors import LineageError, RecordError
from harnessrl_jax.trajectories import Drop, build_lineage, call_advantages, leave_one_out, pack_groups
from harnessrl_jax.trajectories.credit import group_mean, group_report, group_std, max_rl, process_by_call_index

COMMON = {
    "std": partial(group_std, floor=1e-8, unbiased=True),
    "mean": group_mean,
    "max_rl": max_rl,
    "loo": leave_one_out,
}
every = pytest.mark.parametrize("estimator", COMMON.values(), ids=COMMON)


def group_of(reward, dtype=np.float64):
    return np.array(reward, dtype), np.zeros(len(reward), int), np.ones(len(reward), bool)


def step_of(make_call, make_rollout, made, **options):
    """name -> (reward, lengths of its outputs)."""
    lineages = [
        build_lineage([make_call(f"{name}{i}", [1, i], [5] * n, seq=i, rollout_id=name) for i, n in enumerate(sizes)])
        for name, (_, sizes) in made.items()
        if sizes
    ]
    rollouts = [make_rollout(name, reward) for name, (reward, _) in made.items()]
    return call_advantages(rollouts, lineages, process_weight=0.0, **options)


def test_the_baseline_counts_rollouts_not_rows(make_call, make_rollout):
    # A (reward 1) in three rows and B (reward 0) in one: the mean is 1/2, not 3/4.
    got = step_of(make_call, make_rollout, {"a": (1.0, [1, 1, 1]), "b": (0.0, [1])}, estimator=group_mean)
    assert got.advantages() == {"a0": 0.5, "a1": 0.5, "a2": 0.5, "b0": -0.5}


def test_one_rollout_cannot_have_two_rewards(make_call, make_rollout):
    lineage = build_lineage([make_call("a0", [1], [2])])
    with pytest.raises(LineageError, match=r"was given twice\. Give each record once"):
        call_advantages([make_rollout(reward=1.0), make_rollout(reward=0.0)], [lineage], process_weight=0.0)


@every
@pytest.mark.parametrize("reward", [[1, 0, 0, 0], [0, *[0.95] * 7]])
def test_no_deviation_explodes(estimator, reward):
    # A deviation over the others alone would be 0 for the odd one out.
    assert np.abs(estimator(*group_of(reward))).max() <= len(reward) - 1


@every
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equal_rewards_give_exactly_zero(estimator, dtype):
    assert estimator(*group_of([0.7] * 7, dtype)).tolist() == [0.0] * 7
    reward = np.array([0.7] * 7, dtype)
    assert process_by_call_index(reward, np.zeros(7, int), np.zeros(7, int)).tolist() == [0.0] * 7


@every
def test_the_only_survivor_of_a_group_has_advantage_zero(estimator):
    reward, group, counted = group_of([1.0, *[math.nan] * 7])
    counted[1:] = False
    assert estimator(reward, group, counted).tolist() == [0.0] * 8


def test_a_group_of_one_is_counted_and_can_be_left_out(make_call, make_rollout):
    made = {"a": (1.0, [2])}
    assert group_report([make_rollout("a", 1.0)]).alone == 1
    assert step_of(make_call, make_rollout, made).advantages() == {"a0": 0}
    left_out = step_of(make_call, make_rollout, made, flat_groups="drop")
    assert left_out.dropped == {"flat_group": Drop(calls=1, tokens=2)}


@pytest.mark.parametrize(("flat_groups", "weight"), [("keep", 4), ("drop", 2)])
def test_flat_groups_share_the_denominator_only_if_asked_to(make_call, make_rollout, flat_groups, weight):
    rewards = {"a": ("flat", 0.7), "b": ("flat", 0.7), "c": ("mixed", 1.0), "d": ("mixed", 0.0)}
    lineages = [
        build_lineage([make_call(name, [1], [2], rollout_id=name, group_id=g)]) for name, (g, _) in rewards.items()
    ]
    rollouts = [make_rollout(name, reward, group_id=g) for name, (g, reward) in rewards.items()]
    credited = call_advantages(rollouts, lineages, process_weight=0.0, flat_groups=flat_groups)
    assert {name: value for name, value in credited.advantages().items() if name in "cd"} == {"c": 1, "d": -1}
    assert (
        pack_groups(credited, loss_mean="rollout", row_slots=8, row_targets=8, max_rows=2).batch.weight.sum() == weight
    )


def test_an_advantage_stands_at_its_own_call_s_tokens(make_call, make_rollout):
    # Outputs of 2 and of 5 tokens in one row.
    credited = step_of(make_call, make_rollout, {"a": (1.0, [2]), "b": (0.0, [5])})
    step = pack_groups(credited, loss_mean="token", row_slots=16, row_targets=16, max_rows=1)
    used = step.batch.weight > 0
    names = np.array([c.call.call_id for c in step.calls])[step.batch.call[used]]
    assert (
        sorted(zip(names.tolist(), step.batch.advantage[used].tolist(), strict=True))
        == [("a0", 1)] * 2 + [("b0", -1)] * 5
    )
    assert not step.batch.advantage[~used].any()


def test_a_mean_over_tokens_is_one_mean_over_all_tokens(make_call, make_rollout):
    # A few tokens in one row and many in another, as on two devices: every token weighs the same.
    credited = step_of(make_call, make_rollout, {"a": (1.0, [10]), "b": (0.0, [200])})
    batch = pack_groups(credited, loss_mean="token", row_slots=201, row_targets=200, max_rows=2).batch
    sums = (batch.weight * batch.advantage).sum(axis=1, dtype=np.float64)
    assert 10 * batch.weight.sum(axis=1).min() < batch.weight.sum(axis=1).max()
    assert sums.sum() / batch.weight.sum() == pytest.approx((10 - 200) / 210)


def test_a_dead_sandbox_is_not_a_bad_policy(make_call, make_rollout):
    names = [f"r{i}" for i in range(8)]
    lineages = [build_lineage([make_call(name, [1], [2], rollout_id=name)]) for name in names]
    rollouts = [make_rollout(name, float(i % 2)) for i, name in enumerate(names)]
    rollouts[0] = make_rollout("r0", None, status="infra_failure")
    got = call_advantages(rollouts, lineages, process_weight=0.0, estimator=group_mean)
    assert got.advantages() == pytest.approx({name: (i % 2) - 4 / 7 for i, name in enumerate(names) if i})
    assert got.dropped == {"infra_failure": Drop(calls=1, tokens=1)}
    assert group_report(rollouts).counted == 7


def test_calls_that_are_lost_do_not_change_the_reward(make_call, make_rollout):
    # The verifier judged what the harness saw; what is left of its calls says nothing about that.
    lost = build_lineage([make_call("a0", [1], [2], rollout_id="a", delivered=False)])
    other = build_lineage([make_call("b0", [1], [2], rollout_id="b")])
    got = call_advantages([make_rollout("a", 1.0), make_rollout("b", 0.0)], [lost, other], process_weight=0.0)
    assert got.advantages() == {"b0": -1}
    assert got.dropped == {"undelivered": Drop(calls=1, tokens=1)}


@every
def test_rewards_of_sixteen_bits_are_refused(estimator):
    # 0.1 and 0.1003 are one number in bfloat16.
    assert estimator(*group_of([0.1, 0.1003], np.float32))[0] < 0
    with pytest.raises(RecordError, match=r"rewards must be float32, float64 or integers, got float16"):
        estimator(*group_of([0.1, 0.1003], np.float16))


def test_advantages_are_rounded_once_where_the_targets_are_made(make_call, make_rollout):
    credited = step_of(make_call, make_rollout, {"a": (0.1, [1]), "b": (0.1003, [1])})
    assert credited.advantages()["b0"] == 0.1003 - 0.1
    batch = pack_groups(credited, loss_mean="rollout", row_slots=8, row_targets=8, max_rows=1).batch
    assert np.float32(0.1003 - 0.1) in batch.advantage
