"""Random forests of calls, from records to rows: the design's rules hold for whatever a harness does."""

import dataclasses
from collections import Counter
from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from harnessrl_jax.trajectories import (
    Bucket,
    Call,
    Role,
    Rollout,
    Span,
    build_lineage,
    call_advantages,
    call_roles,
    group_trees,
    pack,
    pack_buckets,
    pack_groups,
    target_context,
)

MOVES = ["extend", "extend", "sibling", "retry", "rewrite", "restart", "sub-agent", "frozen", "no logps", "aborted"]
REWARDS = [0.0, 0.5, 1.0, 1.0, None]
STATUS = ["completed"] * 6 + ["truncated", "policy_failure", "infra_failure"]
SHAPE = {"row_slots": 64, "row_targets": 64, "max_rows": 16}
LONGEST = 1 + 6 * 6  # a first id, then at most six more ids for each of six calls


class Forest(NamedTuple):
    rollouts: list[Rollout]
    calls: list[Call]


@st.composite
def forests(draw, make_call, make_rollout):
    """A few rollouts of two groups; each call extends, repeats, retries, rewrites ... an earlier one."""
    # Drawn from a seed: structures drawn one by one are mostly small and alike.
    random = draw(st.randoms(use_true_random=True))
    rollouts, calls = [], []
    for place in range(random.randint(2, 5)):
        name, group = f"r{place}", random.choice("gh")
        own: list[Call] = []
        for seq in range(random.randint(0, 6)):
            own.append(_next_call(random, make_call, own, seq, {"rollout_id": name, "group_id": group}))
        calls += own
        process = {call.call_id: random.choice([0.0, 1.0]) for call in own if random.random() < 0.5}
        rollouts.append(
            make_rollout(
                name,
                random.choice(REWARDS),
                group_id=group,
                status=random.choice(STATUS),
                process_rewards=process,
            )
        )
    return Forest(rollouts, calls)


def _next_call(random, make_call, own, seq, place):
    move, before = random.choice(MOVES), random.choice(own) if own else None
    ids = lambda least: random.choices(range(3), k=random.randint(least, 3))
    call_id, output = f"{place['rollout_id']}/{seq}", ids(int(random.random() < 0.9))
    agent = {"sub-agent": "sub", "frozen": "judge"}.get(move, before.agent if before else "central")
    fields = {"request_digest": call_id, "agent": agent, "trainable": agent != "judge"}
    if len(output) > 1:
        spans = (Span(role=Role.ACTION, start=0, end=1), Span(role=Role.ARGS, start=1, end=len(output)))
        fields |= {"spans": spans}
    if before is None or move == "restart":
        prompt = [1, *ids(1)]
    elif move in ("sibling", "retry"):
        prompt = before.prompt_ids
        if move == "retry":
            fields |= {"request_digest": before.request_digest, "retry": random.random() < 0.5}
    else:
        prompt = [*before.prompt_ids.tolist(), *before.output_ids.tolist(), *ids(1)]
        if move == "rewrite":
            prompt[random.randrange(len(prompt))] += 3
    fields |= {"no logps": {"logps": None}, "aborted": {"finish": "aborted", "delivered": False}}.get(move, {})
    return make_call(call_id, prompt, output, seq=seq, **place, **fields)


@pytest.fixture(scope="session")
def forest(make_call, make_rollout):
    return forests(make_call, make_rollout)


def credit(rollouts, calls):
    names = list(dict.fromkeys(call.rollout_id for call in calls))
    lineages = [build_lineage([call for call in calls if call.rollout_id == name]) for name in names]
    return call_advantages(rollouts, lineages, process_weight=0.1)


def entries(step):
    """Every target as (call, place in its output) -> everything a loss can see of it."""
    return entries_of([step.batch], step)


