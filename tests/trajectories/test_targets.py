import numpy as np
import pytest

from harnessrl_jax.trajectories import CreditedCall, Role, Span, build, build_targets


def targets_of(calls, loss_mean="rollout"):
    tree, leaf = build([np.concatenate([call.prompt_ids, call.output_ids]) for call in calls])
    rollouts = sorted({call.rollout_id for call in calls})
    credited = [CreditedCall(call=c, advantage=float(i), success=i % 2 == 0) for i, c in enumerate(calls)]
    return tree, build_targets(
        tree,
        leaf,
        credited,
        call_number=np.arange(len(calls)) + 10,
        rollout_number=np.array([rollouts.index(call.rollout_id) for call in calls]) + 20,
        loss_mean=loss_mean,
    )


def test_the_targets_of_a_call_are_exactly_its_output(make_call):
    # Prompt of three, output of two with the end of turn: predicted from the last prompt token on.
    spans = (Span(role=Role.ACTION, start=0, end=1),)
    tree, targets = targets_of([make_call("c", [5, 6, 7], [8, 2], spans=spans)])
    assert tree.token[targets.source].tolist() == [7, 8]
    assert targets.token.tolist() == [8, 2]
    assert targets.role.tolist() == [Role.ACTION, Role.OTHER]
    assert targets.logp_behaviour.tolist() == [-1 / 8, -2 / 8]
    assert targets.weight.tolist() == [0.5, 0.5]
    assert targets.call.tolist() == [10, 10]
    assert targets.rollout.tolist() == [20, 20]


def test_the_same_sample_twice_is_two_targets_on_one_source(make_call):
    calls = [make_call("a", [1], [2, 3], rollout_id="a"), make_call("b", [1], [2, 3], rollout_id="b")]
    tree, targets = targets_of(calls)
    assert tree.token.tolist() == [1, 2, 3]
    assert targets.source.tolist() == [0, 0, 1, 1]
    assert targets.call.tolist() == [10, 11, 10, 11]
    assert targets.advantage.tolist() == [0, 1, 0, 1]
    assert targets.success.tolist() == [True, False, True, False]


def test_a_turn_that_later_prompts_contain_is_trained_once(make_call):
    calls = [
        make_call("a", [1], [2], seq=0),
        make_call("b", [1, 2, 3], [4], seq=1),
        make_call("c", [1, 2, 5], [4], seq=2),
    ]
    _, targets = targets_of(calls)
    assert sorted(zip(targets.call.tolist(), targets.token.tolist(), strict=True)) == [(10, 2), (11, 4), (12, 4)]
    assert targets.weight.sum() == pytest.approx(1)


def test_absent_log_probabilities_are_marked(make_call):
    _, targets = targets_of([make_call("a", [1], [2]), make_call("b", [3], [4, 5], logps=None)])
    assert targets.has_logp.tolist() == [True, False, False]


def test_weights_follow_the_mean(make_call):
    calls = [make_call("a", [1], [2, 3, 4], rollout_id="a"), make_call("b", [5], [6], rollout_id="b")]
    assert targets_of(calls)[1].weight.tolist() == [np.float32(1 / 3)] * 3 + [1]
    assert targets_of(calls, "token")[1].weight.tolist() == [1] * 4


def test_no_calls_give_no_targets_of_the_right_types():
    _, targets = targets_of([])
    assert [len(field) for field in targets] == [0] * 10
    kinds = [np.int32, np.int32, np.float32, np.bool_, np.float32, np.int8, np.float32, np.bool_, np.int32, np.int32]
    assert [field.dtype for field in targets] == kinds
