"""The official client over real HTTP: JSON, events, tools, errors, and what the store holds afterwards."""

import asyncio

import openai
import pytest

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Find facts.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}
ASK = [{"role": "user", "content": "Where is Nairobi?"}]
TWO_CALLS = (
    'Look.\n<tool_call>{"name": "search", "arguments": {"query": "Nairobi"}}</tool_call>\n'
    '<tool_call>{"name": "search", "arguments": {"query": "Kenya"}}</tool_call>'
)


def test_a_plain_reply(house):
    h = house(lambda prompt: "In Kenya.")
    with h.client() as client:
        reply = client.chat.completions.create(model="m", messages=ASK)
    choice = reply.choices[0]
    assert (choice.message.content, choice.finish_reason, reply.model) == ("In Kenya.", "stop", "m")
    assert choice.message.tool_calls is None
    [(call, state, notes)] = h.calls()
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(call.prompt_ids), len(call.output_ids))
    assert (call.agent, call.session_id, call.trainable, call.seq, state) == (
        "central",
        "central",
        True,
        0,
        "delivered",
    )
    assert call.delivered
    assert call.output_ids[-1] == h.codec.stop_ids[0]
    assert notes["max_new_tokens"] == 256
