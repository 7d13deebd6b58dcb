"""The raw body of a request, in any of the three dialects -> instructions, tools and messages that can be compared.

OpenAI chat completions, OpenAI responses and Anthropic messages say the same things under other names. What a harness
varies without meaning anything is levelled: text as a string or as parts, cache marks, item ids, white space at the
ends. Nothing read here is trained on; it explains why token sequences part.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

# Lines that a harness changes with every request and that mean nothing to the model.
_VOLATILE = ("x-anthropic-billing-header:",)
_INSTRUCTING = ("system", "developer")


class Message(NamedTuple):
    """One turn.

    Attributes:
      role: as the dialect names it; results of tools may come from "tool" or "user".
      text: what it says, without reasoning.
      calls: the tool calls it makes, as (name, raw arguments).
      ids: ids of the tool calls that it makes or answers.
      reasoning: the reasoning that came back with it, where the dialect has a place for it.
    """

    role: str
    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    ids: tuple[str, ...] = ()
    reasoning: str = ""


class Asked(NamedTuple):
    """What a request asks.

    Attributes:
      instructions: text of the system prompt, wherever the dialect puts it.
      tools: the tool definitions as canonical JSON, or "".
      messages: everything after the instructions.
      max_tokens: the limit that the request sets, or None.
      schema_keys: property names of the JSON schema that the answer must follow; empty without one.
    """

    instructions: str
    tools: str
    messages: tuple[Message, ...]
    max_tokens: int | None
    schema_keys: tuple[str, ...]


def read_request(body: str) -> Asked | None:
    """Reads a request body.

    Args:
      body: JSON text, as it arrived.

    Returns:
      What it asks; None if it is not a request of a known dialect.

    Example:
      >>> asked = read_request('{"system": "Be brief.", "messages": [{"role": "user", "content": "Hi"}]}')
      >>> asked.instructions, [(turn.role, turn.text) for turn in asked.messages]
      ('Be brief.', [('user', 'Hi')])
    """
    data = json_object(body)
    items = data.get("messages", data.get("input"))
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    turns = list(_turns([item for item in map(_object, _list(items)) if item]))
    if not turns:
        return None
    first = next((place for place, turn in enumerate(turns) if turn.role not in _INSTRUCTING), len(turns))
    given = [text_of(data.get("instructions")), *_system(data.get("system")), *(turn.text for turn in turns[:first])]
    return Asked(
        instructions="\n".join(text for text in given if text and not text.startswith(_VOLATILE)),
        tools=_canonical(data.get("tools")),
        messages=tuple(turns[first:]),
        max_tokens=_limit(data),
        schema_keys=_schema_keys(data),
    )


def json_object(text: str) -> dict[str, Any]:
    """The JSON object that a text spells; empty if it is none, since a client may send anything."""
    try:
        return _object(json.loads(text))
    except (ValueError, RecursionError):
        return {}


def text_of(content: Any) -> str:
    """All text of a message content: a string, or parts of any dialect; reasoning and pictures are no text."""
    if isinstance(content, str):
        return content.strip()
    texts = [part if isinstance(part, str) else _part_text(_object(part)) for part in _list(content)]
    return "\n".join(text.strip() for text in texts if text)


def _part_text(part: Mapping[str, Any]) -> str:
    text = part.get("text")
    if isinstance(text, str) and part.get("type") not in ("thinking", "reasoning"):
        return text
    return text_of(part.get("content")) if part.get("type") == "tool_result" else ""


def _turns(items: Sequence[Mapping[str, Any]]) -> Iterator[Message]:
    """The messages; items that make up one assistant turn in the responses dialect become one message."""
    open_turn: Message | None = None
    for item in items:
        turn = _turn(item)
        if open_turn is not None and turn.role == "assistant":
            open_turn = _joined(open_turn, turn)
            continue
        if open_turn is not None:
            yield open_turn
        open_turn = turn if turn.role == "assistant" else None
        if open_turn is None:
            yield turn
    if open_turn is not None:
        yield open_turn


def _joined(a: Message, b: Message) -> Message:
    text, reasoning = ("\n".join(filter(None, pair)) for pair in ((a.text, b.text), (a.reasoning, b.reasoning)))
    return Message(a.role, text, a.calls + b.calls, a.ids + b.ids, reasoning)


def _turn(item: Mapping[str, Any]) -> Message:
    kind, role = item.get("type"), str(item.get("role") or "")
    if kind == "function_call":
        return Message("assistant", calls=(_call(item),), ids=_strings(item.get("call_id")))
    if kind == "function_call_output":
        return Message("tool", text_of(item.get("output")), ids=_strings(item.get("call_id")))
    if kind == "reasoning":
        return Message("assistant", reasoning=text_of(item.get("content")) or text_of(item.get("summary")))
    if not role:
        return Message(str(kind), _canonical({key: value for key, value in item.items() if key != "id"}))
    calls: list[tuple[str, str]] = []
    ids = list(_strings(item.get("tool_call_id")))
    reasoning = list(_strings(item.get("reasoning_content")))
    for made in map(_object, _list(item.get("tool_calls"))):
        calls.append(_call(_object(made.get("function"))))
        ids += _strings(made.get("id"))
    for part in map(_object, _list(item.get("content"))):
        if part.get("type") == "tool_use":
            calls.append((str(part.get("name")), json.dumps(part.get("input"))))
            ids += _strings(part.get("id"))
        elif part.get("type") == "tool_result":
            ids += _strings(part.get("tool_use_id"))
        elif part.get("type") == "thinking":
            reasoning += _strings(part.get("thinking"))
    return Message(role, text_of(item.get("content")), tuple(calls), tuple(ids), "\n".join(reasoning))


def _call(made: Mapping[str, Any]) -> tuple[str, str]:
    arguments = made.get("arguments")
    return str(made.get("name")), arguments if isinstance(arguments, str) else json.dumps(arguments)


def _strings(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else ()


def _system(system: Any) -> list[str]:
    return [text_of([part]) for part in _list(system)] or [text_of(system)]


def _canonical(value: Any) -> str:
    return json.dumps(_unmarked(value), sort_keys=True) if value else ""


def _unmarked(value: Any) -> Any:
    """The value without the marks that only steer a cache."""
    if isinstance(value, dict):
        return {key: _unmarked(inner) for key, inner in _object(value).items() if key != "cache_control"}
    return [_unmarked(inner) for inner in _list(value)] if isinstance(value, list) else value


def _limit(data: Mapping[str, Any]) -> int | None:
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        value = data.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _schema_keys(data: Mapping[str, Any]) -> tuple[str, ...]:
    """Property names of the answer's schema: `response_format`, `text.format` or `output_config.format`."""
    for path in (("response_format", "json_schema"), ("text", "format"), ("output_config", "format")):
        value = data
        for name in (*path, "schema", "properties"):
            value = _object(value.get(name))
        if value:
            return tuple(sorted(value))
    return ()


def _object(value: Any) -> dict[str, Any]:
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return cast(list[Any], value) if isinstance(value, list) else []
