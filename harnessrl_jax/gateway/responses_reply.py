"""OpenAI Responses: reply -> JSON or events. Pure."""

from collections.abc import Sequence
from typing import Any

from harnessrl_jax.gateway.exchange import Choice, Head, Json, Kind, Origin, Reply, TokenLogp
from harnessrl_jax.gateway.fields import dump
from harnessrl_jax.gateway.logprobs import entry
from harnessrl_jax.gateway.refusal import CONTEXT_OVERFLOW, Refusal
from harnessrl_jax.gateway.response_tools import custom_text
from harnessrl_jax.gateway.sent import Sent
from harnessrl_jax.trajectories.records import ToolCall

# What clients expect a reply to repeat from its request, and what stands there if the request does not say.
_REPEATED: Json = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": None,
    "store": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
}


def reply_json(reply: Reply) -> bytes:
    """The whole reply."""
    return dump(_response(reply.head) | _outcome(reply))


def refuses_in_stream(refusal: Refusal) -> bool:
    """An overflow is an event even where nothing was sent: Codex compacts when it reads it there, and only there."""
    return refusal.code == CONTEXT_OVERFLOW


class ResponseEvents:
    """The same reply as named, numbered events: items that are added, grow and are done; the response last."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._number = 0
        self._index = -1
        self._sent: Sent | None = None
        self._open: tuple[Kind, str] | None = None
        """Kind and text so far of the item that is growing."""

    def text(self, choice: int, kind: Kind, delta: str, logps: Sequence[TokenLogp] = ()) -> bytes:
        """More text, in a new item where its kind is new. Its tokens are told when the item is done."""
        out = self._start()
        assert self._sent is not None
        self._sent.add(kind, delta)
        if self._open is None or self._open[0] != kind:
            out += self._close_text() + self._open_text(kind)
        assert self._open is not None
        self._open = (kind, self._open[1] + delta)
        more: Json = {"logprobs": []} if kind == "content" else {}
        return out + self._event(_TEXTS[kind] + ".delta", self._place(kind) | {"delta": delta} | more)

    def end(self, reply: Reply) -> bytes:
        """What is left of the text, the tool calls, and the whole response."""
        [choice] = reply.choices
        out = self._start()
        assert self._sent is not None
        out += b"".join(self.text(0, kind, delta) for kind, delta in self._sent.rest(choice))
        if not choice.tool_calls and not choice.content:
            out += self._close_text() + self._open_text("content")
        out += self._close_text(_status(choice), _logprobs(choice)) + b"".join(
            self._call(call) for call in choice.tool_calls
        )
        name = "response.incomplete" if choice.finish == "length" else "response.completed"
        return out + self._event(name, {"response": _response(self._head) | _outcome(reply)})

    def fail(self, refusal: Refusal) -> bytes:
        """The response with the error in it."""
        error = {"code": refusal.code, "message": str(refusal)}
        failed: Json = {"status": "failed", "error": error, "output": [], "usage": None}
        return self._start() + self._event("response.failed", {"response": _response(self._head) | failed})

    def _start(self) -> bytes:
        if self._sent is not None:
            return b""
        self._sent = Sent()
        response = _response(self._head) | {"status": "in_progress", "output": [], "usage": None}
        events = ("response.created", "response.in_progress")
        return b"".join(self._event(name, {"response": response}) for name in events)

    def _open_text(self, kind: Kind) -> bytes:
        self._index += 1
        self._open = (kind, "")
        item = _text_item(self._head, kind, "", "in_progress") | {"content": []}
        out = self._event("response.output_item.added", {"output_index": self._index, "item": item})
        return out + self._event("response.content_part.added", self._place(kind) | {"part": _part(kind, "")})

    def _close_text(self, status: str = "completed", logprobs: Sequence[Json] = ()) -> bytes:
        if self._open is None:
            return b""
        (kind, text), place = self._open, self._place(self._open[0])
        self._open = None
        more: Json = {"logprobs": logprobs} if kind == "content" else {}
        item = _text_item(self._head, kind, text, status, logprobs)
        return (
            self._event(_TEXTS[kind] + ".done", place | {"text": text} | more)
            + self._event("response.content_part.done", place | {"part": _part(kind, text, logprobs)})
            + self._event("response.output_item.done", {"output_index": self._index, "item": item})
        )

    def _call(self, call: ToolCall) -> bytes:
        self._index += 1
        item = _call_item(self._head, call)
        field, name = (
            ("input", "custom_tool_call_input") if "input" in item else ("arguments", "function_call_arguments")
        )
        where: Json = {"output_index": self._index, "item_id": item["id"]}
        begun = item | {field: "", "status": "in_progress"}
        return (
            self._event("response.output_item.added", {"output_index": self._index, "item": begun})
            + self._event(f"response.{name}.delta", where | {"delta": item[field]})
            + self._event(f"response.{name}.done", where | {field: item[field], "name": item["name"]})
            + self._event("response.output_item.done", {"output_index": self._index, "item": item})
        )

    def _place(self, kind: Kind) -> Json:
        return {"output_index": self._index, "content_index": 0, "item_id": _item_id(self._head, kind)}

    def _event(self, name: str, data: Json) -> bytes:
        number, self._number = self._number, self._number + 1
        return f"event: {name}\ndata: ".encode() + dump({"type": name, "sequence_number": number} | data) + b"\n\n"


_TEXTS = {"content": "response.output_text", "reasoning": "response.reasoning_text"}


def _response(head: Head) -> Json:
    repeated = {name: head.request.body.get(name) for name in _REPEATED}
    return {
        "id": f"resp_{head.call_id}",
        "object": "response",
        "created_at": head.created,
        "model": head.request.model,
        "error": None,
        "incomplete_details": None,
        **{name: _REPEATED[name] if value is None else value for name, value in repeated.items()},
    }


def _outcome(reply: Reply) -> Json:
    [choice] = reply.choices
    output: list[Json] = []
    if choice.reasoning:
        output.append(_text_item(reply.head, "reasoning", choice.reasoning, "completed"))
    if choice.content or not choice.tool_calls:
        text = choice.content or ""
        output.append(_text_item(reply.head, "content", text, _status(choice), _logprobs(choice)))
    output += [_call_item(reply.head, call) for call in choice.tool_calls]
    cut = {"reason": "max_output_tokens"} if choice.finish == "length" else None
    return {"status": _status(choice), "incomplete_details": cut, "output": output, "usage": _usage(reply)}


def _status(choice: Choice) -> str:
    return "incomplete" if choice.finish == "length" else "completed"


def _item_id(head: Head, kind: Kind) -> str:
    return f"{'rs' if kind == 'reasoning' else 'msg'}_{head.call_id}"


def _text_item(head: Head, kind: Kind, text: str, status: str, logprobs: Sequence[Json] = ()) -> Json:
    item: Json = {"id": _item_id(head, kind), "content": [_part(kind, text, logprobs)]}
    if kind == "content":
        return item | {"type": "message", "role": "assistant", "status": status}
    # Clients that drop reasoning text send the encrypted form back: it names the turn.
    return item | {"type": "reasoning", "summary": [], "encrypted_content": head.call_id}


def _part(kind: Kind, text: str, logprobs: Sequence[Json] = ()) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _logprobs(choice: Choice) -> list[Json]:
    """Of the tokens of the message: reasoning and calls are items of their own, which have no place for them."""
    return [entry(token) for token in choice.logprobs if token.message]


def _call_item(head: Head, call: ToolCall) -> Json:
    origin = head.request.origins.get(call.name, Origin(call.name))
    item: Json = {"id": f"fc_{call.id}", "call_id": call.id, "name": origin.name, "status": "completed"}
    if origin.namespace is not None:
        item["namespace"] = origin.namespace
    if origin.custom:
        return item | {"type": "custom_tool_call", "input": custom_text(call.arguments)}
    return item | {"type": "function_call", "arguments": call.arguments}


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "input_tokens": reply.head.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": reply.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reply.reasoning_tokens},
        "total_tokens": reply.head.prompt_tokens + reply.completion_tokens,
    }
