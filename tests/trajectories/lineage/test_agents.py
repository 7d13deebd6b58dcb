"""Who asked: by header, by instructions and tools, by tokens alone; and which call opened a conversation."""

import json

import pytest

CLAUDE = {"x-claude-code-session-id": "s1"}
SUB = "Find the capital of France."


def agents(wire):
    return {name: (str(place.agent), place.agent.source) for name, place in wire.places().items()}


def claude(agent, parent=None):
    return CLAUDE | {"x-claude-code-agent-id": agent} | ({"x-claude-code-parent-agent-id": parent} if parent else {})


def codex(thread, parent=None):
    return {"session-id": "s1", "thread-id": thread} | ({"x-codex-parent-thread-id": parent} if parent else {})


def opencode(session, parent=None):
    return {"x-session-id": session, "x-session-affinity": session} | (
        {"x-parent-session-id": parent} if parent else {}
    )


@pytest.mark.parametrize(
    ("main", "one", "two", "nested"),
    [
        (CLAUDE, claude("a1"), claude("a2"), claude("a3", "a1")),
        (codex("s1"), codex("a1", "s1"), codex("a2", "s1"), codex("a3", "a1")),
        (opencode("s1"), opencode("a1", "s1"), opencode("a2", "s1"), opencode("a3", "a1")),
    ],
)
def test_concurrent_and_nested_sub_agents_by_header(wire, toy, main, one, two, nested):
    boss, worker = toy.chat("Lead.", ("task",)), toy.chat("Work.", ("bash", "task"))
    made = [("k1", "task", f'{{"prompt": "{SUB}"}}'), ("k2", "task", f'{{"prompt": "{SUB}"}}')]
    deeper = [("k3", "task", '{"prompt": "Look it up in the atlas."}')]
    wire.ask("m1", boss.body("Capital of France?"), "", made, headers=main)
    wire.ask("a1", worker.body(SUB), "", deeper, headers=one)
    wire.ask("b1", worker.body(SUB), "Bordeaux.", headers=two)
    wire.ask("c1", worker.body("Look it up in the atlas."), "Page 7.", headers=nested)
    wire.ask("a2", worker.body(SUB, toy.said("", *deeper), toy.result("k3", "Page 7.")), "Paris.", headers=one)
    results = [toy.result("k1", "Paris."), toy.result("k2", "Bordeaux.")]
    wire.ask("m2", boss.body("Capital of France?", toy.said("", *made), *results), "Paris.", headers=main)
    places = wire.places()
    assert {name: place.agent.thread for name, place in places.items()} == {
        "m1": "", "a1": "a1", "b1": "a2", "c1": "a3", "a2": "a1", "m2": "",
    }  # fmt: skip
    assert {place.agent.source for place in places.values()} == {"header"}
    assert {name: place.parent_call_id for name, place in places.items() if place.parent_call_id} == {
        "a2": "a1",
        "m2": "m1",
    }
    assert {name: place.opened_by for name, place in places.items() if place.opened_by} == {
        "a1": "m1",
        "b1": "m1",
        "c1": "a1",
    }
    assert {place.state for place in places.values()} == {"live"}
    # The two sub-agents were asked the same and are not one asking twice.
    assert all(place.sibling_of is None for place in places.values())
    assert wire.lineage().counts()["sessions"] == 4


def test_a_header_names_the_waiting_parent_where_nothing_is_quoted(wire, toy):
    chat = toy.chat("Lead.", ("task",))
    wire.ask("m1", chat.body("Go."), "", [("k1", "task", "{}")], headers=CLAUDE)
    wire.ask("a1", toy.chat("Work.").body("Something else."), "Yes.", headers=claude("a1"))
    place = wire.places()["a1"]
    assert (place.opened_by, place.evidence[0].kind) == ("m1", "harness_header")


def test_of_two_calls_that_ask_for_the_same_the_later_is_the_opener(wire, toy):
    made = [("k1", "task", f'{{"prompt": "{SUB}"}}')]
    wire.ask("m1", toy.chat("Lead.", ("task",)).body("First question?"), "", made)
    wire.ask("m2", toy.chat("Lead.", ("task",)).body("Second question?"), "", made)
    wire.ask("a1", toy.chat("Work.").body(SUB), "Paris.")
    assert wire.places()["a1"].opened_by == "m2"


