"""Anthropic Messages: request body -> `Request`. Pure."""

from collections import Counter
from typing import Any

from harnessrl_jax.gateway.constraints import anthropic_choice, schema_of
from harnessrl_jax.gateway.exchange import TURN, Constraint, Json, Request
from harnessrl_jax.gateway.fields import (
    asked,
    count,
    field,
    function_call,
    function_tool,
    load,
    not_used,
    said,
    texts,
    thing,
    unreadable,
)
from harnessrl_jax.gateway.normalise import normalise
from harnessrl_jax.gateway.refusal import bad_request

DIALECT = "anthropic-messages"

# Between the text blocks of one message, and between those of a system prompt.
_BLOCKS, _SYSTEM_BLOCKS = "\n", "\n\n"
_USED = {"messages", "system", "model", "tools", "max_tokens", "stop_sequences", "stream"}


def parse_request(body: str) -> Request:
    """Checks a request body.

    Raises:
      Refusal: it is not a Messages request that this gateway can serve; the message names the field.
    """
    data = load(body, "a Messages request")
    listed = field(data, "messages", list, None)
    if not listed:
        raise bad_request("messages must hold at least one message.", param="messages")
    ignored: Counter[str] = Counter()
    messages, normalised = _system(data.get("system"), ignored)
    for at, message in enumerate(listed):
        messages += _message(message, f"messages[{at}]", ignored)
    choice = field(data, "tool_choice", dict, {"type": "auto"})
    calls = choice.get("type") != "none"
    tools = _tools(field(data, "tools", list, []), ignored)
    return Request(
        dialect=DIALECT,
        body=data,
        messages=messages,
        tools=tools if calls else [],
        model=field(data, "model", str, "policy"),
        max_tokens=count(data, "max_tokens"),
        stop=texts(data, "stop_sequences"),
        constraint=Constraint(
            schema_of(field(data, "output_config", dict, {}).get("format"), "output_config.format"),
            anthropic_choice(choice, [tool["function"]["name"] for tool in tools]),
            not choice.get("disable_parallel_tool_use"),
        ),
        stream=field(data, "stream", bool, False),
        calls=calls,
        asked=asked(data, _USED),
        ignored=dict(ignored),
        normalised=normalised,
    )


def _system(system: Any, ignored: Counter[str]) -> tuple[list[Json], tuple[str, ...]]:
    parts = [normalise(text) for text in _texts(system, "system", ignored)]
    text = _SYSTEM_BLOCKS.join(part for part, _ in parts if part)
    return [{"role": "system", "content": text}] if text else [], tuple(name for _, names in parts for name in names)


def _message(message: Any, where: str, ignored: Counter[str]) -> list[Json]:
    message = thing(message, where)
    role, content = message.get("role"), message.get("content")
    not_used(ignored, message, ("role", "content"))
    if role == "assistant":
        return [_assistant(content, f"{where}.content", ignored)]
    if role == "system":
        # Some clients put reminders between the turns; a moving part can stand only in the first system prompt.
        return [{"role": "system", "content": _BLOCKS.join(_texts(content, f"{where}.content", ignored))}]
    if role != "user":
        raise bad_request(f"{where}.role is {role!r}; known roles are user, assistant, system.", param=f"{where}.role")
    return _user(content, f"{where}.content", ignored)


def _user(content: Any, where: str, ignored: Counter[str]) -> list[Json]:
    """The tool results and texts of a user message, in their order; neighbouring texts are one message."""
    out: list[Json] = []
    for at, block in enumerate(_blocks(content, where)):
        place = f"{where}[{at}]"
        if block.get("type") != "tool_result":
            text = _text(block, place, ignored)
            if out and out[-1]["role"] == "user":
                out[-1]["content"] += _BLOCKS + text
            else:
                out.append({"role": "user", "content": text})
            continue
        not_used(ignored, block, ("type", "tool_use_id", "content"))
        result = _BLOCKS.join(_texts(block.get("content"), f"{place}.content", ignored))
        out.append({"role": "tool", "tool_call_id": said(block, "tool_use_id", place), "content": result})
    return out or [{"role": "user", "content": ""}]


def _assistant(content: Any, where: str, ignored: Counter[str]) -> Json:
    spoken: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    out: Json = {"role": "assistant"}
    for at, block in enumerate(_blocks(content, where)):
        place = f"{where}[{at}]"
        match block.get("type"):
            case "thinking":
                thoughts.append(said(block, "thinking", place))
                if isinstance(block.get("signature"), str):
                    out[TURN] = block["signature"]
            case "redacted_thinking":
                # Another model's, encrypted: nothing of it can be shown to this one.
                ignored["redacted_thinking"] += 1
            case "tool_use":
                not_used(ignored, block, ("type", "id", "name", "input"))
                arguments = field(block, "input", dict, {}, place)
                calls.append(function_call(block.get("id"), said(block, "name", place), arguments))
            case _:
                spoken.append(_text(block, place, ignored))
    out["content"] = _BLOCKS.join(spoken)
    if thoughts:
        out["reasoning_content"] = _BLOCKS.join(thoughts)
    if calls:
        out["tool_calls"] = calls
    return out


def _texts(content: Any, where: str, ignored: Counter[str]) -> list[str]:
    return [_text(block, f"{where}[{at}]", ignored) for at, block in enumerate(_blocks(content, where))]


def _blocks(content: Any, where: str) -> list[Json]:
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise bad_request(f"{where} must be text or a list of blocks.", param=where)
    return [thing(block, f"{where}[{at}]") for at, block in enumerate(content)]


def _text(block: Json, where: str, ignored: Counter[str]) -> str:
    kind = block.get("type")
    if kind == "text" and isinstance(block.get("text"), str):
        not_used(ignored, block, ("type", "text"))
        return block["text"]
    if kind == "tool_reference" and isinstance(block.get("tool_name"), str):
        # All tools are shown from the start, so that the name says enough.
        return block["tool_name"]
    raise unreadable(block, where)


def _tools(tools: list[Any], ignored: Counter[str]) -> list[Json]:
    """Tools with a schema; those that the service itself would run are left out and counted."""
    out: list[Json] = []
    for at, tool in enumerate(tools):
        where = f"tools[{at}]"
        tool = thing(tool, where)
        if tool.get("type") not in (None, "custom"):
            ignored[f"tool:{tool['type']}"] += 1
            continue
        not_used(ignored, tool, ("type", "name", "description", "input_schema"))
        out.append(function_tool(said(tool, "name", where), tool.get("description"), tool.get("input_schema")))
    return out
