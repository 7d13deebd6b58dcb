"""Faults of histories that were reported of other programs: the smallest input of each, up to what is trained."""

import numpy as np
import pytest

from harnessrl_jax.trajectories import Drop, call_advantages, pack_groups, target_context

TASK = "Fix the bug in the parser of the project, " + "and be careful with what stands beside it. " * 5
SUMMARY = "The parser fails on empty input; line 7 is to be guarded."
SESSION = {"x-claude-code-session-id": "s1"}
SUB = SESSION | {"x-claude-code-agent-id": "a1"}


def packed(wire, make_rollout, *, loss_mean="rollout"):
    credited = call_advantages([make_rollout()], [wire.lineage()], process_weight=0.0)
    room = sum(len(call.prompt_ids) + len(call.output_ids) for call in wire.calls)
    return pack_groups(credited, loss_mean=loss_mean, row_slots=room, row_targets=room, max_rows=1)


def trained(step):
    """call_id -> how often each of its tokens is trained, and in which context it stands."""
    out = {}
    for row, place in zip(*np.nonzero(step.batch.weight), strict=True):
        call = step.calls[step.batch.call[row, place]].call
        context = target_context(step.batch, row, place).tolist()
        out.setdefault(call.call_id, []).append((len(context), context, int(step.batch.target[row, place])))
    return {name: sorted(found) for name, found in out.items()}


def as_sampled(call):
    whole = [*call.prompt_ids.tolist(), *call.output_ids.tolist()]
    start = len(call.prompt_ids)
    return [(at, whole[:at], whole[at]) for at in range(start, len(whole))]


@pytest.mark.parametrize("named", [True, False])
def test_a_sub_agent_that_reads_the_parents_words_is_no_compaction_where_a_header_names_it(wire, toy, named):
    """The same words without the header are a history that was summed up."""
    chat = toy.chat("You code.", ("bash", "task"))
    made = [("k1", "task", '{"prompt": "Look."}')]
    wire.ask("m1", chat.body(TASK), "", made, headers=SESSION)
    asked = chat.body(TASK, toy.said("", *made), toy.result("k1", "2 failed"), "Sum up what was done.")
    wire.ask("m2", asked, SUMMARY, headers=SESSION)
    wire.ask("a1", chat.body(f"Go on from here. {SUMMARY}"), "Done.", headers=SUB if named else SESSION)
    place = wire.places()["a1"]
    if named:
        assert (place.link, place.session, place.fork, place.agent.thread) == ("opens", "a1", None, "a1")
        assert place.agent.source == "header"
    else:
        assert (place.link, place.session, place.fork.category) == ("continues", "m1", "compaction")


def test_conversations_that_begin_with_the_same_words_are_not_one(wire, toy, make_rollout):
    """No header tells them apart, and their requests share far more than their first 200 characters."""
    chat = toy.chat("You code.")
    questions = {"a": TASK + "First.", "b": TASK + "Second."}
    assert len(TASK) > 200
    for name, question in questions.items():
        wire.ask(f"{name}1", chat.body(question), f"On it: {name}.")
    for name, question in questions.items():
        wire.ask(f"{name}2", chat.body(question, toy.said(f"On it: {name}."), "Go."), f"Done: {name}.")
    places = wire.places()
    assert {name: place.parent_call_id for name, place in places.items()} == {
        "a1": None,
        "b1": None,
        "a2": "a1",
        "b2": "b1",
    }
    assert {name: place.session for name, place in places.items()} == {"a1": "a1", "b1": "b1", "a2": "a1", "b2": "b1"}
    step = packed(wire, make_rollout)
    assert trained(step) == {call.call_id: as_sampled(call) for call in wire.calls}


def test_a_summary_that_was_thrown_away_is_not_trained_and_takes_nothing_from_the_other(wire, toy, make_rollout):
    """Both attempts share their prompt; only the one that the work goes on from is trained, and all of it."""
    chat = toy.chat("You code.")
    asked = chat.body(TASK, toy.said("I see two failures."), "Sum up what was done.")
    wire.ask("m1", chat.body(TASK), "I see two failures.")
    wire.ask("s1", asked, "The parser fails, I think, and nothing else was found.")
    wire.ask("s2", asked, SUMMARY)
    wire.ask("m2", chat.body(f"Go on from here. {SUMMARY}"), "Done.")
    rejected = wire.calls[1]
    step = packed(wire, make_rollout)
    assert trained(step) == {call.call_id: as_sampled(call) for call in wire.calls if call is not rejected}
    assert step.report.dropped == {"rejected": Drop(calls=1, tokens=len(rejected.output_ids))}
    assert float(step.batch.weight.sum()) == pytest.approx(1.0)


def test_after_an_eviction_each_token_is_trained_in_what_it_was_sampled_from(wire, toy, make_rollout):
    """The third prompt lacks the long result: on the way from the root to its answer it must not stand either."""
    chat, result = toy.chat("You code.", ("bash",)), toy.result("k1", "a long listing " * 4)
    made = [("k1", "bash", "{}")]
    wire.ask("a", chat.body(TASK), "", made)
    wire.ask("b", chat.body(TASK, toy.said("", *made), result), "It is line seven.")
    kept = chat.body(
        TASK, toy.said("", *made), toy.result("k1", "[cleared]"), toy.said("It is line seven."), "Mend it."
    )
    wire.ask("c", kept, "Done.")
    step = packed(wire, make_rollout)
    assert trained(step) == {call.call_id: as_sampled(call) for call in wire.calls}
    assert wire.places()["c"].link == "rewrites"


def test_a_turn_with_two_branches_weighs_as_any_other_and_is_one_copy(wire, toy, make_rollout):
    chat = toy.chat("You code.")
    wire.ask("a", chat.body(TASK), "Which one?")
    for name in ("b", "c"):
        wire.ask(name, chat.body(TASK, toy.said("Which one?"), f"The one called {name}."), f"Done: {name}.")
    step = packed(wire, make_rollout, loss_mean="token")
    assert trained(step) == {call.call_id: as_sampled(call) for call in wire.calls}
    assert float(step.batch.weight.sum()) == sum(len(call.output_ids) for call in wire.calls)
    # What a step costs is counted in slots, of which the shared beginning takes its own once.
    contexts = set()
    for call in wire.calls:
        read = [*call.prompt_ids.tolist(), *call.output_ids.tolist()[:-1]]
        contexts |= {tuple(read[:end]) for end in range(1, len(read) + 1)}
    assert step.report.slots_used == len(contexts) < step.report.call_slots
