"""A toy wire: requests in the three dialects become prompt ids, one id a character, so that every id can be read."""

import json
from typing import NamedTuple

import pytest

from harnessrl_jax.trajectories import Call, ToolCall, build_lineage
from harnessrl_jax.trajectories.requests import read_request

START, END = 1, 2
SPELLED = {START: "<|start|>", END: "<|end|>"}


def decode(ids):
    return "".join(SPELLED.get(i) or chr(i) for i in ids)


def turn(role, text, calls=()):
    made = "".join(f"<call>{name} {arguments}</call>" for name, arguments in calls)
    return [START, *map(ord, f"{role}\n{text}{made}"), END]


def render(body):
    """Prompt ids: one system turn with instructions and tools, the messages, and the head of the answer."""
    asked = read_request(body)
    ids = turn("system", asked.instructions + asked.tools)
    for message in asked.messages:
        ids += turn(message.role, message.text, message.calls)
    return [*ids, START, *map(ord, "assistant\n")]


class Wire:
    """Records what a harness asks, one call after the other."""

    def __init__(self, make_call):
        self._make_call = make_call
        self.calls: list[Call] = []

    def ask(self, call_id, body, answer="", made=(), *, think="", **fields):
        """Adds a call; `made` are the tool calls of the answer as (id, name, arguments)."""
        text = json.dumps(body)
        tools = tuple(ToolCall(id=key, name=name, arguments=arguments) for key, name, arguments in made)
        output = turn("assistant", think + answer, [(name, arguments) for _, name, arguments in made])
        defaults = {
            "seq": len(self.calls),
            "request": text,
            "request_digest": text,
            "tool_calls": tools,
            "prompt_ids": render(text),
            "output_ids": output[len("assistant\n") + 1 :],
        }
        self.calls.append(self._make_call(call_id, **(defaults | fields)))
        return self.calls[-1]

    def lineage(self, decode=None):
        return build_lineage(self.calls, decode)

    def places(self, decode=None):
        """call_id -> its place."""
        return {linked.call.call_id: linked for linked in self.lineage(decode).calls}


class Chat(NamedTuple):
    """Bodies in the dialect of chat completions."""

    instructions: str
    tools: tuple[str, ...] = ()

    def body(self, *messages, **fields):
        tools = [{"type": "function", "function": {"name": name}} for name in self.tools]
        out = {"messages": [{"role": "system", "content": self.instructions}] if self.instructions else []}
        out["messages"] += [user(m) if isinstance(m, str) else m for m in messages]
        return out | ({"tools": tools} if tools else {}) | fields


def user(text):
    return {"role": "user", "content": text}


def said(text, *made, **fields):
    """An assistant message; `made` as in `Wire.ask`."""
    calls = [{"id": key, "type": "function", "function": {"name": n, "arguments": a}} for key, n, a in made]
    return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {}) | fields


def result(key, text):
    return {"role": "tool", "tool_call_id": key, "content": text}


@pytest.fixture
def wire(make_call):
    return Wire(make_call)


@pytest.fixture(scope="session")
def wire_of(make_call):
    return lambda: Wire(make_call)


@pytest.fixture(scope="session")
def toy():
    """The toy's functions, as one value."""
    return Toy(Chat, user, said, result, decode)


class Toy(NamedTuple):
    chat: type[Chat]
    user: object
    said: object
    result: object
    decode: object
