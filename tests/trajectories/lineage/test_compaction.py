"""Summaries that stand for a history, those that were thrown away, and what only looks like one."""

import json

import pytest

TASK, WORK = "Fix the bug in the parser.", [("k1", "bash", '{"command": "pytest"}')]
SUMMARY = "The parser fails on empty input; line 7 is to be guarded."
SESSION = {"session_id": "ses"}


def codex(window, kind="turn"):
    metadata = {"session_id": "t", "thread_id": "t", "window_number": window, "request_kind": kind}
    return {"headers": {"thread-id": "t", "session-id": "t", "x-codex-turn-metadata": json.dumps(metadata)}}


def start(wire, toy, **fields):
    """A task with one tool call and its result."""
    chat = toy.chat("You code.", ("bash",))
    wire.ask("m1", chat.body(TASK), "", WORK, **fields)
    history = [TASK, toy.said("", *WORK), toy.result("k1", "2 failed")]
    wire.ask("m2", chat.body(*history), "I see two failures.", **fields)
    return chat, [*history, toy.said("I see two failures.")]


def test_a_harness_that_counts_its_windows(wire, toy):
    chat = toy.chat("You code.", ("bash",))
    wire.ask("m1", chat.body("env", TASK), "", WORK, **codex(0))
    asked = chat._replace(tools=()).body("env", TASK, toy.said("", *WORK), toy.result("k1", "2 failed"), "Sum it up.")
    wire.ask("s1", asked, SUMMARY, **codex(0, "compaction"))
    wire.ask("m2", chat.body("env", TASK, f"So far: {SUMMARY}"), "", WORK, **codex(1))
    wire.ask("m3", chat.body("env", TASK, f"So far: {SUMMARY}"), "", WORK, **codex(1))
    places = wire.places()
    assert {name: (place.link, place.fork and place.fork.category) for name, place in places.items()} == {
        "m1": ("opens", None),
        "s1": ("rewrites", "tools"),
        "m2": ("continues", "compaction"),
        "m3": ("continues", "compaction"),
    }
    assert {place.session for place in places.values()} == {"m1"}
    assert {place.state for place in places.values()} == {"live"}
    assert (places["m2"].evidence[0].kind, places["m2"].fork.from_call_id) == ("harness_header", "m1")
    assert places["m3"].sibling_of == "m2"
    assert wire.lineage().counts()["fork/compaction"] == 1


def test_windows_that_begin_with_the_same_words_follow_one_another(wire, toy):
    chat = toy.chat("You code.", ("bash",))
    wire.ask("m1", chat.body("env", TASK), "", WORK, **codex(0))
    for window in (1, 2):
        wire.ask(f"m{window + 1}", chat.body("env", TASK, f"So far: {SUMMARY}"), "", WORK, **codex(window))
    places = wire.places()
    assert [places[name].fork.from_call_id for name in ("m2", "m3")] == ["m1", "m2"]
    assert places["m3"].sibling_of == "m2"
    assert wire.lineage().counts()["fork/compaction"] == 2


def test_a_summary_in_the_same_conversation(wire, toy):
    chat, history = start(wire, toy)
    wire.ask("s", chat.body(*history, "Sum up what was done."), SUMMARY)
    wire.ask("m3", chat.body(f"Go on from here. {SUMMARY}"), "Done.")
    places = wire.places()
    assert (places["s"].link, places["s"].state) == ("extends", "live")
    place = places["m3"]
    assert (place.link, place.session, place.state) == ("continues", "m1", "live")
    assert (place.evidence[0].kind, place.evidence[0].call_id) == ("quoted_answer", "s")
    assert place.words == "quotes the summary s in place of the history of s"


def test_a_summary_beside_messages_that_the_harness_adds(wire, toy):
    """As Claude Code does it when a session is resumed after `/compact`."""
    chat, history = start(wire, toy)
    wire.ask("s", chat.body(*history, "Sum up what was done."), SUMMARY)
    added = ["Caveat: the messages below are of local commands.", "/compact", "Compacted.", toy.said("No response.")]
    wire.ask("m3", chat.body(f"Go on from here. {SUMMARY}", *added, *added, "Fix it."), "Done.")
    place = wire.places(toy.decode)["m3"]
    assert (place.link, place.fork.category, place.evidence[0].call_id) == ("continues", "compaction", "s")


@pytest.mark.parametrize("kept", [0, 1])
def test_a_longer_prompt_that_repeats_an_answer_as_a_turn_is_no_compaction(wire, toy, kept):
    chat, history = start(wire, toy)
    wire.ask("s", chat.body(*history, "Sum up what was done."), SUMMARY)
    repeated = f"You said: {SUMMARY}" if kept else toy.said(SUMMARY)
    more = [*history[: 2 * kept], "Sum up, please.", repeated, *["And then?"] * 5]
    wire.ask("m3", chat.body(*more), "Done.")
    assert wire.places(toy.decode)["m3"].link == "rewrites"


