"""A sample and the request it answers -> the record of the call, and the turn as the harness sees it. Pure."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32

from harnessrl_jax.errors import RecordError
from harnessrl_jax.gateway.exchange import Choice, Json, Request, TokenLogp
from harnessrl_jax.gateway.identity import CallName
from harnessrl_jax.gateway.live import Live
from harnessrl_jax.gateway.logprobs import message_tokens, token_logps
from harnessrl_jax.gateway.registry import OpenRollout
from harnessrl_jax.gateway.rows import digest
from harnessrl_jax.gateway.text import TextCodec
from harnessrl_jax.gateway.visible import THINK, Stop, cut_at_stop, reasoning_tokens, split
from harnessrl_jax.sampler.protocol import Sample
from harnessrl_jax.trajectories.records import Call, Finish, LogpKind, ToolCall
from harnessrl_jax.trajectories.roles import OutputRoles, assign_roles

# The first tokens of a turn, among which the one that opens its reasoning must be.
_OPENING = 8


class Envelope(NamedTuple):
    """What a request says outside its fields."""

    agent: str
    session_id: str
    seed_name: str
    """The conversation as far as seeds depend on it: nothing that a harness draws by chance."""
    opened_by: str | None
    """The tool call that opened the session, as the harness says."""
    retry: bool
    headers: Mapping[str, str]
    """Those by which harnesses name sessions and agents."""
    body: str
    started_s: float


class Place(NamedTuple):
    """Where a call stands in its rollout, and when it was sampled."""

    seq: int
    choice: int
    prompt_ids: Int32[np.ndarray, " p"]
    name: CallName
    finished_s: float


class Captured(NamedTuple):
    """A call, and the turn that the harness sees of it."""

    call: Call
    choice: Choice
    reasoning_tokens: int


class Reader:
    """Reads samples with one model's tokenizer, by the parser that also labels tokens for training."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._format = codec.tool_format
        self._think = codec.tags(THINK)

    def read(
        self, rollout: OpenRollout, envelope: Envelope, request: Request, place: Place, sample: Sample
    ) -> Captured:
        """The record and the visible turn of one sample.

        Malformed calls stay in the content, as they were sampled; a sample cut by its length makes no calls.

        Raises:
          RecordError: the sampler's arrays do not belong together.
          Refusal: log-probabilities are asked for that the sampler does not give.
        """
        sample, stop = cut_at_stop(sample, self._codec.decode, request.stop)
        output = sample.output_ids.tolist()
        if not output or len(sample.versions) != len(output):
            raise RecordError(
                f"Call {place.name.call_id}: the sampler returned {len(output)} tokens and {len(sample.versions)} "
                "versions; one version for each token is wanted, and at least an end of turn."
            )
        roles = self.roles(output, sample.finish, request.tools)
        found = roles.parsed.calls if request.calls else ()
        tools = tuple(
            ToolCall(id=place.name.tool_call(at), name=block.name, arguments=block.arguments)
            for at, block in enumerate(found)
        )
        finish = "length" if sample.finish == "length" else "tool_calls" if tools else "stop"
        call = _record(rollout, envelope, request, place, sample, roles, tools, finish)
        thinking = self.opened(place.prompt_ids.tolist()) or self.thinks(output)
        shown = roles.parsed.content if request.calls else self._codec.decode(self._said(output))
        text = split(_without_stop(shown, stop), thinking=thinking)
        reasoning = reasoning_tokens(output, self._codec.decode, thinking=thinking)
        logprobs: tuple[TokenLogp, ...] = ()
        if request.logprobs:
            message = message_tokens(output, self._codec.decode, roles, reasoning=reasoning, calls=request.calls)
            logprobs = token_logps(sample, self._codec.bytes_of, message)
        choice = Choice(
            content=text.content or (None if tools else ""),
            tool_calls=tools,
            finish=finish,
            reasoning=text.reasoning,
            stopped_by=None if stop is None else stop.text,
            logprobs=logprobs,
        )
        return Captured(call, choice, reasoning)

    def roles(self, output_ids: Sequence[int], finish: Finish, tools: Sequence[Json] = ()) -> OutputRoles:
        """What the parser says of sampled ids; the end of turn is not part of the text."""
        return assign_roles(
            self._said(output_ids),
            self._codec.decode,
            self._format,
            finish=finish,
            control=self._codec.control,
            schemas={tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools},
        )

    def live(self, prompt_ids: Sequence[int], request: Request) -> Live:
        """Shows a turn of this request while it is sampled; nothing that a tool call may still take back."""
        return Live(
            self._codec.decode,
            self.thinks,
            opened=self.opened(prompt_ids),
            marks=[*request.stop, *(self._format.opening if request.calls and self._format.served else ())],
            stop_ids=self._codec.stop_ids,
        )

    def opened(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the prompt ends inside reasoning: some templates open it."""
        return self._codec.decode(prompt_ids[-_OPENING:]).rstrip().endswith(THINK)

    def thinks(self, output_ids: Sequence[int]) -> bool:
        """Whether the turn opens its reasoning itself, with the control token if there is one."""
        first = list(output_ids[:_OPENING])
        if self._think is not None and self._think.isdisjoint(first):
            return False
        return self._codec.decode(first).lstrip().startswith(THINK)

    def _said(self, output_ids: Sequence[int]) -> Sequence[int]:
        ended = bool(output_ids) and output_ids[-1] in self._codec.stop_ids
        return output_ids[:-1] if ended else output_ids


def _without_stop(content: str, stop: Stop | None) -> str:
    return content if stop is None else content.rstrip().removesuffix(stop.rest.strip())


def _record(
    rollout: OpenRollout,
    envelope: Envelope,
    request: Request,
    place: Place,
    sample: Sample,
    roles: OutputRoles,
    tools: tuple[ToolCall, ...],
    finish: Finish,
) -> Call:
    logps, kind = _behaviour(sample, constrained=request.constraint.asked or bool(request.banned))
    return Call(
        run_id=rollout.run_id,
        task_id=rollout.task_id,
        group_id=rollout.group_id,
        rollout_id=rollout.rollout_id,
        attempt=rollout.attempt,
        session_id=envelope.session_id,
        agent=envelope.agent,
        trainable=envelope.agent in rollout.trainable_agents,
        parent_call_id=rollout.turns.opener(envelope.opened_by) if envelope.opened_by else None,
        call_id=place.name.call_id,
        seq=place.seq,
        choice=place.choice,
        harness=rollout.harness,
        dialect=request.dialect,
        prompt_ids=place.prompt_ids,
        output_ids=sample.output_ids,
        logps=logps,
        logp_kind=kind,
        version_start=int(sample.versions[0]),
        version_end=int(sample.versions[-1]),
        finish=finish,
        parse_status=roles.parsed.status,
        tool_calls=tools,
        spans=roles.spans,
        delivered=False,
        request_digest=digest(envelope.body),
        retry=envelope.retry,
        request=envelope.body,
        started_s=envelope.started_s,
        finished_s=place.finished_s,
        headers=envelope.headers,
        experts=sample.experts,
    )


def _behaviour(sample: Sample, *, constrained: bool) -> tuple[Float32[np.ndarray, " o"] | None, LogpKind | None]:
    """The log-probabilities that are recorded.

    Under a grammar, or where tokens are forbidden, those of the whole vocabulary: what is left out belongs to the
    request, as the prompt does, and training computes no more than the model's own distribution.
    """
    kind = sample.logp_kind
    if not constrained or sample.logps is None or sample.survival is None or kind is None or kind.mode == "raw":
        return sample.logps, kind
    whole = np.minimum(sample.logps + np.log(sample.survival), 0.0)
    return whole, LogpKind(mode="processed", temperature=kind.temperature, top_p=1.0, top_k=0)
