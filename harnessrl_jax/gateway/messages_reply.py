"""Anthropic Messages: reply -> JSON or events. Pure."""

import json
from collections.abc import Sequence
from typing import Literal

from harnessrl_jax.gateway.exchange import Choice, Head, Json, Kind, Reply, TokenLogp
from harnessrl_jax.gateway.fields import dump
from harnessrl_jax.gateway.refusal import Refusal, anthropic_error
from harnessrl_jax.gateway.sent import Sent
from harnessrl_jax.trajectories.records import ToolCall

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS = {"reasoning": ("thinking_delta", "thinking"), "content": ("text_delta", "text")}


def reply_json(reply: Reply) -> bytes:
    """The whole reply."""
    [choice] = reply.choices
    content: list[Json] = []
    if choice.reasoning:
        content.append({"type": "thinking", "thinking": choice.reasoning, "signature": reply.head.call_id})
    if choice.content:
        content.append({"type": "text", "text": choice.content})
    content += [_tool_use(call, json.loads(call.arguments)) for call in choice.tool_calls]
    return dump(_message(reply.head) | {"content": content, "usage": _usage(reply)} | _ending(choice))


class MessageEvents:
    """The same reply as named events: blocks that start, grow and stop, `message_stop` last."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._sent: Sent | None = None
        self._block = -1
        self._open: Kind | Literal["tool"] | None = None

    def text(self, choice: int, kind: Kind, delta: str, logps: Sequence[TokenLogp] = ()) -> bytes:
        """More text, in a new block where its kind is new."""
        out = self._start()
        assert self._sent is not None
        self._sent.add(kind, delta)
        if self._open != kind:
            # Thinking comes first and once: only text can follow it.
            empty: Json = {"type": "text", "text": ""}
            if kind == "reasoning":
                empty = {"type": "thinking", "thinking": "", "signature": ""}
            out += self._stop_block() + self._start_block(kind, empty)
        name, field = _DELTAS[kind]
        return out + self._grow({"type": name, field: delta})

    def end(self, reply: Reply) -> bytes:
        """What is left of the text, the tool calls, the stop reason and the token counts."""
        [choice] = reply.choices
        out = self._start()
        assert self._sent is not None
        out += b"".join(self.text(0, kind, delta) for kind, delta in self._sent.rest(choice)) + self._stop_block()
        for call in choice.tool_calls:
            out += self._start_block("tool", _tool_use(call, {}))
            out += self._grow({"type": "input_json_delta", "partial_json": call.arguments}) + self._stop_block()
        out += _event("message_delta", {"delta": _ending(choice), "usage": _usage(reply)})
        return out + _event("message_stop", {})

    def fail(self, refusal: Refusal) -> bytes:
        """The error as an event."""
        body = anthropic_error(refusal)[0]
        return b"event: error\ndata: " + dump(body) + b"\n\n"

    def _start(self) -> bytes:
        if self._sent is not None:
            return b""
        self._sent = Sent()
        usage = {"input_tokens": self._head.prompt_tokens, "output_tokens": 0} | _CACHE
        nothing: Json = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", {"message": _message(self._head) | nothing})

    def _start_block(self, kind: Kind | Literal["tool"], block: Json) -> bytes:
        self._block, self._open = self._block + 1, kind
        return _event("content_block_start", {"index": self._block, "content_block": block})

    def _grow(self, delta: Json) -> bytes:
        return _event("content_block_delta", {"index": self._block, "delta": delta})

    def _stop_block(self) -> bytes:
        """Ends the block that is open, if one is; thinking is signed so that it can come back."""
        if self._open is None:
            return b""
        signature = b""
        if self._open == "reasoning":
            signature = self._grow({"type": "signature_delta", "signature": self._head.call_id})
        self._open = None
        return signature + _event("content_block_stop", {"index": self._block})


# Nothing is cached on the user's account.
_CACHE = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def _event(name: str, data: Json) -> bytes:
    return f"event: {name}\ndata: ".encode() + dump({"type": name} | data) + b"\n\n"


def _message(head: Head) -> Json:
    return {"id": f"msg_{head.call_id}", "type": "message", "role": "assistant", "model": head.request.model}


def _ending(choice: Choice) -> Json:
    reason = "stop_sequence" if choice.stopped_by is not None else _STOP_REASONS[choice.finish]
    return {"stop_reason": reason, "stop_sequence": choice.stopped_by}


def _usage(reply: Reply) -> Json:
    return {"input_tokens": reply.head.prompt_tokens, "output_tokens": reply.completion_tokens} | _CACHE


def _tool_use(call: ToolCall, arguments: Json) -> Json:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}
