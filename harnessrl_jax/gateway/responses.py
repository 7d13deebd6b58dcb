"""OpenAI Responses: request body -> `Request`. Pure."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from harnessrl_jax.gateway.constraints import openai_choice, schema_of
from harnessrl_jax.gateway.exchange import TURN, Constraint, Json, Origin, Request
from harnessrl_jax.gateway.fields import (
    arguments_of,
    asked,
    count,
    field,
    function_call,
    load,
    not_used,
    said,
    thing,
    unreadable,
)
from harnessrl_jax.gateway.identity import call_of
from harnessrl_jax.gateway.logprobs import refuse_alternatives
from harnessrl_jax.gateway.refusal import bad_request
from harnessrl_jax.gateway.response_tools import custom_arguments, read_tools, rendered_name

DIALECT = "openai-responses"

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_PARTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
_JOINT = "\n"
_USED = {
    *("input", "instructions", "model", "tools", "max_output_tokens", "stream", "previous_response_id"),
    *("include", "top_logprobs"),
}
_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")
# What would have to be kept, fetched or run here.
_NOT_SERVED = ("conversation", "background", "prompt")


def parse_request(body: str) -> Request:
    """Checks a request body.

    Raises:
      Refusal: it is not a Responses request that this gateway can serve; the message names the field.
    """
    data = load(body, "a Responses request")
    for name in _NOT_SERVED:
        if data.get(name):
            raise bad_request(f"{name} is not served here. Send the conversation as input.", param=name)
    ignored: Counter[str] = Counter()
    tools, origins = read_tools(field(data, "tools", list, []), ignored)
    refuse_alternatives(data)
    include = field(data, "include", list, [])
    ignored.update(f"include {name}" for name in include if name not in _INCLUDED)
    choice = data.get("tool_choice")
    calls = choice != "none"
    instructions = field(data, "instructions", str, "")
    lead: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
    items = _Items(origins, ignored).read(data.get("input"))
    previous = field(data, "previous_response_id", str, None)
    if not items and previous is None:
        raise bad_request("input must hold at least one item.", param="input")
    return Request(
        dialect=DIALECT,
        body=data,
        messages=lead + items,
        tools=tools if calls else [],
        model=field(data, "model", str, "policy"),
        max_tokens=count(data, "max_output_tokens"),
        constraint=Constraint(
            schema_of(field(data, "text", dict, {}).get("format"), "text.format"),
            openai_choice(choice, [tool["function"]["name"] for tool in tools]),
            field(data, "parallel_tool_calls", bool, True),
        ),
        logprobs=_LOGPROBS in include,
        stream=field(data, "stream", bool, False),
        calls=calls,
        asked=asked(data, _USED),
        ignored=dict(ignored),
        origins=origins,
        previous=previous,
        lead=len(lead),
        resumable=field(data, "store", bool, True),
    )


class _Items:
    """Input items, read in order; the items of one assistant turn become one message."""

    def __init__(self, origins: Mapping[str, Origin], ignored: Counter[str]) -> None:
        self._origins = origins
        self._ignored = ignored
        self._messages: list[Json] = []

    def read(self, given: Any) -> list[Json]:
        if isinstance(given, str):
            return [{"role": "user", "content": given}]
        if given is not None and not isinstance(given, list):
            raise bad_request(f"input must be text or a list of items, got {type(given).__name__}.", param="input")
        for at, item in enumerate(given or []):
            self._item(thing(item, f"input[{at}]"), f"input[{at}]")
        return self._messages

    def _item(self, item: Json, where: str) -> None:
        match item.get("type", "message"):
            case "message":
                self._message(item, where)
            case "reasoning":
                self._reasoning(item, where)
            case "function_call":
                self._call(item, arguments_of(said(item, "arguments", where)), where)
            case "custom_tool_call":
                self._call(item, custom_arguments(said(item, "input", where)), where)
            case "function_call_output" | "custom_tool_call_output":
                not_used(self._ignored, item, ("type", "id", "call_id", "output", "status"))
                output = self._text(item.get("output"), f"{where}.output")
                result = {"role": "tool", "tool_call_id": said(item, "call_id", where), "content": output}
                self._messages.append(result)
            case kind:
                raise bad_request(
                    f"{where} is of type {kind!r}. This gateway reads messages, reasoning, function and custom tool "
                    "calls and their outputs; send the items themselves, not references to them.",
                    param=where,
                )

    def _message(self, item: Json, where: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise bad_request(f"{where}.role is {role!r}; known roles are {', '.join(_ROLES)}.", param=f"{where}.role")
        not_used(self._ignored, item, ("type", "id", "role", "content", "status"))
        content = self._text(item.get("content"), f"{where}.content")
        if role != "assistant":
            self._messages.append({"role": _ROLES[role], "content": content})
            return
        turn = self._turn(item.get("id"))
        # A turn speaks once: a second text after its calls or its text is another turn.
        if turn["content"] or "tool_calls" in turn:
            turn = self._new_turn(item.get("id"))
        turn["content"] = content

    def _reasoning(self, item: Json, where: str) -> None:
        not_used(self._ignored, item, ("type", "id", "summary", "content", "encrypted_content", "status"))
        turn = self._turn(item.get("encrypted_content") or item.get("id"))
        if turn["content"] or "tool_calls" in turn or "reasoning_content" in turn:
            turn = self._new_turn(item.get("encrypted_content") or item.get("id"))
        # Without text it is named by what was encrypted.
        turn["reasoning_content"] = self._text(item.get("content") or item.get("summary"), f"{where}.content")

    def _call(self, item: Json, arguments: Any, where: str) -> None:
        not_used(self._ignored, item, ("type", "id", "call_id", "name", "namespace", "arguments", "input", "status"))
        identity = said(item, "call_id", where)
        name = rendered_name(self._origins, said(item, "name", where), item.get("namespace"))
        self._turn(identity).setdefault("tool_calls", []).append(function_call(identity, name, arguments))

    def _turn(self, identity: Any) -> Json:
        """The assistant message that an item belongs to: the last one, unless its ids name another turn."""
        key = call_of(identity)
        last = self._messages[-1] if self._messages else None
        if last is None or last["role"] != "assistant":
            return self._new_turn(identity)
        if key is not None and last.get(TURN, key) != key:
            return self._new_turn(identity)
        if key is not None:
            last[TURN] = key
        return last

    def _new_turn(self, identity: Any) -> Json:
        key = call_of(identity)
        self._messages.append({"role": "assistant", "content": ""} | ({} if key is None else {TURN: key}))
        return self._messages[-1]

    def _text(self, content: Any, where: str) -> str:
        if content is None or isinstance(content, str):
            return content or ""
        if not isinstance(content, list):
            raise bad_request(f"{where} must be text or a list of parts.", param=where)
        out: list[str] = []
        for at, part in enumerate(content):
            text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
            if not isinstance(text, str) or part.get("type") not in _PARTS:
                raise unreadable(part, f"{where}[{at}]")
            out.append(text)
        return _JOINT.join(out)
