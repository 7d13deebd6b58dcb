"""A sample and the request it answers -> the record of the call, and the turn as the harness sees it. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from harnessrl_jax.errors import RecordError
from harnessrl_jax.gateway.chat import DIALECT, Choice
from harnessrl_jax.gateway.identity import CallName
from harnessrl_jax.gateway.registry import OpenRollout
from harnessrl_jax.gateway.rows import digest
from harnessrl_jax.gateway.text import TextCodec
from harnessrl_jax.sampler.protocol import Sample
from harnessrl_jax.trajectories.records import Call, Finish, ToolCall
from harnessrl_jax.trajectories.roles import OutputRoles, assign_roles


class Envelope(NamedTuple):
    """What a request says outside its fields."""

    agent: str
    session_id: str
    opened_by: str | None
    """The tool call that opened the session, as the harness says."""
    retry: bool
    body: str
    started_s: float


class Place(NamedTuple):
    """Where a call stands in its rollout, and when it was sampled."""

    seq: int
    choice: int
    prompt_ids: Int32[np.ndarray, " p"]
    name: CallName
    finished_s: float


class Reader:
    """Reads samples with one model's tokenizer, by the parser that also labels tokens for training."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._format = codec.tool_format

    def read(self, rollout: OpenRollout, envelope: Envelope, place: Place, sample: Sample) -> tuple[Call, Choice]:
        """The record and the visible turn of one sample.

        Malformed calls stay in the content, as they were sampled; a sample cut by its length makes no calls.

        Raises:
          RecordError: the sampler's arrays do not belong together.
        """
        output = sample.output_ids.tolist()
        if not output or len(sample.versions) != len(output):
            raise RecordError(
                f"Call {place.name.call_id}: the sampler returned {len(output)} tokens and {len(sample.versions)} "
                "versions; one version for each token is wanted, and at least an end of turn."
            )
        roles = self.roles(output, sample.finish)
        tools = tuple(
            ToolCall(id=place.name.tool_call(at), name=block.name, arguments=block.arguments)
            for at, block in enumerate(roles.parsed.calls)
        )
        finish = "length" if sample.finish == "length" else "tool_calls" if tools else "stop"
        call = _record(rollout, envelope, place, sample, roles, tools, finish)
        return call, Choice(content=roles.parsed.content or (None if tools else ""), tool_calls=tools, finish=finish)

    def roles(self, output_ids: Sequence[int], finish: Finish) -> OutputRoles:
        """What the parser says of sampled ids; the end of turn is not part of the text."""
        ended = bool(output_ids) and output_ids[-1] in self._codec.stop_ids
        said = output_ids[:-1] if ended else output_ids
        return assign_roles(said, self._codec.decode, self._format, finish=finish, control=self._codec.control)


def _record(
    rollout: OpenRollout,
    envelope: Envelope,
    place: Place,
    sample: Sample,
    roles: OutputRoles,
    tools: tuple[ToolCall, ...],
    finish: Finish,
) -> Call:
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
        dialect=DIALECT,
        prompt_ids=place.prompt_ids,
        output_ids=sample.output_ids,
        logps=sample.logps,
        logp_kind=sample.logp_kind,
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
    )
