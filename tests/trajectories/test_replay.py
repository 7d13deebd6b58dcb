"""Recorded experts in trees and rows: a target keeps those that sampled it, and calls share what went the same way."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from harnessrl_jax.errors import PackingError
from harnessrl_jax.trajectories import CreditedCall, CreditedCalls, pack, pack_groups
from harnessrl_jax.trajectories.grouping import group_trees

LAYERS, ACTIVE = 2, 1


def credited_of(calls):
    return CreditedCalls(tuple(CreditedCall(call=call, advantage=1.0, success=True) for call in calls), dropped={})


def packed(calls, row_slots=64, row_targets=64, max_rows=8):
    credited = credited_of(calls)
    shape = {"row_slots": row_slots, "row_targets": row_targets, "max_rows": max_rows}
    return pack_groups(credited, loss_mean="token", **shape)


def routes_of(*experts):
    """The same expert in every layer."""
    return np.array(experts, np.uint8).repeat(LAYERS * ACTIVE).reshape(-1, LAYERS, ACTIVE)


def test_tokens_that_went_to_other_experts_are_other_nodes(make_call):
    calls = [
        make_call("a", [5, 6], [7, 8], experts=routes_of(0, 1, 2)),
        make_call("b", [5, 6], [7, 9], experts=routes_of(0, 1, 2)),
        make_call("c", [5, 6], [7, 8], experts=routes_of(0, 3, 2)),
    ]
    batch, report, *_ = packed(calls)
    assert batch.token[0, : report.slots_used].tolist() == [5, 6, 7, 6, 7]
    assert batch.experts[0, : report.slots_used, 0, 0].tolist() == [0, 1, 2, 3, 2]
    assert batch.subtree_end[0, : report.slots_used].tolist() == [5, 3, 3, 5, 5]
    assert batch.experts.shape == (8, 64, LAYERS, ACTIVE)
    assert (batch.experts.dtype, batch.token.dtype) == (np.uint8, np.int32)
    assert not batch.experts[:, report.slots_used :].any()


def test_siblings_stand_in_the_order_of_their_tokens_and_then_of_their_experts(make_call):
    """On a machine that stores the low byte first, the bytes of token 256 come before those of token 1."""
    ends = [(256, 0), (1, 2), (70_000, 1), (1, 1)]
    calls = [
        make_call(f"{at}", [5, token], [9], experts=routes_of(0, expert), rollout_id=f"{at}")
        for at, (token, expert) in enumerate(ends)
    ]
    (tree, _), *_ = group_trees(credited_of(calls), loss_mean="token", row_slots=8).items
    assert list(zip(tree.token[1:].tolist(), tree.experts[1:, 0, 0].tolist(), strict=True)) == sorted(ends)


CALL = st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=6), st.lists(st.integers(0, 2), max_size=4))


@hypothesis.given(st.lists(CALL, min_size=1, max_size=5), st.integers(10, 14), st.randoms(use_true_random=False))
def test_every_target_stands_on_the_experts_of_its_own_call(make_call, made, row_slots, rng):
    calls = []
    for number, (prompt, output) in enumerate(made):
        read = len(prompt) + max(len(output) - 1, 0)
        experts = np.array([rng.randrange(2) for _ in range(read * LAYERS * ACTIVE)]).reshape(read, LAYERS, ACTIVE)
        calls.append(make_call(f"{number}", prompt, output, rollout_id=f"{number}", experts=experts))
    step = packed(calls, row_slots=row_slots, row_targets=8, max_rows=32)
    batch, found = step.batch, {}
    for row, target in np.argwhere(batch.weight > 0):
        source = batch.source[row, target]
        path = np.flatnonzero(batch.subtree_end[row, : source + 1] > source)
        call = step.calls[batch.call[row, target]].call
        tokens = np.concatenate([call.prompt_ids, call.output_ids])
        np.testing.assert_array_equal(batch.token[row, path], tokens[: len(path)])
        np.testing.assert_array_equal(batch.experts[row, path], call.experts[: len(path)])
        assert batch.target[row, target] == tokens[len(path)]
        found.setdefault(call.call_id, []).append(len(path) - len(call.prompt_ids))
    assert found == {call.call_id: list(range(len(call.output_ids))) for call in calls if len(call.output_ids)}


def test_a_token_that_always_goes_to_the_same_experts_changes_nothing(make_call):
    sequences = [([1, 2], [3, 4]), ([1, 2], [3, 5]), ([1, 2, 3, 4], [6]), ([2], [1, 1, 1])]
    plain = [make_call(f"{at}", *ids) for at, ids in enumerate(sequences)]
    routed = [
        make_call(f"{at}", prompt, output, experts=routes_of(*(np.array([*prompt, *output[:-1]]) % 3)))
        for at, (prompt, output) in enumerate(sequences)
    ]
    without, with_experts = packed(plain).batch, packed(routed).batch
    for name in without._fields[:-3]:
        np.testing.assert_array_equal(getattr(with_experts, name), getattr(without, name), err_msg=name)
    assert without.experts == ()


def test_experts_in_some_calls_only_or_of_another_model_are_refused(make_call):
    one = make_call("a", [1], [2], experts=routes_of(0))
    with pytest.raises(PackingError, match=r"Calls 'b' and 'a' record experts .*: none and \[2, 1\]\. Train on what"):
        packed([one, make_call("b", [1], [2], session_id="other")])
    other = make_call("b", [1], [2], session_id="other", experts=np.zeros((1, 3, 1), np.uint8))
    with pytest.raises(PackingError, match=r"Calls 'b' and 'a' .*: \[3, 1\] and \[2, 1\]"):
        packed([one, other])
    trees = [group_trees(credited_of([call]), loss_mean="token", row_slots=8).items for call in (one, other)]
    with pytest.raises(PackingError, match=r"pack: trees replay experts of different shapes .*\(2, 1\).*\(3, 1\)"):
        pack([item for items in trees for item in items], row_slots=8, row_targets=8, max_rows=2)
