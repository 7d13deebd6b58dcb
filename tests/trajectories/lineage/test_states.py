"""Which calls count: helpers of the harness are left out only for what can be seen."""

import pytest

TASK = "Fix the bug in the parser."
TITLE = "Generate a title for this conversation:"


def states(wire):
    return {name: place.state for name, place in wire.places().items()}


def work(wire, toy, first="m1", **fields):
    chat = toy.chat("You code.", ("bash",))
    made = [("k1", "bash", '{"command": "pytest"}')]
    wire.ask(first, chat.body(TASK), "", made, **fields)
    wire.ask("m2", chat.body(TASK, toy.said("", *made), toy.result("k1", "2 failed")), "Done.", **fields)


def title(wire, toy, answer="Fixing the parser", **fields):
    return wire.ask("t", toy.chat("You name things.").body(TITLE, TASK), answer, **fields)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": TITLE}, {"role": "user", "content": TASK}]},
        {
            "system": "Generate a concise title (3-7 words) that captures the topic of this coding session.",
            "messages": [{"role": "user", "content": TASK}],
        },
        {"instructions": "You are a title generator.", "input": TASK},
        {
            "messages": [{"role": "user", "content": TASK}],
            "output_config": {"format": {"type": "json_schema", "schema": {"properties": {"title": {}}}}},
        },
        {
            "messages": [
                {"role": "user", "content": TASK},
                {"role": "user", "content": "Suggest 3 relevant follow-up questions for this chat."},
            ],
        },
    ],
)
def test_a_label_of_the_conversation_is_auxiliary_in_every_dialect(wire, toy, body):
    wire.ask("t", body, "Fixing the parser")
    work(wire, toy)
    assert states(wire) == {"t": "auxiliary", "m1": "live", "m2": "live"}
    place = wire.places()["t"]
    assert (place.evidence[0].about, place.evidence[0].kind) == ("state", "title_request")
    assert str(wire.places()["m1"].agent) == "central"  # the title came first and is not the main agent


def test_a_title_that_something_reads_is_part_of_the_task(wire, toy):
    title(wire, toy, "Fixing the parser of the project")
    wire.ask("m", toy.chat("You code.").body("Branch: Fixing the parser of the project. Go."), "Done.")
    assert set(states(wire).values()) == {"live"}


def test_a_title_that_is_discussed_further_is_part_of_the_task(wire, toy):
    title(wire, toy)
    wire.ask("t2", toy.chat("You name things.").body(TITLE, TASK, toy.said("Fixing the parser"), "Shorter."), "Parser")
    work(wire, toy)
    assert set(states(wire).values()) == {"live"}


def test_a_request_with_tools_is_part_of_the_task(wire, toy):
    wire.ask("t", toy.chat("You name things.", ("bash",)).body(TITLE, TASK), "Fixing the parser")
    work(wire, toy)
    assert set(states(wire).values()) == {"live"}


def test_if_titles_are_the_task_they_are_live(wire, toy):
    title(wire, toy)
    assert states(wire) == {"t": "live"}


def test_a_title_asked_again_after_a_failure_is_superseded_first(wire, toy):
    title(wire, toy, finish="error", delivered=False)
    body = wire.calls[0].request
    wire.ask("t2", toy.chat("You name things.").body(TITLE, TASK), "Parser", request_digest=body)
    work(wire, toy)
    assert states(wire) == {"t": "superseded", "t2": "auxiliary", "m1": "live", "m2": "live"}


