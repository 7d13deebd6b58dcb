"""OpenAI chat completions: request body -> `Request`. Pure."""

from typing import Any

from harnessrl_jax.gateway.constraints import openai_choice, schema_of
from harnessrl_jax.gateway.exchange import Constraint, Json, Request
from harnessrl_jax.gateway.fields import (
    arguments_of,
    asked,
    count,
    field,
    function_call,
    load,
    texts,
    thing,
    unreadable,
)
from harnessrl_jax.gateway.logprobs import banned_ids, refuse_alternatives
from harnessrl_jax.gateway.refusal import bad_request

DIALECT = "openai-chat"
MAX_CHOICES = 16

# Roles as the templates of open models know them.
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_USED = {
    *("messages", "model", "tools", "n", "max_tokens", "max_completion_tokens", "stop", "stream", "stream_options"),
    *("logprobs", "top_logprobs", "logit_bias"),
}


def parse_request(body: str) -> Request:
    """Checks a request body.

    Raises:
      Refusal: it is not a chat request that this gateway can serve; the message names the field.
    """
    data = load(body, "a chat completions request")
    messages = field(data, "messages", list, None)
    if not messages:
        raise bad_request("messages must hold at least one message.", param="messages")
    field(data, "stream_options", dict, {})
    n = count(data, "n") or 1
    if n > MAX_CHOICES:
        raise bad_request(f"n is {n}; this gateway gives at most {MAX_CHOICES} choices.", param="n")
    refuse_alternatives(data)
    limits = [limit for name in ("max_tokens", "max_completion_tokens") if (limit := count(data, name)) is not None]
    choice = data.get("tool_choice")
    calls = choice != "none"
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(field(data, "tools", list, []))]
    return Request(
        dialect=DIALECT,
        body=data,
        messages=[_message(message, f"messages[{index}]") for index, message in enumerate(messages)],
        tools=tools if calls else [],
        model=field(data, "model", str, "policy"),
        n=n,
        max_tokens=min(limits, default=None),
        stop=texts(data, "stop"),
        constraint=Constraint(
            schema_of(data.get("response_format"), "response_format", inner="json_schema"),
            openai_choice(choice, [tool["function"]["name"] for tool in tools], inner="function"),
            field(data, "parallel_tool_calls", bool, True),
        ),
        banned=banned_ids(data),
        logprobs=field(data, "logprobs", bool, False),
        stream=field(data, "stream", bool, False),
        calls=calls,
        asked=asked(data, _USED),
    )


def _message(message: Any, where: str) -> Json:
    message = thing(message, where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise bad_request(f"{where}.role is {role!r}; known roles are {', '.join(_ROLES)}.", param=f"{where}.role")
    out: Json = {"role": _ROLES[role], "content": _content(message.get("content"), f"{where}.content")}
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            out[name] = message[name]
    if role == "assistant":
        reasoning = message.get("reasoning_content", message.get("reasoning"))
        if isinstance(reasoning, str) and reasoning.strip():
            out["reasoning_content"] = reasoning
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
    out: list[str] = []
    for at, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(text := part.get("text", part.get("refusal")), str):
            raise unreadable(part, f"{where}[{at}]")
        out.append(text)
    return "".join(out)


def _echoed(call: Any, where: str) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"{where} must hold a function with a name.", param=where)
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        arguments = arguments_of(arguments)
    elif not isinstance(arguments, dict):
        raise bad_request(f"{where}.function.arguments must be JSON text.", param=where)
    return function_call(call.get("id"), function["name"], arguments)


def _tool(tool: Any, where: str) -> Json:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"{where} must hold a function with a name.", param=where)
    return tool