def entries_of(batches, step):
    """The same of the batches of several buckets."""
    out = {}
    places = [(batch, *place) for batch in batches for place in zip(*np.nonzero(batch.weight), strict=True)]
    for batch, row, target in places:
        context = target_context(batch, row, target)
        source = batch.source[row, target]
        seen = np.flatnonzero(batch.subtree_end[row, : source + 1] > source)
        np.testing.assert_array_equal(batch.position[row, seen], np.arange(len(context)))
        call = step.calls[batch.call[row, target]].call
        assert call.rollout_id == step.rollouts[batch.rollout[row, target]]
        key = call.call_id, len(context) - len(call.prompt_ids)
        assert key not in out, "a target twice"
        fields = ("target", "has_logp", "logp_behaviour", "advantage", "role", "weight", "success")
        out[key] = (tuple(context.tolist()), *(getattr(batch, name)[row, target].item() for name in fields))
    return out


@given(st.data())
def test_every_sampled_token_is_one_target_or_has_a_counted_reason(forest, data):
    rollouts, calls = data.draw(forest)
    short = data.draw(st.integers(4, LONGEST))
    max_rows = data.draw(st.integers(1, 8))
    step = pack_groups(credit(rollouts, calls), loss_mean="rollout", row_slots=short, row_targets=8, max_rows=max_rows)
    targets = entries(step)
    dropped = step.report.dropped.values()
    assert len(targets) == step.report.targets_used
    assert len(targets) + sum(drop.tokens for drop in dropped) == sum(len(call.output_ids) for call in calls)
    used = Counter(call_id for call_id, _ in targets)
    assert len(used) + sum(drop.calls for drop in dropped) == len(calls)
    by_id = {call.call_id: call for call in calls}
    assert used == {call_id: len(by_id[call_id].output_ids) for call_id in used}
    assert all(by_id[call_id].trainable for call_id in used)


@given(st.data())
def test_each_rollout_weighs_one(forest, data):
    step = pack_groups(credit(*data.draw(forest)), loss_mean="rollout", **SHAPE)
    weight: Counter[str] = Counter()
    for (call_id, _), entry in entries(step).items():
        weight[call_id.split("/")[0]] += entry[6]
    assert sorted(weight) == sorted(step.rollouts)
    np.testing.assert_allclose(list(weight.values()), 1, rtol=1e-5)


@given(st.data())
def test_each_target_has_exactly_what_was_sampled_in_exactly_its_context(forest, data):
    rollouts, calls = data.draw(forest)
    credited = credit(rollouts, calls)
    by_id = {item.call.call_id: item for item in credited.calls}
    found = entries(pack_groups(credited, loss_mean="token", **SHAPE))
    assert len(found) == sum(len(item.call.output_ids) for item in credited.calls)
    for (call_id, place), entry in found.items():
        call, advantage, success = by_id[call_id]
        full = [*call.prompt_ids.tolist(), *call.output_ids.tolist()]
        logp = 0.0 if call.logps is None else call.logps[place].item()
        role = call_roles(call)[place].item()
        want = (
            tuple(full[: len(call.prompt_ids) + place]),
            call.output_ids[place].item(),
            call.logps is not None,
            logp,
        )
        assert entry == (*want, np.float32(advantage).item(), role, 1.0, success)


@given(st.data())
def test_arrival_order_changes_nothing(forest, data):
    rollouts, calls = data.draw(forest)
    first = credit(rollouts, calls)
    one = pack_groups(first, loss_mean="rollout", **SHAPE)
    random = data.draw(st.randoms(use_true_random=False))
    random.shuffle(rollouts)
    random.shuffle(calls)
    again = credit(rollouts, calls)
    assert again == first
    turned = again._replace(calls=again.calls[::-1])
    other = pack_groups(turned, loss_mean="rollout", **SHAPE)
    for name, field, again in zip(one.batch._fields, one.batch, other.batch, strict=True):
        np.testing.assert_array_equal(field, again, name)
    assert (one.report, one.rollouts) == (other.report, other.rollouts)
    assert [item.call.call_id for item in one.calls] == [item.call.call_id for item in other.calls]


