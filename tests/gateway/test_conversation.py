"""Echoed turns come back as the ids that were sampled; everything else is the canonical render."""

import dataclasses
import json
import pathlib
import shutil

import hypothesis
import hypothesis.strategies as st
import pytest

import harnessrl_jax
from harnessrl_jax.gateway.conversation import build_prompt
from harnessrl_jax.gateway.exchange import TURN
from harnessrl_jax.gateway.template import ChatTemplate
from harnessrl_jax.gateway.text import TextCodec
from harnessrl_jax.gateway.turns import Turn, Turns, same_json
from harnessrl_jax.trajectories.records import ToolCall

SHIPPED = pathlib.Path(harnessrl_jax.__file__).parent / "assets/quickstart"
SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "Where is Nairobi?"}
MORE = {"role": "user", "content": "And Peru?"}
TOOLS = [{"type": "function", "function": {"name": "search", "description": "Find facts."}}]
CLOSE = 2


@pytest.fixture(params=["tests", "shipped"])
def both(request, codec):
    return codec if request.param == "tests" else TextCodec(SHIPPED)


def spelled(codec, text):
    """Ids of `text` as nobody would encode it: one token for each byte."""
    return tuple(i for byte in text for i in codec.encode_plain(byte))


def turn(codec, prompt, output, content="", calls=(), session="s", call_id="c0"):
    return Turn(
        call_id=call_id,
        session_id=session,
        prompt_ids=tuple(prompt),
        output_ids=tuple(output),
        content=content,
        tool_calls=tuple(calls),
    )


def known(*turns):
    found = Turns()
    for each in turns:
        found.add(each)
    return found


def first_prompt(codec, messages=(SYSTEM, ASK), tools=TOOLS):
    return build_prompt(codec, Turns(), "s", list(messages), tools).ids


def said(content, calls=()):
    message = {"role": "assistant", "content": content}
    return message | {"tool_calls": list(calls)} if calls else message


def echoed(identity, name, arguments):
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_sampled_ids_survive_where_encoding_the_text_would_change_them(both):
    prompt = first_prompt(both)
    output = (*spelled(both, "Nairobi is the capital."), CLOSE)
    assert both.encode_plain("Nairobi is the capital.") != output[:-1]
    turns = known(turn(both, prompt, output, "Nairobi is the capital."))
    messages = [SYSTEM, ASK, said("Nairobi is the capital."), MORE]
    result = build_prompt(both, turns, "s", messages, TOOLS)
    assert result.ids[: len(prompt)] == prompt
    assert tuple(result.ids[len(prompt) : len(prompt) + len(output)]) == output
    # The rest is what the template writes after the end of turn: a newline, the user's turn, the next header.
    suffix = both.decode(result.ids[len(prompt) + len(output) :])
    assert suffix == "\n<|im_start|>user\nAnd Peru?<|im_end|>\n<|im_start|>assistant\n"
    assert (result.spliced, result.rewrites) == (("c0",), ())


def test_a_canonical_sample_gives_the_canonical_prompt(both):
    arguments = {"query": "capital of Kenya", "n": 2}
    messages = [
        SYSTEM,
        ASK,
        said("Look.", [echoed("call_a", "search", arguments), echoed("call_b", "search", {})]),
        {"role": "tool", "tool_call_id": "call_a", "content": "Nairobi."},
        {"role": "tool", "tool_call_id": "call_b", "content": "Nothing."},
        said("Done."),
        MORE,
    ]
    canonical = both.prompt(messages, TOOLS)
    one, two = first_prompt(both), both.prompt(messages[:5], TOOLS)
    spoken = canonical[len(one) : canonical.index(CLOSE, len(one)) + 1]
    calls = [
        ToolCall(id="call_a", name="search", arguments=json.dumps(arguments)),
        ToolCall(id="call_b", name="search", arguments="{}"),
    ]
    done = (*both.encode_plain("Done."), CLOSE)
    turns = known(turn(both, one, spoken, "Look.", calls), turn(both, two, done, "Done.", call_id="c1"))
    result = build_prompt(both, turns, "s", messages, TOOLS)
    assert result.ids == canonical
    assert result.spliced == ("c0", "c1")


@pytest.mark.parametrize("content", ["", None, " \n"])
def test_no_content_has_one_meaning(both, content):
    call = ToolCall(id="call_a", name="search", arguments='{"query": "x"}')
    prompt = first_prompt(both)
    turns = known(turn(both, prompt, (7, CLOSE), "", [call]))
    message = {
        "role": "assistant",
        "content": content or "",
        "tool_calls": [echoed("call_a", "search", {"query": "x"})],
    }
    result = build_prompt(both, turns, "s", [SYSTEM, ASK, message, MORE], TOOLS)
    assert result.spliced == ("c0",)