def test_a_summary_by_a_helper_with_other_instructions(wire, toy):
    """As OpenCode does it: one message with the whole conversation, no tools, in the same session."""
    chat, _ = start(wire, toy, **SESSION)
    wire.ask("s", toy.chat("You sum up conversations.").body(f"{TASK} ... 2 failed ..."), SUMMARY, **SESSION)
    wire.ask("m3", chat.body("What did we do so far?", toy.said(SUMMARY), "Continue."), "Done.", **SESSION)
    place = wire.places()["m3"]
    assert (place.link, place.session, place.fork.from_call_id) == ("continues", "m1", "m2")
    assert wire.places()["s"].state == "live"  # the work goes on from it


def test_a_helper_without_a_named_session_is_known_by_what_it_quotes(wire, toy):
    chat, _ = start(wire, toy)
    wire.ask("s", toy.chat("You sum up.").body(f"{TASK} I see two failures. What now?"), SUMMARY)
    wire.ask("m3", chat.body(f"Go on: {SUMMARY}"), "Done.")
    assert wire.places()["m3"].link == "continues"


def test_of_two_summaries_the_one_that_was_used_stays(wire, toy):
    chat, history = start(wire, toy)
    again = chat.body(*history, "Sum up what was done.")
    wire.ask("s1", again, "Nothing much happened so far, I think.")
    wire.ask("s2", again, SUMMARY)
    wire.ask("m3", chat.body(f"Go on from here. {SUMMARY}"), "Done.")
    places = wire.places()
    assert {name: places[name].state for name in ("s1", "s2", "m3")} == {"s1": "rejected", "s2": "live", "m3": "live"}
    assert places["s1"].evidence[-1].kind == "other_summary_used"
    assert places["s1"].evidence[-1].call_id == "s2"


def test_a_summary_that_nobody_went_on_from_is_the_last_answer(wire, toy):
    chat, history = start(wire, toy)
    wire.ask("s1", chat.body(*history, "Sum up what was done."), "Nothing much happened so far, I think.")
    wire.ask("s2", chat.body(*history, "Sum up what was done."), SUMMARY)
    assert {place.state for place in wire.places().values()} == {"live"}


def test_votes_of_which_one_is_used_are_no_summaries(wire, toy):
    chat = toy.chat("Answer.")
    for seq in range(3):
        wire.ask(f"v{seq}", chat.body("Capital of France?"), f"I believe it is number {seq}, to be sure.")
    wire.ask("w", toy.chat("Choose.").body("I believe it is number 1, to be sure. Is it?"), "Yes.")
    assert {place.state for place in wire.places().values()} == {"live"}
    assert [place.link for place in wire.places().values()] == ["opens"] * 4


@pytest.mark.parametrize("same_agent", [True, False])
def test_passing_an_answer_on_is_no_compaction(wire, toy, same_agent):
    """Writers and critics quote each other; each asks a question of its own."""
    chat = toy.chat("Write.")
    other = chat if same_agent else toy.chat("Criticise.")
    wire.ask("a", chat.body("A poem about rain."), "Rain falls on the tin roof all night.")
    wire.ask("b", other.body("Better: Rain falls on the tin roof all night."), "Rain drums on tin until the morning.")
    wire.ask("c", chat.body("Better: Rain drums on tin until the morning."), "It rained.")
    assert [place.link for place in wire.places().values()] == ["opens"] * 3


def test_an_edited_history_that_holds_an_answer_is_no_compaction(wire, toy):
    chat, history = start(wire, toy)
    edited = [*history[:2], toy.result("k1", "[cleared]"), history[3]]
    wire.ask("m3", chat.body(*edited, "Fix them."), "Done.")
    place = wire.places()["m3"]
    assert (place.link, place.parent_call_id, place.fork.from_call_id) == ("rewrites", "m1", "m2")


def test_a_window_that_slides_over_the_history_is_no_compaction(wire, toy):
    chat, history = start(wire, toy)
    wire.ask("m3", chat.body(*history, "What is next?"), "The lexer is to be looked at.")
    wire.ask("m4", chat.body("What is next?", toy.said("The lexer is to be looked at."), "Go."), "Done.")
    place = wire.places()["m4"]
    assert (place.link, place.session, place.fork.from_call_id, place.fork.category) == (
        "rewrites", "m1", "m3", "dropped",
    )  # fmt: skip


def test_a_new_window_is_not_read_into_other_threads(wire, toy):
    chat = toy.chat("You code.", ("bash",))
    wire.ask("m1", chat.body("env", TASK), "One.", **codex(0))
    wire.ask("a1", toy.chat("Other.").body("Else?"), "Two.", headers=codex(1)["headers"] | {"thread-id": "t2"})
    assert wire.places()["a1"].link == "opens"
