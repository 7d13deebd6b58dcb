"""Loss weights, alone and through real trees and rows."""

import math

import numpy as np
import pytest

from harnessrl_jax.errors import RecordError
from harnessrl_jax.trajectories import build_lineage, call_advantages, loss_weights, pack_groups
from harnessrl_jax.trajectories.credit import LossWeights, sequence_sum


def test_loss_weights():
    rollout, call, prompt = np.array([4, 4, 9, 4, 4]), np.array([0, 0, 1, 2, 2]), np.array([0, 0, 1, 1, 1])
    assert loss_weights(rollout, "rollout").tolist() == [0.25, 0.25, 1, 0.25, 0.25]
    assert loss_weights(rollout, "token").tolist() == [1] * 5
    assert loss_weights(rollout, "call", call=call).tolist() == [0.5, 0.5, 1, 0.5, 0.5]
    assert loss_weights(rollout, "prompt", prompt=prompt).tolist() == [
        0.5,
        0.5,
        *np.float32([1 / 3] * 3),
    ]
    assert loss_weights(np.zeros(0, int), "rollout").tolist() == []
    assert loss_weights(rollout, "rollout").dtype == np.float32


def test_weights_that_cannot_be_taken_are_refused():
    rollout = np.array([4, 4, 9])
    with pytest.raises(RecordError, match=r"unknown mode 'row'\. Known modes: rollout, token, call, prompt"):
        loss_weights(rollout, "row")
    with pytest.raises(RecordError, match=r"mode 'prompt' wants the prompt of every target, got none"):
        loss_weights(rollout, "prompt")
    with pytest.raises(RecordError, match=r"mode 'call' wants the call of every target, got 2 for 3 targets"):
        loss_weights(rollout, "call", call=rollout[:2])


def test_the_sum_over_a_sequence():
    # Σ weight * value / denominator = 1/2 [(1 + 2) / 4 + 3 / 4]
    weight, denominator = sequence_sum(np.array([7, 7, 8]), length=4)
    assert (weight * np.array([1, 2, 3])).sum() / denominator == 0.75
    assert weight.dtype == np.float32
    assert sequence_sum(np.zeros(0, int), length=1).denominator == 0
    assert isinstance(sequence_sum(np.array([1]), length=1), LossWeights)
    with pytest.raises(RecordError, match=r"sequence_sum: length must be a finite number above 0, got 0"):
        sequence_sum(np.array([1]), length=0)


@pytest.fixture(scope="module")
def credited(make_call, make_rollout):
    """Two groups. "a" makes six calls of three tokens, "b" one of two, "c" two of five and one."""
    calls = {
        "a": [make_call(f"a{i}", [1, i], [2, 3, i], seq=i, rollout_id="a", group_id="g") for i in range(6)],
        "b": [make_call("b0", [1, 0], [4, 5], rollout_id="b", group_id="g")],
        "c": [
            make_call("c0", [9], [4, 5, 6, 7, 8], seq=0, rollout_id="c", group_id="h"),
            make_call("c1", [9, 9], [4], seq=1, rollout_id="c", group_id="h"),
        ],
    }
    rollouts = [
        make_rollout(name, reward, group_id=group)
        for name, reward, group in [("a", 1.0, "g"), ("b", 0.0, "g"), ("c", 1.0, "h")]
    ]
    return call_advantages(rollouts, [build_lineage(own) for own in calls.values()], process_weight=0.0)


def packed(credited, mode, row_targets):
    return pack_groups(credited, loss_mean=mode, row_slots=64, row_targets=row_targets, max_rows=64)


def weight_by_rollout(step):
    own = [step.batch.weight[step.batch.rollout == place].tolist() for place in range(len(step.rollouts))]
    return {name: math.fsum(weights) for name, weights in zip(step.rollouts, own, strict=True)}


WANT = {
    "rollout": {"a": 1, "b": 1, "c": 1},
    "token": {"a": 18, "b": 2, "c": 6},
    "call": {"a": 6, "b": 1, "c": 2},
    "prompt": {"a": 18 / 20, "b": 2 / 20, "c": 1},
}


@pytest.mark.parametrize("mode", WANT)
def test_a_rollout_cut_into_n_rows_weighs_the_same_for_every_n(credited, mode):
    whole, rows = weight_by_rollout(packed(credited, mode, 64)), set()
    assert whole == pytest.approx(WANT[mode], rel=1e-7)
    for row_targets in (1, 2, 3, 4, 6, 9, 18, 64):
        step = packed(credited, mode, row_targets)
        assert step.report.dropped == {}
        rows.add(int((step.batch.rollout == step.rollouts.index("a")).any(axis=1).sum()))
        assert weight_by_rollout(step) == whole
    assert {1, 2, 18} <= rows  # from one row to one row a target


@pytest.mark.parametrize("mode", WANT)
def test_the_loss_does_not_depend_on_how_rows_are_split(credited, mode):
    """Sums over any split of the rows add up, also where a rollout or a device's share is cut unevenly."""
    step = packed(credited, mode, 4)
    batch = step.batch
    loss = batch.weight.astype(np.float64) * batch.advantage * (batch.target + 1)
    whole = loss.sum() / batch.weight.sum(dtype=np.float64)
    for cuts in ([1], [2, 5], [3, 4, 6]):
        parts = list(zip(np.split(loss, cuts), np.split(batch.weight.astype(np.float64), cuts), strict=True))
        assert sum(part.sum() for part, _ in parts) / sum(w.sum() for _, w in parts) == pytest.approx(whole, rel=1e-14)
        means = [part.sum() / w.sum() for part, w in parts if w.sum()]
        assert abs(np.mean(means) - whole) > 1e-3  # a mean of the parts' means is another number
