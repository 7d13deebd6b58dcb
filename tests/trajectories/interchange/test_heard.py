import json

import pytest

from harnessrl_jax.trajectories.interchange import heard

ARGUMENTS = {"q": "x"}
CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Q"}]},
        {"role": "assistant", "content": None,
         "tool_calls": [{"id": "t", "function": {"name": "f", "arguments": json.dumps(ARGUMENTS)}}]},
        {"role": "tool", "tool_call_id": "t", "content": "R"},
    ]
}  # fmt: skip
RESPONSES = {
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": "Q"},
        {"type": "function_call", "call_id": "t", "name": "f", "arguments": json.dumps(ARGUMENTS)},
        {"type": "function_call_output", "call_id": "t", "output": "R"},
    ],
}
ANTHROPIC = {
    "system": "Be brief.",
    "messages": [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": ARGUMENTS}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "R"}]},
    ],
}


@pytest.mark.parametrize("body", [CHAT, RESPONSES, ANTHROPIC], ids=["chat", "responses", "anthropic"])
def test_every_dialect_says_the_same(make_call, body):
    assert heard(make_call("a", [1], [2], request=json.dumps(body))) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "R", "tool_call_id": "t"},
    ]


def test_a_message_that_answers_several_calls_names_none(make_call):
    both = [{"type": "tool_result", "tool_use_id": name, "content": name} for name in "st"]
    (message,) = heard(make_call("a", [1], [2], request=json.dumps({"messages": [{"role": "user", "content": both}]})))
    assert message == {"role": "tool", "content": "s\nt"}


def test_a_request_of_no_dialect_is_not_guessed(make_call):
    assert heard(make_call("a", [1], [2], request="not JSON")) is None
