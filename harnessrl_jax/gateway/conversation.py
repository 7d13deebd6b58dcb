"""Messages, tools and the turns sampled before -> prompt ids.

An assistant turn that the harness echoes comes back as the ids that were sampled, never as text that is encoded again;
everything around it equals the canonical render.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from harnessrl_jax.errors import TextError
from harnessrl_jax.gateway.exchange import TURN
from harnessrl_jax.gateway.fields import function_call
from harnessrl_jax.gateway.text import TextCodec
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


class Prompt(NamedTuple):
    """What the sampler will read, and how it came about.

    Attributes:
      ids: the prompt.
      spliced: call ids of the turns whose sampled ids stand in it, in order.
      rewrites: why each other assistant turn was rendered as text: `unknown` (never sampled here), `content`, `calls`,
        `arguments` or `reasoning` (sampled, but changed or left out by the harness), `template` (it writes such a turn
        in a way that sampled ids cannot replace).
    """

    ids: list[int]
    spliced: tuple[str, ...]
    rewrites: tuple[str, ...]


class Match(NamedTuple):
    """Turns that an echoed message may stand for.

    Attributes:
      turns: the candidates, earliest first.
      sure: whether the message names its turn, so that what stands before it does not matter.
      reason: if there are none, why; see `Prompt.rewrites`.
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


def build_prompt(
    codec: TextCodec, turns: Turns, session_id: str, messages: Sequence[Message], tools: Sequence[Message]
) -> Prompt:
    """The ids that a request asks the model to continue.

    A turn found by a tool-call id or by its name is that turn. Content alone may have been sampled several times: the
    turn whose prompt is exactly what stands before it wins, then the turn of the same session that stood there in an
    earlier prompt, then its latest; a turn of another session counts only with its exact prompt, so that the result
    does not depend on what runs at the same time.

    Args:
      codec: the model's tokenizer and template.
      turns: what was sampled in this attempt.
      session_id: the conversation that asks.
      messages: chat messages with parsed tool-call arguments.
      tools: tool definitions.

    Raises:
      TextError: the template refuses the messages.
    """
    found, rewrites = _find(turns, messages)
    shown = [{key: value for key, value in message.items() if key != TURN} for message in messages]
    guarded = codec.protect(shown, tools)
    canonical = codec.render(guarded)
    borders: list[str] = [canonical]
    bodies: list[str] = []
    if found:
        try:
            borders = _up_to_header(codec.render(guarded, found).split(guarded.mark), codec.header)
        except TextError:
            borders = []
        bodies = _bodies(canonical, borders, len(found))
        if not bodies:
            rewrites += ["template"] * len(found)
            borders, found = [canonical], {}
    texts = _Texts(guarded.breaker, borders, bodies)
    ids, spliced, unmatched = _splice(codec, turns, texts, list(found.values()), session_id)
    return Prompt(ids, spliced, (*rewrites, *unmatched))


def _find(turns: Turns, messages: Sequence[Message]) -> tuple[dict[int, Match], list[str]]:
    """Turns that each assistant message may stand for, by its index, and why others stand for none."""
    found: dict[int, Match] = {}
    rewrites: list[str] = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            match = turns.find(message)
            if match.turns:
                found[index] = match
            else:
                rewrites.append(match.reason)
    return found, rewrites


class _Texts(NamedTuple):
    """A rendered conversation: border, turn, border, ..., and the mark that breaks control tokens in all of it."""

    breaker: str
    borders: list[str]
    bodies: list[str]


def _splice(
    codec: TextCodec, turns: Turns, texts: _Texts, matches: list[Match], session_id: str
) -> tuple[list[int], tuple[str, ...], list[str]]:
    """Ids of border, turn, border, ..., each turn as sampled where one fits and as text where none does."""
    ids: list[int] = []
    spliced: list[str] = []
    unmatched: list[str] = []
    pending, ended = texts.borders[0], False
    for body, border, match in zip(texts.bodies, texts.borders[1:], matches, strict=True):
        before = ids + _after(codec, pending, texts.breaker, ended)
        turn = _choose(turns, match, before, session_id)
        if turn is None:
            unmatched.append("unknown")
            pending += body + border
            continue
        spliced.append(turn.call_id)
        ids = before + list(turn.output_ids)
        pending, ended = border, turn.output_ids[-1] in codec.stop_ids
    return ids + _after(codec, pending, texts.breaker, ended), tuple(spliced), unmatched


def _after(codec: TextCodec, text: str, breaker: str, ended: bool) -> list[int]:
    """Ids of a border. The template closes the turn before it, which a sampled end of turn has done already."""
    ids = codec.encode(text, breaker)
    return ids[1:] if ended and ids and ids[0] in codec.stop_ids else ids


def _choose(turns: Turns, match: Match, before: list[int], session_id: str) -> Turn | None:
    if match.sure:
        return match.turns[0]
    read = tuple(before)
    exact = next((turn for turn in match.turns if turn.prompt_ids == read), None)
    own = [turn for turn in match.turns if turn.session_id == session_id]
    if exact is not None or not own:
        return exact
    placed = (turn for turn in own if turns.stood(session_id, read + turn.output_ids))
    return next(placed, own[-1]) if len(own) > 1 else own[0]


def _up_to_header(borders: list[str], header: str) -> list[str]:
    """Borders that each end with the header of the turn after them; [] if one lacks it.

    Some templates write the beginning of a turn themselves, such as empty reasoning. The sampled ids are the whole
    turn, from the header on.
    """
    if not header:
        return borders
    cut = [border.rpartition(header) for border in borders[:-1]]
    if not all(found for _, found, _ in cut):
        return []
    return [*(before + found for before, found, _ in cut), borders[-1]]


def _bodies(canonical: str, borders: list[str], count: int) -> list[str]:
    """What the canonical render holds between the borders; [] if the borders do not frame it."""
    if len(borders) != count + 1 or not canonical.startswith(borders[0]):
        return []
    bodies: list[str] = []
    at = len(borders[0])
    for border in borders[1:-1]:
        end = canonical.find(border, at)
        if end < 0:
            return []
        bodies.append(canonical[at:end])
        at = end + len(border)
    end = len(canonical) - len(borders[-1])
    if end < at or not canonical.endswith(borders[-1]):
        return []
    return [*bodies, canonical[at:end]]


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
    if "reasoning_content" in message:
        return _bare(message["reasoning_content"]) == _bare(turn.reasoning)
    return not turn.reasoning or message.get(TURN) == turn.call_id


def _spellings(turn: Turn) -> set[str]:
    """Contents that stand for the turn: some harnesses put the stop text back."""
    content = _bare(turn.content)
    return {content} if turn.stopped_by is None else {content, _bare(turn.content + turn.stopped_by)}


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
