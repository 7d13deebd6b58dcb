"""What holds in every dialect: whatever a body holds, it is read or refused; the same conversation reads the same."""

import json

import hypothesis
import hypothesis.strategies as st
import pytest

from harnessrl_jax.gateway.conversation import build_prompt
from harnessrl_jax.gateway.dialects import COUNT_PATH, MESSAGES, PATHS, dialect_at
from harnessrl_jax.gateway.refusal import Refusal
from harnessrl_jax.gateway.turns import Turns

FIELDS = [
    *("messages", "input", "system", "instructions", "tools", "tool_choice", "stream", "stream_options", "n", "stop"),
    *("max_tokens", "max_output_tokens", "stop_sequences", "previous_response_id", "store", "model", "type", "role"),
    *(
        "content",
        "text",
        "tool_calls",
        "function",
        "name",
        "arguments",
        "id",
        "call_id",
        "output",
        "summary",
        "thinking",
    ),
    *("signature", "encrypted_content", "tool_use_id", "namespace", "parameters", "input_schema", "reasoning_content"),
]
WORDS = [
    *("user", "assistant", "system", "developer", "tool", "text", "message", "function", "function_call", "reasoning"),
    *(
        "custom",
        "namespace",
        "tool_use",
        "tool_result",
        "thinking",
        "output_text",
        "input_text",
        "none",
        "{}",
        "a" * 24,
    ),
]
leaves = st.one_of(st.none(), st.booleans(), st.integers(-1, 3), st.sampled_from(WORDS), st.text(max_size=3))
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5),
    max_leaves=12,
)
messages = st.lists(st.dictionaries(st.sampled_from(FIELDS), values, max_size=5) | values, min_size=1, max_size=4)


@pytest.mark.parametrize("path", PATHS)
@hypothesis.given(body=st.dictionaries(st.sampled_from(FIELDS), values, max_size=6), turns=messages)
def test_any_body_is_read_or_refused(codec, path, body, turns):
    body |= {"input" if path.endswith("responses") else "messages": turns}
    try:
        request = PATHS[path].parse(json.dumps(body))
    except Refusal:
        return
    prompt = build_prompt(codec, Turns(), "s", request.messages, request.tools)
    assert prompt.ids


CALL = {"name": "search", "arguments": '{"query": "x"}'}
SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}}}
ONE_CONVERSATION = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Where?"},
            {
                "role": "assistant",
                "content": "Look.",
                "tool_calls": [{"id": "c", "type": "function", "function": CALL}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "There."},
            {"role": "user", "content": "Sure?"},
        ],
        "tools": [{"type": "function", "function": {"name": "search", "description": "Find.", "parameters": SCHEMA}}],
    },
    "/v1/responses": {
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Where?"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Look."}]},
            {"type": "function_call", "call_id": "c", **CALL},
            {"type": "function_call_output", "call_id": "c", "output": "There."},
            {"role": "user", "content": "Sure?"},
        ],
        "tools": [{"type": "function", "name": "search", "description": "Find.", "parameters": SCHEMA}],
    },
    "/v1/messages": {
        "system": "Be brief.",
        "messages": [
            {"role": "user", "content": "Where?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "Look."},
                    {"type": "tool_use", "id": "c", "name": "search", "input": {"query": "x"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": "There."},
                    {"type": "text", "text": "Sure?"},
                ],
            },
        ],
        "tools": [{"name": "search", "description": "Find.", "input_schema": SCHEMA}],
    },
}


def test_one_conversation_is_one_prompt_in_every_dialect(codec):
    read = [PATHS[path].parse(json.dumps(body)) for path, body in ONE_CONVERSATION.items()]
    assert read[0].messages == read[1].messages == read[2].messages
    assert read[0].tools == read[1].tools == read[2].tools
    assert [request.dialect for request in read] == ["openai-chat", "openai-responses", "anthropic-messages"]


def test_the_dialect_of_a_path():
    assert [dialect_at("/run/r0/0/agent" + path) for path in PATHS] == list(PATHS.values())
    assert dialect_at("/run/r0/0" + COUNT_PATH) is MESSAGES
    assert dialect_at("/run/r0/0/v1/embeddings").name == "openai-chat"