def test_arguments_that_a_harness_wrote_anew_still_link(both):
    call = ToolCall(id="call_a", name="search", arguments='{"a": false,"b":1.0, "c": ["x"]}')
    prompt = first_prompt(both)
    turns = known(turn(both, prompt, (7, 8, CLOSE), "", [call]))
    message = said("", [echoed("call_a", "search", {"b": 1, "c": ["x"], "a": False})])
    result = build_prompt(both, turns, "s", [SYSTEM, ASK, message, MORE], TOOLS)
    assert result.ids[len(prompt) : len(prompt) + 3] == [7, 8, CLOSE]


def test_a_turn_cut_by_its_length_is_closed_by_the_template(both):
    prompt = first_prompt(both)
    output = spelled(both, "Nairobi is")
    turns = known(turn(both, prompt, output, "Nairobi is"))
    result = build_prompt(both, turns, "s", [SYSTEM, ASK, said("Nairobi is"), MORE], TOOLS)
    after = result.ids[len(prompt) + len(output) :]
    assert both.decode(after).startswith("<|im_end|>\n<|im_start|>user")


def test_another_end_of_turn_is_not_closed_twice(model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    codec = TextCodec(folder)
    prompt = first_prompt(codec)
    turns = known(turn(codec, prompt, (7, 0), "x"))
    result = build_prompt(codec, turns, "s", [SYSTEM, ASK, said("x"), MORE], TOOLS)
    assert codec.decode(result.ids[len(prompt) :]).split("<|im_start|>")[0].endswith("<|endoftext|>\n")


CALL = ToolCall(id="call_a", name="search", arguments='{"q": 1}')


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (said("Never said."), "unknown"),
        (said("Look.", [echoed("call_z", "search", {"q": 1})]), "unknown"),
        (said("Look.", [echoed("call_a", "search", {"q": True})]), "arguments"),
        (said("Look.", [echoed("call_a", "search", "{not json")]), "arguments"),
        (said("Look.", [echoed("call_a", "find", {"q": 1})]), "calls"),
        (said("Look.", [echoed("call_a", "search", {"q": 1}), echoed("call_b", "search", {})]), "calls"),
        (said("", [echoed("call_a", "search", {"q": 1})]), "content"),
        (said("Look."), "unknown"),
    ],
)
def test_a_rewritten_turn_is_text_and_counted(both, message, reason):
    messages = [SYSTEM, ASK, message, MORE]
    turns = known(turn(both, first_prompt(both), (7, CLOSE), "Look.", [CALL]))
    result = build_prompt(both, turns, "s", messages, TOOLS)
    assert result.ids == both.prompt(messages, TOOLS)
    assert (result.spliced, result.rewrites) == ((), (reason,))


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("calls", [False, True])
@pytest.mark.parametrize("reasoning", ["Kenya. ", "Peru.", "", None])
def test_a_turn_without_its_reasoning_is_another(both, reasoning, calls, named):
    called = [CALL] if calls else []
    sampled = dataclasses.replace(turn(both, first_prompt(both), (7, CLOSE), "Look.", called), reasoning="Kenya.")
    message = said("Look.", [echoed(CALL.id, CALL.name, {"q": 1})] if calls else ())
    message |= {} if reasoning is None else {"reasoning_content": reasoning}
    message |= {TURN: "c0"} if named else {}
    result = build_prompt(both, known(sampled), "s", [SYSTEM, ASK, message, MORE], TOOLS)
    back = reasoning == "Kenya. " or (reasoning == "" and named)
    assert (result.spliced, result.rewrites) == ((("c0",), ()) if back else ((), ("reasoning",)))


def test_equal_content_is_told_apart_by_what_stood_before(both):
    one, two = first_prompt(both), first_prompt(both, [SYSTEM, MORE])
    turns = known(
        turn(both, one, (7, CLOSE), "Yes.", call_id="one"),
        turn(both, two, (8, CLOSE), "Yes.", call_id="two"),
    )
    assert build_prompt(both, turns, "s", [SYSTEM, ASK, said("Yes."), MORE], TOOLS).spliced == ("one",)
    assert build_prompt(both, turns, "s", [SYSTEM, MORE, said("Yes."), ASK], TOOLS).spliced == ("two",)
    # Neither prompt stands before it: the latest of the session, and that one also when there are later ones.
    rewritten = [MORE, said("Yes."), ASK]
    third = build_prompt(both, turns, "s", rewritten, TOOLS)
    assert third.spliced == ("two",)
    turns.add(turn(both, third.ids, (9, CLOSE), "Yes.", call_id="three"))
    later = build_prompt(both, turns, "s", [*rewritten, said("Yes."), MORE], TOOLS)
    assert later.spliced == ("two", "three")
    assert later.ids[: len(third.ids)] == third.ids


