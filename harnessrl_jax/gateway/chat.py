"""OpenAI chat completions: request body -> checked `ChatRequest`; choices -> reply, as JSON or as events. Pure."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from harnessrl_jax.gateway.refusal import bad_request
from harnessrl_jax.trajectories.records import ToolCall

DIALECT = "openai-chat"
MAX_CHOICES = 16

Json = dict[str, Any]

# Roles as the templates of open models know them.
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_USED = {"messages", "model", "tools", "n", "max_tokens", "max_completion_tokens", "stream", "stream_options"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request in the form that templates expect.

    Attributes:
      messages: role and content of each message, content always text; arguments of tool calls parsed where they are
        JSON.
      tools: tool definitions as sent.
      model: the name the client asked for; it is echoed and decides nothing.
      n: number of choices.
      max_tokens: the client's limit on sampled tokens, or None.
      stream: whether the reply goes out as events.
      include_usage: whether a stream ends with the token counts.
      asked: fields that the gateway does not follow, with small values kept: sampling is the trainer's decision.
    """

    messages: list[Json]
    tools: list[Json]
    model: str
    n: int
    max_tokens: int | None
    stream: bool
    include_usage: bool
    asked: Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One sampled turn as the harness sees it."""

    content: str | None
    tool_calls: tuple[ToolCall, ...]
    finish: Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """All choices of a request, with what the reply says about itself."""

    id: str
    created: int
    model: str
    choices: Sequence[Choice]
    prompt_tokens: int
    completion_tokens: int

    @property
    def usage(self) -> Json:
        """True token counts; all choices share the prompt."""
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }


def parse_request(body: str) -> ChatRequest:
    """Checks a request body.

    Raises:
      Refusal: it is not a chat request that this gateway can serve; the message names the field.
    """
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"The body is not JSON ({error}). Send a chat completions request.") from error
    if not isinstance(data, dict):
        raise bad_request(f"The body must be a JSON object, got {type(data).__name__}.")
    messages = _field(data, "messages", list, None)
    if not messages:
        raise bad_request("messages must hold at least one message.", param="messages")
    options = _field(data, "stream_options", dict, {})
    n = _count(data, "n") or 1
    if n > MAX_CHOICES:
        raise bad_request(f"n is {n}; this gateway gives at most {MAX_CHOICES} choices.", param="n")
    limits = [limit for name in ("max_tokens", "max_completion_tokens") if (limit := _count(data, name)) is not None]
    return ChatRequest(
        messages=[_message(message, f"messages[{index}]") for index, message in enumerate(messages)],
        tools=[_tool(tool, f"tools[{index}]") for index, tool in enumerate(_field(data, "tools", list, []))],
        model=_field(data, "model", str, "policy"),
        n=n,
        max_tokens=min(limits, default=None),
        stream=_field(data, "stream", bool, False),
        include_usage=bool(options.get("include_usage")),
        asked={name: _small(value) for name, value in data.items() if name not in _USED},
    )


def reply_json(reply: Reply) -> bytes:
    """The whole reply."""
    choices = []
    for index, choice in enumerate(reply.choices):
        message: Json = {"role": "assistant", "content": choice.content, "refusal": None}
        if choice.tool_calls:
            message["tool_calls"] = [_tool_call(call) for call in choice.tool_calls]
        choices.append({"index": index, "message": message, "logprobs": None, "finish_reason": choice.finish})
    return _dump(_envelope(reply, "chat.completion") | {"choices": choices, "usage": reply.usage})


def reply_events(reply: Reply, *, include_usage: bool) -> Iterator[bytes]:
    """The same reply as server-sent events, the terminal one last."""
    envelope = _envelope(reply, "chat.completion.chunk")

    def event(choices: list[Json], **more: Any) -> bytes:
        return b"data: " + _dump(envelope | {"choices": choices} | more) + b"\n\n"

    nothing: Json = {"usage": None} if include_usage else {}
    for index, choice in enumerate(reply.choices):
        # Nothing of an empty turn would tell the client that there is a message.
        deltas: list[Json] = [{"role": "assistant", "content": choice.content if choice.tool_calls else ""}]
        if choice.content:
            deltas[0]["content"] = ""
            deltas.append({"content": choice.content})
        for position, call in enumerate(choice.tool_calls):
            named = {"index": position} | _tool_call(call)
            named["function"] = {"name": call.name, "arguments": ""}
            deltas.append({"tool_calls": [named]})
            deltas.append({"tool_calls": [{"index": position, "function": {"arguments": call.arguments}}]})
        for delta in deltas:
            yield event([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}], **nothing)
        yield event([{"index": index, "delta": {}, "logprobs": None, "finish_reason": choice.finish}], **nothing)
    if include_usage:
        yield event([], usage=reply.usage)
    yield b"data: [DONE]\n\n"


def _envelope(reply: Reply, kind: str) -> Json:
    return {"id": reply.id, "object": kind, "created": reply.created, "model": reply.model}


def _tool_call(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _dump(value: Json) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _message(message: Any, where: str) -> Json:
    if not isinstance(message, dict):
        raise bad_request(f"{where} must be an object, got {type(message).__name__}.", param=where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise bad_request(f"{where}.role is {role!r}; known roles are {', '.join(_ROLES)}.", param=f"{where}.role")
    out: Json = {"role": _ROLES[role], "content": _content(message.get("content"), f"{where}.content")}
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            out[name] = message[name]
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls is not None and not isinstance(calls, list):
            raise bad_request(f"{where}.tool_calls must be a list.", param=f"{where}.tool_calls")
        if calls:
            out["tool_calls"] = [_echoed(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)]
    return out


def _content(content: Any, where: str) -> str:
    """Content as text: null is the empty text, parts are joined."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise bad_request(f"{where} must be text, a list of parts or null.", param=where)
    texts = []
    for at, part in enumerate(content):
        if isinstance(part, dict) and isinstance(text := part.get("text", part.get("refusal")), str):
            texts.append(text)
            continue
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise bad_request(f"{where}[{at}] is of type {kind!r}; this model reads text only.", param=f"{where}[{at}]")
    return "".join(texts)


def _echoed(call: Any, where: str) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"{where} must hold a function with a name.", param=where)
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            # The model's own malformed arguments, sent back: they stay the text they are.
            arguments = str(arguments)
    elif not isinstance(arguments, dict):
        raise bad_request(f"{where}.function.arguments must be JSON text.", param=where)
    identity = call.get("id") if isinstance(call.get("id"), str) else ""
    return {"id": identity, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tool(tool: Any, where: str) -> Json:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"{where} must hold a function with a name.", param=where)
    return tool


def _field(data: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    """A field of the given type; null and missing are the default."""
    value = data.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise bad_request(f"{name} must be of type {kind.__name__}, got {type(value).__name__}.", param=name)
    return value


def _count(data: Mapping[str, Any], name: str) -> int | None:
    value = data.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise bad_request(f"{name} must be an integer of at least 1, got {value!r}.", param=name)
    return value


def _small(value: Any) -> Any:
    """Numbers and short texts as they are; the raw request keeps the rest."""
    short = isinstance(value, str) and len(value) < 100
    return value if short or value is None or isinstance(value, (int, float)) else "..."
