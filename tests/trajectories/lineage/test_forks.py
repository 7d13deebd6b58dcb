"""Histories that a harness changes: each category by the smallest change that is one."""

import pytest

from harnessrl_jax.trajectories.forks import find_fork

SEARCH = ("k1", "search", '{"a": false,"b":1.0}')


def rewritten(wire, toy, echo, *, answer="It is Paris.", made=(), think="", before=(), after=None, decode=True):
    """The place of a second call that echoes the first one's answer as `echo`."""
    chat = toy.chat("Answer.", ("search",))
    history = [*before, "Capital of France?"]
    wire.ask("a", chat.body(*history), answer, made, think=think)
    wire.ask("b", chat.body(*(after or history), echo, "Sure?"), "Yes.")
    return wire.places(toy.decode if decode else None)["b"]


def category(place):
    assert (place.link, place.parent_call_id, place.state) == ("rewrites", None, "live")
    assert (place.session, place.fork.from_call_id) == ("a", "a")
    return place.fork.category


def test_an_echo_as_it_was_sampled_is_no_fork(wire, toy):
    place = rewritten(wire, toy, toy.said("It is Paris."))
    assert (place.link, place.parent_call_id, place.fork) == ("extends", "a", None)


@pytest.mark.parametrize("decode", [True, False])
def test_arguments_written_another_way(wire, toy, decode):
    echo = toy.said("", ("k1", "search", '{"b": 1, "a": false}'))
    assert category(rewritten(wire, toy, echo, answer="", made=[SEARCH], decode=decode)) == "arguments"


@pytest.mark.parametrize("arguments", ['{"b": 1, "a": 0}', '{"b": 2, "a": false}', '{"b": '])
def test_other_arguments_are_an_edit(wire, toy, arguments):
    echo = toy.said("", ("k1", "search", arguments))
    assert category(rewritten(wire, toy, echo, answer="", made=[SEARCH])) == "edited"


def test_reasoning_that_is_left_out(wire, toy):
    think = "<think>France. Its capital is Paris.</think>\n"
    place = rewritten(wire, toy, toy.said("It is Paris."), think=think)
    assert category(place) == "reasoning"
    first = wire.calls[0]
    assert place.fork.position == len(first.prompt_ids)
    assert place.fork.before == tuple(first.output_ids[:16].tolist())
    assert place.fork.before_text == "<think>France. I"
    assert place.fork.after_text == "It is Paris.<|end|><|start|>us"
    assert (
        place.words
        == f"history differs from a at token {len(first.prompt_ids)} of {len(place.call.prompt_ids)} (reasoning)"
    )


def test_reasoning_that_came_back_but_is_not_rendered_is_the_template(wire, toy):
    think = "<think>France.</think>\n"
    echo = toy.said("It is Paris.", reasoning_content="France.")
    assert category(rewritten(wire, toy, echo, think=think)) == "template"


def test_white_space(wire, toy):
    place = rewritten(wire, toy, toy.said("It is\n Paris."))
    assert category(place) == "whitespace"


def test_white_space_in_what_was_given(wire, toy):
    place = rewritten(
        wire,
        toy,
        toy.said("It is Paris."),
        before=["Be  kind."],
        after=["Be kind.", "Capital of France?"],
        decode=False,
    )
    assert category(place) == "whitespace"


def test_another_answer(wire, toy):
    assert category(rewritten(wire, toy, toy.said("It is Lyon."))) == "edited"


def test_without_text_nobody_knows_what_became_of_an_answer(wire, toy):
    assert category(rewritten(wire, toy, toy.said("It is Lyon."), decode=False)) == "unknown"


def test_a_message_that_is_taken_out(wire, toy):
    made = [SEARCH]
    chat = toy.chat("Answer.", ("search",))
    wire.ask("a", chat.body("One?"), "", made)
    echo = toy.said("", *made)
    wire.ask("b", chat.body("One?", echo, toy.result("k1", "long"), "Two?"), "Two, I think.")
    wire.ask("c", chat.body("One?", echo, "Two?", toy.said("Two, I think."), "Three?"), "Three.")
    place = wire.places()["c"]
    assert (place.link, place.fork.from_call_id, place.fork.category) == ("rewrites", "b", "dropped")


def test_a_result_that_is_cleared(wire, toy):
    made = [SEARCH]
    chat = toy.chat("Answer.", ("search",))
    wire.ask("a", chat.body("One?"), "", made)
    wire.ask("b", chat.body("One?", toy.said("", *made), toy.result("k1", "long text")), "Two, I think.")
    wire.ask(
        "c",
        chat.body("One?", toy.said("", *made), toy.result("k1", "[cleared]"), toy.said("Two, I think."), "More"),
        "X",
    )
    assert wire.places(toy.decode)["c"].fork.category == "edited"


@pytest.mark.parametrize(
    ("instructions", "tools", "link", "want"),
    [
        ("You answer questions. Today is Monday.", ("search",), "rewrites", "instructions"),
        ("You answer questions. Today is Sunday.", ("search", "read"), "rewrites", "tools"),
        ("You know geography and nothing else.", ("search",), "handoff", "handoff"),
        ("You know geography and nothing else.", ("look_up",), "handoff", "handoff"),
        ("You answer questions. Today is Sunday; go on.", ("look_up",), "handoff", "handoff"),
    ],
)
def test_another_head_over_the_same_messages(wire, toy, instructions, tools, link, want):
    wire.ask("a", toy.chat("You answer questions. Today is Sunday.", ("search",)).body("Capital?"), "", [SEARCH])
    after = toy.chat(instructions, tools)
    wire.ask("b", after.body("Capital?", toy.said("", SEARCH), toy.result("k1", "geo")), "Paris.")
    place = wire.places()["b"]
    assert (place.link, place.fork.category, place.fork.from_call_id) == (link, want, "a")
    assert place.session == ("b" if link == "handoff" else "a")
    assert (place.agent.thread, place.agent.source) == (("#2", "fingerprint") if link == "handoff" else ("", "name"))


def test_the_same_text_as_other_ids(make_call):
    words = {1: "Pan", 2: "tom", 3: "P", 4: "antom", 5: "?"}
    before, after = make_call("a", [5], [1, 2]), make_call("b", [5, 3, 4, 5], [1], seq=1)
    spell = lambda ids: "".join(words[i] for i in ids)
    fork = find_fork(before, after, (None, None), spell)
    assert (fork.category, fork.position, fork.before, fork.after) == ("retokenised", 1, (1, 2), (3, 4, 5))
    assert (fork.before_text, fork.after_text) == ("Pantom", "Pantom?")
    assert find_fork(before, after, (None, None), None).category == "unknown"


def test_a_history_that_is_rendered_another_way_is_the_template(wire, toy):
    chat = toy.chat("Answer.", ())
    wire.ask("a", chat.body("One?"), "First.")
    first = wire.calls[0]
    body = chat.body("One?", toy.said("First."), "Two?")
    wire.ask("b", body, "Second.", prompt_ids=[*first.prompt_ids[:5].tolist(), 9, *first.prompt_ids[5:].tolist()])
    for decode in (None, toy.decode):
        assert wire.places(decode)["b"].fork.category == "template"