def test_a_call_that_has_its_results_opens_nothing_more(wire, toy):
    chat, made = toy.chat("Lead.", ("task",)), [("k1", "task", f'{{"prompt": "{SUB}"}}')]
    wire.ask("m1", chat.body("Capital?"), "", made)
    wire.ask("m2", chat.body("Capital?", toy.said("", *made), toy.result("k1", "Paris.")), "Paris.")
    wire.ask("a1", toy.chat("Work.").body(SUB), "Paris.")
    assert wire.places()["a1"].opened_by is None


def test_a_sub_agent_that_was_only_started_is_opened_by_the_call_that_started_it(wire, toy):
    """Codex gives the name of the sub-agent at once, and another call waits for it."""
    boss, worker, main = toy.chat("Lead.", ("spawn", "wait")), toy.chat("Work.", ("bash",)), codex("s1")
    spawn, wait = ("k1", "spawn", f'{{"message": "{SUB}"}}'), ("k2", "wait", '{"targets": ["the second one"]}')
    wire.ask("m1", boss.body("Capital of France?"), "", [spawn], headers=main)
    so_far = ("Capital of France?", toy.said("", spawn), toy.result("k1", "a1"))
    wire.ask("m2", boss.body(*so_far), "", [wait], headers=main)
    wire.ask("a1", worker.body(SUB), "Paris.", headers=codex("a1", "s1"))
    wire.ask("b1", worker.body("Something else."), "Yes.", headers=codex("a2", "s1"))
    places = wire.places()
    assert [places[name].opened_by for name in ("a1", "b1")] == ["m1", "m2"]


def test_a_whole_message_of_the_parent_counts_for_more_than_a_part_that_a_waiting_call_has(wire, toy):
    """The parent goes on after it started a sub-agent, and what it does then may stand inside the task too."""
    boss, worker, main = toy.chat("Lead.", ("spawn", "read")), toy.chat("Work.", ("bash",)), codex("s1")
    task = "Read src/main.py and say what it does."
    spawn, read = ("k1", "spawn", json.dumps({"message": task})), ("k2", "read", '{"path": "src/main.py"}')
    wire.ask("m1", boss.body("What is this?"), "", [spawn], headers=main)
    wire.ask("m2", boss.body("What is this?", toy.said("", spawn), toy.result("k1", "a1")), "", [read], headers=main)
    wire.ask("a1", worker.body(task), "A game.", headers=codex("a1", "s1"))
    assert wire.places()["a1"].opened_by == "m1"


def test_the_same_answer_of_two_sub_agents_is_not_confused(wire, toy):
    worker = toy.chat("Work.", ("bash",))
    wire.ask("a1", worker.body(SUB), "On it.", headers=claude("a1"))
    wire.ask("b1", worker.body(SUB), "On it.", headers=claude("a2"))
    wire.ask("a2", worker.body(SUB, toy.said("On it."), "Go on."), "Paris.", headers=claude("a1"))
    assert wire.places()["a2"].parent_call_id == "a1"


def test_sub_agents_without_a_header_are_told_apart_by_instructions_and_tools(wire, toy):
    boss, worker = toy.chat("Lead.", ("task",)), toy.chat("Work.", ("bash",))
    made = [("k1", "task", f'{{"prompt": "{SUB}"}}')]
    wire.ask("m1", boss.body("Capital of France?"), "", made)
    wire.ask("a1", worker.body(SUB), "Paris.")
    wire.ask("b1", worker.body("Find its river for me."), "Seine.")
    wire.ask("m2", boss.body("Capital of France?", toy.said("", *made), toy.result("k1", "Paris.")), "Paris.")
    fingerprint = "fingerprint"
    assert agents(wire) == {
        "m1": ("central", fingerprint),
        "a1": ("central/#2", fingerprint),
        "b1": ("central/#2", fingerprint),
        "m2": ("central", fingerprint),
    }
    places = wire.places()
    assert [places[name].opened_by for name in ("a1", "b1")] == ["m1", None]
    assert [places[name].session for name in ("a1", "b1", "m2")] == ["a1", "b1", "m1"]


