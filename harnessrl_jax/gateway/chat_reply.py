"""OpenAI chat completions: reply -> JSON or events. Pure."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from harnessrl_jax.errors import GatewayError
from harnessrl_jax.gateway.exchange import Choice, Head, Json, Kind, Reply, TokenLogp
from harnessrl_jax.gateway.fields import dump
from harnessrl_jax.gateway.logprobs import entry
from harnessrl_jax.gateway.refusal import Refusal, openai_error
from harnessrl_jax.gateway.sent import Sent
from harnessrl_jax.trajectories.records import ToolCall

_FIELDS = {"reasoning": "reasoning_content", "content": "content"}


def reply_json(reply: Reply) -> bytes:
    """The whole reply."""
    choices: list[Json] = []
    for index, choice in enumerate(reply.choices):
        message: Json = {"role": "assistant", "content": choice.content, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.tool_calls:
            message["tool_calls"] = [_tool_call(call) for call in choice.tool_calls]
        told = _logprobs(choice.logprobs)
        choices.append({"index": index, "message": message, "logprobs": told, "finish_reason": choice.finish})
    return dump(_envelope(reply.head, "chat.completion") | {"choices": choices, "usage": _usage(reply)})


class ChatEvents:
    """The same reply as `data:` lines of chunks, `[DONE]` last."""

    def __init__(self, head: Head) -> None:
        self._envelope = _envelope(head, "chat.completion.chunk")
        options = head.request.body.get("stream_options") or {}
        self._usage = bool(options.get("include_usage"))
        self._sent: dict[int, Sent] = {}
        self._told: defaultdict[int, list[TokenLogp]] = defaultdict(list)
        self._around: dict[tuple[int, Kind], tuple[bytes, bytes]] = {}

    def text(self, choice: int, kind: Kind, delta: str, logps: Sequence[TokenLogp] = ()) -> bytes:
        """A chunk with text and tokens; the first one of a choice names the role."""
        opening = b""
        if choice not in self._sent:
            self._sent[choice] = Sent()
            opening = self._delta(choice, {"role": "assistant", "content": ""})
        self._sent[choice].add(kind, delta)
        if logps:
            self._told[choice] += logps
            return opening + self._delta(choice, {_FIELDS[kind]: delta}, logprobs=_logprobs(logps))
        if (choice, kind) not in self._around:
            self._around[choice, kind] = self._frame(choice, kind)
        before, after = self._around[choice, kind]
        return opening + before + dump(delta) + after

    def end(self, reply: Reply) -> bytes:
        """What is left of each choice, its finish reason, the token counts if they were asked for."""
        out = [self._rest(index, choice) for index, choice in enumerate(reply.choices)]
        if self._usage:
            out.append(self._chunk([], usage=_usage(reply)))
        return b"".join([*out, b"data: [DONE]\n\n"])

    def fail(self, refusal: Refusal) -> bytes:
        """The error as a line of its own; no `[DONE]` follows, so that nobody takes the reply for whole."""
        return b"data: " + dump(openai_error(refusal)[0]) + b"\n\n"

    def _frame(self, choice: int, kind: Kind) -> tuple[bytes, bytes]:
        """What stands before and after the text in every chunk of this kind."""
        delta: Json = {_FIELDS[kind]: ""}
        # The text of another field cannot hold this: quotes inside of strings are escaped.
        before, empty, after = self._delta(choice, delta).partition(dump(delta)[1:-1])
        return before + empty[:-2], after

    def _rest(self, index: int, choice: Choice) -> bytes:
        out: list[bytes] = []
        if index not in self._sent:
            self._sent[index] = Sent()
            # Nothing of an empty turn would tell the client that there is a message.
            content = None if choice.tool_calls and not choice.content else ""
            out.append(self._delta(index, {"role": "assistant", "content": content}))
        out += [self._delta(index, {_FIELDS[kind]: delta}) for kind, delta in self._sent[index].rest(choice)]
        for position, call in enumerate(choice.tool_calls):
            named = {"index": position} | _tool_call(call)
            named["function"] = {"name": call.name, "arguments": ""}
            arguments = {"index": position, "function": {"arguments": call.arguments}}
            out += [self._delta(index, {"tool_calls": [part]}) for part in (named, arguments)]
        told = self._told[index]
        if [token[:2] for token in choice.logprobs[: len(told)]] != [token[:2] for token in told]:
            raise GatewayError(f"The stream has told {len(told)} tokens that the turn does not begin with.")
        if left := choice.logprobs[len(told) :]:
            out.append(self._delta(index, {}, logprobs=_logprobs(left)))
        return b"".join([*out, self._delta(index, {}, choice.finish)])

    def _delta(self, index: int, delta: Json, finish: str | None = None, logprobs: Json | None = None) -> bytes:
        more: Json = {"usage": None} if self._usage else {}
        return self._chunk([{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}], **more)

    def _chunk(self, choices: list[Json], **more: Any) -> bytes:
        return b"data: " + dump(self._envelope | {"choices": choices} | more) + b"\n\n"


def _envelope(head: Head, kind: str) -> Json:
    return {"id": f"chatcmpl-{head.call_id}", "object": kind, "created": head.created, "model": head.request.model}


def _logprobs(tokens: Sequence[TokenLogp]) -> Json | None:
    """Of sampled tokens; those of reasoning, calls and the end of turn were sampled too."""
    return {"content": [entry(token) for token in tokens], "refusal": None} if tokens else None


def _usage(reply: Reply) -> Json:
    read, written = reply.head.prompt_tokens, reply.completion_tokens
    usage: Json = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    if reply.reasoning_tokens:
        usage["completion_tokens_details"] = {"reasoning_tokens": reply.reasoning_tokens}
    return usage


def _tool_call(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
