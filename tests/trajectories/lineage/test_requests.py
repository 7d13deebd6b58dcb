"""The three dialects say the same; what a harness varies without meaning anything is levelled."""

import json

import pytest

from harnessrl_jax.trajectories.requests import Message, read_request

CALL = ("search", '{"q": "x"}')
WANT = (
    Message("user", "Capital?"),
    Message("assistant", "Let me look.", (CALL,), ("k1",), "France."),
)


def read(body):
    return read_request(json.dumps(body))


CHAT = {
    "messages": [
        {"role": "system", "content": "Answer."},
        {"role": "user", "content": " Capital?\n"},
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": "France.",
            "tool_calls": [{"id": "k1", "type": "function", "function": {"name": "search", "arguments": CALL[1]}}],
        },
        {"role": "tool", "tool_call_id": "k1", "content": "Paris"},
    ],
    "max_completion_tokens": 7,
}
RESPONSES = {
    "instructions": "Answer.",
    "input": [
        {"type": "message", "id": "m1", "role": "user", "content": [{"type": "input_text", "text": "Capital?"}]},
        {"type": "reasoning", "id": "r1", "summary": [{"type": "summary_text", "text": "France."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me look."}]},
        {"type": "function_call", "id": "f1", "call_id": "k1", "name": "search", "arguments": CALL[1]},
        {"type": "function_call_output", "call_id": "k1", "output": "Paris"},
    ],
    "max_output_tokens": 7,
}
ANTHROPIC = {
    "system": [{"type": "text", "text": "Answer.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Capital?", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "France.", "signature": "s"},
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "k1", "name": "search", "input": {"q": "x"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "k1", "content": "Paris"}]},
    ],
    "max_tokens": 7,
}


@pytest.mark.parametrize("body", [CHAT, RESPONSES, ANTHROPIC])
def test_every_dialect_is_read_alike(body):
    asked = read(body)
    assert (asked.instructions, asked.tools, asked.max_tokens, asked.schema_keys) == ("Answer.", "", 7, ())
    assert asked.messages[:2] == WANT
    assert (asked.messages[2].text, asked.messages[2].ids) == ("Paris", ("k1",))


def test_cache_marks_and_the_order_of_keys_do_not_matter():
    tool = {"name": "bash", "input_schema": {"type": "object"}}
    marked = {"input_schema": {"type": "object"}, "name": "bash", "cache_control": {"type": "ephemeral"}}
    message = [{"role": "user", "content": "x"}]
    assert read({"messages": message, "tools": [tool]}) == read({"messages": message, "tools": [marked]})
    assert read({"messages": message, "tools": []}).tools == ""


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"properties": {"title": {}}}}}},
        {"text": {"format": {"type": "json_schema", "schema": {"properties": {"title": {}}}}}},
        {"output_config": {"format": {"type": "json_schema", "schema": {"properties": {"title": {}}}}}},
    ],
)
def test_the_fields_of_the_wanted_answer(fields):
    assert read({"messages": [{"role": "user", "content": "x"}]} | fields).schema_keys == ("title",)


@pytest.mark.parametrize(
    "body", ["", "{", "[" * 100_000, "[1]", "{}", '{"messages": []}', '{"messages": [1]}', '{"input": 3}']
)
def test_what_is_no_request_is_none(body):
    assert read_request(body) is None


def test_an_item_of_an_unknown_kind_is_kept_whole():
    item = {"type": "web_search_call", "id": "w1", "action": {"query": "x"}}
    (message,) = read({"input": [item]}).messages
    assert message == Message("web_search_call", '{"action": {"query": "x"}, "type": "web_search_call"}')