def test_a_line_that_a_harness_varies_makes_no_other_agent(wire, toy):
    for seq, mark in enumerate(("1", "2")):
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: cch={mark};"},
            {"type": "text", "text": "Lead."},
        ]
        wire.ask(f"{seq}", {"system": system, "messages": [toy.user(f"Question {mark}?")]}, "Yes.")
    assert set(agents(wire).values()) == {("central", "name")}


def test_requests_that_nobody_can_read_leave_one_agent(make_call, wire):
    wire.calls = [make_call("a", [1], [2], session_id="x"), make_call("b", [5], [6], seq=1, session_id="y")]
    assert agents(wire) == {"a": ("central", "prefix"), "b": ("central", "prefix")}


def test_agents_that_were_given_names_are_told_apart_by_them(make_call, wire):
    wire.calls = [make_call("a", [1], [2]), make_call("b", [5], [6], seq=1, agent="critic")]
    assert agents(wire) == {"a": ("central", "name"), "b": ("critic", "name")}


def test_a_handoff_between_named_agents_is_one(wire, toy):
    made = ("k1", "transfer", "{}")
    wire.ask("a", toy.chat("Hand off.", ("transfer",)).body("Capital?"), "", [made])
    body = toy.chat("You know geography.", ("search",)).body("Capital?", toy.said("", made), toy.result("k1", "ok"))
    wire.ask("b", body, "Paris.", agent="expert")
    place = wire.places()["b"]
    assert (place.link, place.fork.from_call_id, place.session, str(place.agent)) == ("handoff", "a", "b", "expert")


def test_another_agent_that_reads_the_same_messages_has_a_conversation_of_its_own(wire, toy):
    chat, made = toy.chat("Answer.", ("search",)), ("k1", "search", "{}")
    wire.ask("a", chat.body("Capital?"), "", [made])
    wire.ask("b", chat.body("Capital?", toy.said("", made), toy.result("k1", "ok")), "Paris.", agent="expert")
    place = wire.places()["b"]
    assert (place.link, place.fork, place.session) == ("opens", None, "b")


def test_an_agent_that_a_header_names_hands_nothing_over_to_itself(wire, toy):
    made = ("k1", "plan", "{}")
    wire.ask("a", toy.chat("Make a plan.", ("plan",)).body("Capital?"), "", [made], headers=CLAUDE)
    body = toy.chat("Now carry it out.", ("bash",)).body("Capital?", toy.said("", made), toy.result("k1", "ok"))
    wire.ask("b", body, "Paris.", headers=CLAUDE)
    place = wire.places()["b"]
    assert (place.link, place.fork.category, place.session) == ("rewrites", "instructions", "a")


def test_branches_that_run_side_by_side_are_no_changed_history(wire, toy):
    chat, made = toy.chat("Answer.", ("search",)), ("k1", "search", "{}")
    wire.ask("a", chat.body("Capital?"), "", [made])
    for seq in (1, 2, 3):
        body = chat.body("Capital?", toy.said("", made), toy.result("k1", f"result {seq}"))
        wire.ask(f"b{seq}", body, f"It is answer {seq}, I think.")
    assert [(place.link, place.parent_call_id) for place in wire.places().values()][1:] == [("extends", "a")] * 3


def test_a_sub_agent_that_inherits_the_history_is_no_handoff(wire, toy):
    made = ("k1", "task", '{"prompt": "Look at the river."}')
    wire.ask("a", toy.chat("Lead.", ("task",)).body("Capital?"), "", [made], headers=CLAUDE)
    body = toy.chat("Work.", ("search",)).body("Capital?", toy.said("", made), "Look at the river.")
    wire.ask("b", body, "Seine.", headers=claude("a1"))
    place = wire.places()["b"]
    assert (place.link, place.fork, place.opened_by) == ("opens", None, "a")


def test_two_main_sessions_under_one_name_stay_apart(wire, toy):
    chat = toy.chat("Lead.")
    wire.ask("a", chat.body("One?"), "Yes.", headers={"x-claude-code-session-id": "s1"})
    wire.ask("b", chat.body("One?", toy.said("Yes."), "Two?"), "No.", headers={"x-claude-code-session-id": "s2"})
    places = wire.places()
    assert [place.agent.thread for place in places.values()] == ["", "s2"]
    assert places["b"].parent_call_id is None