@given(st.data())
def test_cutting_changes_no_target(forest, data):
    credited = credit(*data.draw(forest))
    whole = pack_groups(credited, loss_mean="rollout", **SHAPE)
    longest = max((len(i.call.prompt_ids) + len(i.call.output_ids) - 1 for i in credited.calls), default=1)
    slots, targets = data.draw(st.integers(longest, longest + 8)), data.draw(st.integers(1, 20))
    cut = pack_groups(credited, loss_mean="rollout", row_slots=slots, row_targets=targets, max_rows=100)
    assert entries(cut) == entries(whole)
    assert cut.report.tree_slots == whole.report.tree_slots == whole.report.slots_used
    assert cut.report.rows_used == cut.report.rows_wanted <= 100
    used = (cut.batch.subtree_end != np.arange(1, slots + 1)) | (cut.batch.position > 0) | (cut.batch.token > 0)
    assert used.sum() <= cut.report.slots_used


@given(st.data())
def test_padding_sees_itself_and_is_seen_by_nobody(forest, data):
    credited = credit(*data.draw(forest))
    slots, targets = data.draw(st.integers(LONGEST, LONGEST + 40)), data.draw(st.integers(1, 40))
    step = pack_groups(credited, loss_mean="rollout", row_slots=slots, row_targets=targets, max_rows=100)
    batch, own = step.batch, np.arange(slots)
    for row, report in enumerate([*step.report.rows, None]):  # the last one holds nothing
        used = 0 if report is None else report.slots
        assert np.all(batch.subtree_end[row, :used] <= used)
        assert np.all(batch.subtree_end[row, :used] > own[:used])
        np.testing.assert_array_equal(batch.subtree_end[row, used:], own[used:] + 1)
        assert not batch.token[row, used:].any()
        assert not batch.position[row, used:].any()
        trained = 0 if report is None else report.targets
        assert np.all(batch.source[row, :trained] < used)
        for name in ("weight", "advantage", "role", "source", "target"):
            assert not getattr(batch, name)[row, trained:].any()


@given(st.data())
def test_rows_of_several_shapes_hold_the_same_targets(forest, data):
    credited = credit(*data.draw(forest))
    whole = pack_groups(credited, loss_mean="rollout", **SHAPE)
    trees = group_trees(credited, loss_mean="rollout", row_slots=LONGEST + 9)
    few = data.draw(st.integers(0, 3))
    buckets = [Bucket(12, 8, few + 1), Bucket(24, 8, few + 1), Bucket(LONGEST + 9, 16, 100)]
    batches, report = pack_buckets(trees.items, buckets)
    assert entries_of(batches, whole) == entries(whole)
    assert report.dropped == {}
    for number, (batch, bucket) in enumerate(zip(batches, buckets, strict=True)):
        rows = [row for row in report.rows if row.bucket == number]
        assert len(rows) <= bucket.max_rows
        assert (batch.weight > 0).sum(axis=1).tolist() == [row.targets for row in rows] + [0] * (
            bucket.max_rows - len(rows)
        )


@given(st.data())
def test_the_order_of_the_groups_of_a_step_changes_only_where_they_stand(forest, data):
    credited = credit(*data.draw(forest))
    trees = group_trees(credited, loss_mean="rollout", row_slots=64)
    order = data.draw(st.permutations(range(len(trees.items))))
    whole = pack_groups(credited, loss_mean="rollout", **SHAPE)
    batch, report = pack([trees.items[place] for place in order], **SHAPE)
    assert entries_of([batch], whole) == entries(whole)
    assert (report.slots_used, report.call_slots) == (whole.report.slots_used, whole.report.call_slots)


@given(st.data())
def test_names_of_the_calls_do_not_matter_to_the_rows(forest, data):
    rollouts, calls = data.draw(forest)
    rename = lambda name: f"z{name[::-1]}"
    renamed_calls = [dataclasses.replace(call, call_id=rename(call.call_id)) for call in calls]
    renamed_rollouts = [
        dataclasses.replace(r, process_rewards={rename(name): v for name, v in r.process_rewards.items()})
        for r in rollouts
    ]
    one = pack_groups(credit(rollouts, calls), loss_mean="rollout", **SHAPE)
    other = pack_groups(credit(renamed_rollouts, renamed_calls), loss_mean="rollout", **SHAPE)
    for name, field, again in zip(one.batch._fields, one.batch, other.batch, strict=True):
        np.testing.assert_array_equal(field, again, name)