@pytest.mark.parametrize(
    ("body", "state"),
    [
        ({"max_tokens": 1, "messages": [{"role": "user", "content": "quota"}]}, "auxiliary"),
        ({"max_output_tokens": 1, "input": "quota"}, "auxiliary"),
        ({"max_completion_tokens": 2, "messages": [{"role": "user", "content": "quota"}]}, "live"),
        # a classifier: it was told what to decide
        ({"max_tokens": 1, "system": "Answer 1 or 0.", "messages": [{"role": "user", "content": "Good?"}]}, "live"),
        ({"max_tokens": 1, "messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}, "live"),
    ],
)
def test_a_probe_asks_for_one_token_about_nothing(wire, toy, body, state):
    wire.ask("p", body, "a")
    work(wire, toy)
    assert states(wire) == {"p": state, "m1": "live", "m2": "live"}


def test_background_work_is_auxiliary_by_its_header(wire, toy):
    mine = {"x-claude-code-session-id": "s1", "x-app": "cli"}
    work(wire, toy, headers=mine)
    chat, back = toy.chat("Remember what matters."), mine | {"x-app": "cli-bg"}
    wire.ask("b1", chat.body("What was it?"), "The parser failed twice.", headers=back)
    wire.ask("b2", chat.body("What was it?", toy.said("The parser failed twice."), "More."), "No.", headers=back)
    assert states(wire) == {"m1": "live", "m2": "live", "b1": "auxiliary", "b2": "auxiliary"}
    assert wire.places()["b2"].words.endswith("a header marks it as background work of the harness")


def test_background_work_that_the_task_reads_is_live(wire, toy):
    mine = {"x-claude-code-session-id": "s1"}
    wire.ask("b", toy.chat("Sum up.").body("File."), "The file guards line seven.", headers=mine | {"x-app": "cli-bg"})
    wire.ask("m", toy.chat("You code.").body("Note: The file guards line seven. Go."), "Done.", headers=mine)
    assert states(wire) == {"b": "live", "m": "live"}


@pytest.mark.parametrize("answer", ["yes", "route: billing", "3"])
def test_a_short_answer_that_only_the_program_reads_is_live(wire, toy, answer):
    wire.ask("r", toy.chat("Decide which department is asked.").body(TASK), answer)
    work(wire, toy)
    assert states(wire) == {"r": "live", "m1": "live", "m2": "live"}


def test_n_choices_are_all_live_siblings(wire, toy):
    body = toy.chat("Answer.").body("Capital?")
    for choice in range(3):
        wire.ask(f"c{choice}", body, f"Paris {choice}", seq=0, choice=choice)
    assert set(states(wire).values()) == {"live"}
    assert [place.sibling_of for place in wire.places().values()] == [None, "c0", "c0"]
    assert wire.places()["c2"].evidence[-1].kind == "same_request"


def test_a_loop_that_builds_the_same_prompt_again_asks_siblings(wire, toy):
    for seq in range(3):
        wire.ask(f"v{seq}", toy.chat("Answer.").body("Capital?"), f"Paris {seq}")
    assert set(states(wire).values()) == {"live"}
    assert wire.places()["v2"].sibling_of == "v0"
    assert wire.lineage().counts()["siblings"] == 2


def test_both_answers_of_a_declared_retry_stay_if_both_were_used(wire, toy):
    chat = toy.chat("Answer.")
    wire.ask("a", chat.body("Capital?"), "Paris.")
    wire.ask("b", chat.body("Capital?"), "Lyon.", retry=True)
    for name, answer in (("c", "Paris."), ("d", "Lyon.")):
        wire.ask(name, chat.body("Capital?", toy.said(answer), "Sure?"), "Yes.")
    assert set(states(wire).values()) == {"live"}


def test_one_failure_explains_one_retry(wire, toy):
    body = toy.chat("Answer.").body("Capital?")
    wire.ask("a", body, "Paris.", delivered=False)
    wire.ask("b", body, "Paris.")
    wire.ask("c", body, "Paris.")
    assert states(wire) == {"a": "superseded", "b": "live", "c": "live"}
    assert wire.places()["a"].evidence[-1].call_id == "b"
    assert wire.places()["c"].sibling_of == "b"


def test_a_broken_answer_loses_to_its_retry_even_if_it_was_used(wire, toy):
    chat = toy.chat("Answer.")
    wire.ask("a", chat.body("Capital?"), "Par", finish="aborted")
    wire.ask("b", chat.body("Capital?"), "Paris.")
    wire.ask("c", chat.body("Capital?", toy.said("Par"), "Sure?"), "Yes.")
    assert states(wire) == {"a": "superseded", "b": "live", "c": "live"}


def test_a_retry_of_one_sub_agent_replaces_nothing_of_another(wire, toy):
    worker = toy.chat("Work.").body("Look it up.")
    head = {"x-claude-code-session-id": "s1"}
    wire.ask("a", worker, "Paris.", delivered=False, headers=head | {"x-claude-code-agent-id": "a1"})
    wire.ask("b", worker, "Lyon.", headers=head | {"x-claude-code-agent-id": "a2"})
    assert states(wire) == {"a": "undelivered", "b": "live"}
