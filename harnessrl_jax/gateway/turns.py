"""Sampled turns -> which of them an echoed message stands for, and what the harness changed in one that it names."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from harnessrl_jax.gateway.exchange import TURN
from harnessrl_jax.gateway.fields import function_call
from harnessrl_jax.trajectories.records import ToolCall

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One sampled assistant turn, as the harness received it."""

    call_id: str
    session_id: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    content: str
    tool_calls: tuple[ToolCall, ...]
    reasoning: str = ""
    stopped_by: str | None = None
    """The stop text that ended it; it is not part of `content`."""


def echo_of(turn: Turn) -> dict[str, Any]:
    """The turn as a message that names it."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.content, TURN: turn.call_id}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.tool_calls:
        parsed = [(call, json.loads(call.arguments)) for call in turn.tool_calls]
        message["tool_calls"] = [function_call(call.id, call.name, arguments) for call, arguments in parsed]
    return message


class Match(NamedTuple):
    """Turns that an echoed message may stand for.

    Attributes:
      turns: the candidates, earliest first.
      sure: whether the message names its turn, so that what stands before it does not matter.
      reason: if there are none, why; see `conversation.Prompt.rewrites`.
    """

    turns: Sequence[Turn]
    sure: bool
    reason: str


class Turns:
    """The sampled turns of one attempt of a rollout, found by what a harness echoes."""

    def __init__(self) -> None:
        self._by_call: dict[str, Turn] = {}
        self._by_tool_call: dict[str, Turn] = {}
        self._by_content: defaultdict[str, list[Turn]] = defaultdict(list)
        self._conversations: dict[str, tuple[Message, ...]] = {}

    def add(self, turn: Turn) -> None:
        """Makes a turn known; call it before the harness can echo it."""
        self._by_call[turn.call_id] = turn
        for call in turn.tool_calls:
            self._by_tool_call[call.id] = turn
        if not turn.tool_calls:
            for content in _spellings(turn):
                self._by_content[content].append(turn)

    def keep(self, call_id: str, messages: Sequence[Message]) -> None:
        """Keeps a conversation that ends with this call's turn, for requests that only name it."""
        self._conversations[call_id] = tuple(messages)

    def conversation(self, call_id: str) -> tuple[Message, ...] | None:
        """What `keep` was given, or None."""
        return self._conversations.get(call_id)

    def opener(self, tool_call_id: str) -> str | None:
        """The call that made a tool call, or None."""
        turn = self._by_tool_call.get(tool_call_id)
        return None if turn is None else turn.call_id

    def stood(self, session_id: str, ids: tuple[int, ...]) -> bool:
        """Whether a prompt of the session began with these ids."""
        own = (turn for turn in self._by_call.values() if turn.session_id == session_id)
        return any(turn.prompt_ids[: len(ids)] == ids for turn in own)

    def find(self, message: Message) -> Match:
        """What an echoed assistant message may stand for: by its tool calls, by its name, or by its content."""
        calls = message.get("tool_calls") or []
        turn = self._by_tool_call.get(calls[0].get("id", "")) if calls else None
        turn = turn or self._by_call.get(message.get(TURN) or "")
        if turn is not None:
            change = _change(turn, message)
            return Match([], True, change) if change else Match([turn], True, "")
        if calls:
            return Match([], False, "unknown")
        turns = self._by_content.get(_bare(message.get("content") or ""), [])
        same = [turn for turn in turns if _same_reasoning(turn, message)]
        return Match(same, False, "" if same else "reasoning" if turns else "unknown")


def _change(turn: Turn, message: Message) -> str:
    """What the harness changed in a turn that it names; "" if nothing that matters."""
    calls: Sequence[Message] = message.get("tool_calls") or []
    if _bare(message.get("content") or "") not in _spellings(turn):
        return "content"
    echoed = [(call.get("id"), call["function"]["name"]) for call in calls]
    if echoed != [(call.id, call.name) for call in turn.tool_calls]:
        return "calls"
    same = all(
        same_json(call["function"]["arguments"], json.loads(sampled.arguments))
        for call, sampled in zip(calls, turn.tool_calls, strict=True)
    )
    return "" if same and _same_reasoning(turn, message) else "reasoning" if same else "arguments"


def _same_reasoning(turn: Turn, message: Message) -> bool:
    """Whether the reasoning came back: as text, or as the name of the turn where the client keeps no text."""
    said = message.get("reasoning_content")
    if said is None:
        return not turn.reasoning
    return _bare(said) == _bare(turn.reasoning) or (not _bare(said) and message.get(TURN) == turn.call_id)


def _spellings(turn: Turn) -> set[str]:
    """Contents that stand for the turn: some harnesses put the stop text back."""
    content = _bare(turn.content)
    if turn.stopped_by is None:
        return {content}
    return {content, *(_bare(content + space + turn.stopped_by) for space in ("", " ", "\n"))}


def same_json(a: Any, b: Any) -> bool:
    """Whether two JSON values mean the same: key order and `1` against `1.0` do not matter, `true` is not `1`."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_json(value, b[key]) for key, value in a.items())
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same_json, a, b))
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def _bare(content: str) -> str:
    """Content without the white space that harnesses add or strip; null and missing are ""."""
    return content.strip()