def test_another_sessions_turn_needs_its_exact_prompt(both):
    prompt = first_prompt(both)
    turns = known(turn(both, prompt, (7, CLOSE), "Yes.", session="other"))
    assert build_prompt(both, turns, "s", [SYSTEM, ASK, said("Yes."), MORE], TOOLS).spliced == ("c0",)
    messages = [SYSTEM, ASK, MORE, said(" Yes."), ASK]
    result = build_prompt(both, turns, "s", messages, TOOLS)
    assert result.ids == both.prompt(messages, TOOLS)
    assert result.rewrites == ("unknown",)


def test_other_tools_keep_the_sampled_turn(both):
    prompt = first_prompt(both)
    turns = known(turn(both, prompt, (7, 9, CLOSE), "Look.", [CALL]))
    message = said("Look.", [echoed("call_a", "search", {"q": 1})])
    result = build_prompt(both, turns, "s", [SYSTEM, ASK, message, MORE], [])
    assert result.ids[: len(prompt)] != prompt
    at = result.ids.index(9)
    assert result.ids[at - 1 : at + 2] == [7, 9, CLOSE]


NOTE = "{%- if messages | selectattr('tool_calls', 'defined') | list %}With tools.{% endif %}"
SPLIT = "{%- for message in messages %}"
WANTS_CALLS = (
    "{%- if message.role == 'user' and loop.previtem and loop.previtem.role == 'assistant' "
    "and not loop.previtem.tool_calls %}{{ raise_exception('no calls') }}{% endif %}"
)


@pytest.mark.parametrize(
    "changed",
    [
        lambda source: NOTE + source,
        lambda source: source + NOTE,
        lambda source: source.replace("{{ message.content }}<|im_end|>", "{{ message.content }}" + NOTE + "<|im_end|>"),
        lambda source: source.replace(SPLIT, SPLIT + WANTS_CALLS),
    ],
    ids=["before", "after", "between", "refuses"],
)
def test_a_template_that_treats_tool_turns_differently_forks(model_folder, changed, monkeypatch):
    codec = TextCodec(model_folder)
    source = changed(codec._template.source)
    monkeypatch.setattr(codec, "_template", ChatTemplate(source, "template", {}))
    turns = known(turn(codec, first_prompt(codec), (7, CLOSE), "Look.", [CALL]))
    messages = [SYSTEM, ASK, said("Look.", [echoed("call_a", "search", {"q": 1})]), MORE]
    result = build_prompt(codec, turns, "s", messages, TOOLS)
    assert result.ids == codec.prompt(messages, TOOLS)
    assert result.rewrites == ("template",)


def test_the_opener_of_a_session_is_the_call_with_that_tool_call(both):
    turns = known(turn(both, [1], (7, CLOSE), "", [CALL], call_id="c7"))
    assert turns.opener("call_a") == "c7"
    assert turns.opener("call_b") is None


words = st.lists(st.sampled_from(["Kenya", " ", "\n", "<|im_end|>", "<tool_call>", "é", "{", "x"]), max_size=5).map(
    "".join
)


@hypothesis.given(st.lists(st.tuples(words, words, st.booleans(), st.booleans()), min_size=1, max_size=5))
def test_every_prompt_extends_the_one_before_and_its_sample(codec, rounds):
    turns, messages = Turns(), [SYSTEM, ASK]
    expected = []
    for number, (reply, answer, calls_tool, cut) in enumerate(rounds):
        prompt = build_prompt(codec, turns, "s", messages, TOOLS)
        assert prompt.ids[: len(expected)] == expected
        assert prompt.rewrites == ()
        assert len(prompt.spliced) == number
        output = [*spelled(codec, reply or "."), *([] if cut else [CLOSE])]
        calls = [ToolCall(id=f"call_{number}", name="f", arguments='{"q": 1}')] if calls_tool else []
        turns.add(turn(codec, prompt.ids, output, reply, calls, call_id=f"c{number}"))
        messages = [*messages, said(reply, [echoed(c.id, "f", {"q": 1}) for c in calls])]
        messages.append({"role": "tool" if calls_tool else "user", "content": answer})
        expected = [*prompt.ids, *output]


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ({"a": 1, "b": [True]}, {"b": [True], "a": 1.0}, True),
        (True, 1, False),
        ([0], [False], False),
        ([1, 2], [2, 1], False),
        ([1], [1, 2], False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ("1", 1, False),
        (None, None, True),
        ({}, [], False),
    ],
)
def test_same_json(a, b, same):
    assert same_json(a, b) is same
    assert same_json(b, a) is same
