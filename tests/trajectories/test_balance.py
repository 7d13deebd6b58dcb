import dataclasses

import numpy as np
import pytest

from harnessrl_jax.trajectories import CreditedCall, build, build_lineage, build_targets, call_advantages
from harnessrl_jax.trajectories.balance import audit_balance, audit_lineage, audit_targets, audit_weights


@pytest.fixture
def calls(make_call):
    """A call, one that goes on from it, and one of another rollout that shares the prompt."""
    return [
        make_call("a", [1, 2], [3, 4], seq=0),
        make_call("b", [1, 2, 3, 4, 5], [6], seq=1),
        make_call("c", [1, 2], [3, 9, 9], rollout_id="other"),
    ]


def targets_of(calls):
    credited = [CreditedCall(call=call, advantage=1.0, success=True) for call in calls]
    tree, leaf = build([np.concatenate([call.prompt_ids, call.output_ids]) for call in calls])
    rollout = np.array([0, 0, 1], np.int32)
    number = np.arange(3, dtype=np.int32)
    given = build_targets(tree, leaf, credited, call_number=number, rollout_number=rollout, loss_mean="rollout")
    return credited, tree, leaf, given


def test_sound_records_balance(calls, make_rollout):
    lineages = [build_lineage(calls[:2]), build_lineage(calls[2:])]
    assert audit_weights([make_rollout(), make_rollout("other", 0.0)], lineages) == []
    assert audit_weights([], lineages) == []
    assert audit_targets(*targets_of(calls)) == []
    assert [audit_lineage(lineage) for lineage in lineages] == [[], []]


def test_a_token_that_is_lost_without_a_reason(calls, make_rollout):
    lineages = [build_lineage(calls[:2]), build_lineage(calls[2:])]
    credited = call_advantages([make_rollout()], lineages, process_weight=0.0)
    assert audit_balance(credited, lineages) == []
    (finding,) = audit_balance(credited._replace(dropped={}), lineages)
    assert finding.what == "6 tokens were sampled, but 3 are trained and 0 are dropped with a reason"


def changed(targets, name, place, value):
    column = getattr(targets, name).copy()
    column[place] = value
    return targets._replace(**{name: column})


@pytest.mark.parametrize("name", ["source", "token", "call"])
def test_a_target_in_another_context(calls, name):
    credited, tree, leaf, given = targets_of(calls)
    found = audit_targets(credited, tree, leaf, changed(given, name, 0, getattr(given, name)[-1]))
    assert found
    assert "sampled ids, each in its own context" in found[0].what


def test_a_target_that_is_counted_twice_or_missing(calls):
    credited, tree, leaf, given = targets_of(calls)
    for places in ([0, *range(6)], range(1, 6)):
        found = audit_targets(credited, tree, leaf, type(given)(*(column[list(places)] for column in given)))
        assert found
        assert "sampled ids, each in its own context" in found[0].what


def test_a_weight_that_does_not_add_up(calls):
    credited, tree, leaf, given = targets_of(calls)
    found = audit_targets(credited, tree, leaf, changed(given, "weight", 0, 0.5))
    assert found
    assert "weigh" in found[0].what


def test_a_tree_of_other_tokens(calls):
    credited, tree, leaf, given = targets_of(calls)
    token = tree.token.copy()
    token[0] = 7
    assert len(audit_targets(credited, tree._replace(token=token), leaf, given)) == 3


def test_a_link_to_a_call_that_is_no_prefix(calls):
    lineage = build_lineage(calls[:2])
    first, second = lineage.calls
    shorter = dataclasses.replace(second.call, prompt_ids=[1, 2, 3, 8, 5])
    (finding,) = audit_lineage(lineage._replace(calls=(first, second._replace(call=shorter))))
    assert finding.what == "its prompt does not begin with the 4 ids of 'a', which it extends"


def test_records_that_cannot_be_credited(calls, make_rollout):
    twice = [build_lineage(calls[:2]), build_lineage(calls[:2])]
    (finding,) = audit_weights([make_rollout()], twice)
    assert (finding.rule, finding.where) == ("lineage", "group 'group'")
    assert "was given twice" in finding.what
