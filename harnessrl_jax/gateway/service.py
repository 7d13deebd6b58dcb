"""A chat request of an open rollout -> a reply whose calls are on disk. Knows no HTTP."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from harnessrl_jax.errors import SamplerError, StoreError
from harnessrl_jax.gateway.capture import Envelope, Place, Reader
from harnessrl_jax.gateway.chat import ChatRequest, Choice, Reply
from harnessrl_jax.gateway.conversation import Prompt, Turn, build_prompt
from harnessrl_jax.gateway.identity import CallName, name_call
from harnessrl_jax.gateway.refusal import Refusal
from harnessrl_jax.gateway.registry import OpenRollout
from harnessrl_jax.gateway.rows import CallKey, Intent
from harnessrl_jax.gateway.store import Store
from harnessrl_jax.gateway.text import TextCodec
from harnessrl_jax.sampler.protocol import Sample, Sampler, SampleRequest
from harnessrl_jax.trajectories.records import Call


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPolicy:
    """How the trainer wants calls sampled; what a request asks for is noted, not followed.

    Attributes:
      temperature: softmax temperature; 0 takes the most probable token.
      top_p: nucleus mass in (0, 1].
      top_k: candidates kept; 0 keeps all.
      max_new_tokens: limit of one call; a smaller one in the request wins.
      context_tokens: prompt and output of one call together.
    """

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    context_tokens: int


class Answer(NamedTuple):
    """A reply that may be sent: its calls are on disk. `Gateway.settle` must follow."""

    reply: Reply
    keys: tuple[CallKey, ...]


class Gateway:
    """Renders, samples, parses and stores; one per process, used on one event loop.

    Args:
      store: where calls go.
      sampler: what answers.
      codec: the model's tokenizer and template.
      policy: how calls are sampled.
      run_seed: the run's seed, from which the seed of each call follows.
      clock: seconds since the epoch.
    """

    def __init__(
        self,
        *,
        store: Store,
        sampler: Sampler,
        codec: TextCodec,
        policy: SamplingPolicy,
        run_seed: int,
        clock: Callable[[], float],
    ) -> None:
        self.clock = clock
        self._store = store
        self._sampler = sampler
        self._codec = codec
        self._policy = policy
        self._run_seed = run_seed
        self._reader = Reader(codec)

    async def answer(self, rollout: OpenRollout, envelope: Envelope, request: ChatRequest) -> Answer:
        """Samples a reply and stores it.

        Raises:
          Refusal: the prompt leaves no room, the rollout has used its calls or was closed, or the sampler failed.
          StoreError: the calls could not be stored, so nothing may be sent.
          TextError: the template refuses the messages.
        """
        prompt = build_prompt(self._codec, rollout.turns, envelope.session_id, request.messages, request.tools)
        room = self._room(rollout, request, len(prompt.ids))
        if rollout.sampled + request.n > rollout.limits.max_calls:
            raise Refusal(
                f"This rollout has used all its {rollout.limits.max_calls} model calls. Stop the harness, or open the "
                "rollout with a higher limit.",
                status=429,
                code="rollout_call_limit",
            )
        seq = rollout.requests
        rollout.requests += 1
        rollout.sampled += request.n
        rollout.counts.update([f"rewrite/{reason}" for reason in prompt.rewrites])
        ids = np.array(prompt.ids, np.int32)
        names = self._names(rollout, envelope.session_id, ids, request.n)
        keys = tuple(CallKey(rollout.rollout_id, rollout.attempt, rollout.life, name.call_id) for name in names)
        intents = [Intent(key, rollout.group_id, seq, choice, ids, envelope.body) for choice, key in enumerate(keys)]
        self._store.intend(intents, _notes(request, prompt, room))
        try:
            samples = await self._sample(prompt.ids, names, room)
            finished_s = self.clock()
            calls = [
                self._reader.read(rollout, envelope, Place(seq, choice, ids, name, finished_s), sample)
                for choice, (name, sample) in enumerate(zip(names, samples, strict=True))
            ]
        except BaseException as error:
            # Cancelled or broken, an intent must not look as if its process had died.
            self._store.settle(keys, "failed", f"{type(error).__name__}: {error}")
            rollout.counts["failed"] += len(keys)
            raise
        await self._commit(rollout, [call for call, _ in calls])
        return self._answer(rollout, envelope, request, prompt, calls, keys)

    def settle(self, rollout: OpenRollout, answer: Answer, delivered: bool) -> None:
        """Notes whether the reply went out whole. Exactly once per answer."""
        self._store.settle(answer.keys, "delivered" if delivered else "undelivered")
        rollout.counts["delivered" if delivered else "undelivered"] += len(answer.keys)
        rollout.end_reply()

    def _room(self, rollout: OpenRollout, request: ChatRequest, prompt_tokens: int) -> int:
        """How many tokens may be sampled."""
        left = self._policy.context_tokens - prompt_tokens
        if left < 1:
            raise Refusal(
                f"This model's maximum context length is {self._policy.context_tokens} tokens; the messages and tools "
                f"take {prompt_tokens}, which leaves no room for a reply. Shorten the conversation.",
                status=400,
                code="context_length_exceeded",
                param="messages",
            )
        limits = (left, self._policy.max_new_tokens, rollout.limits.max_new_tokens, request.max_tokens)
        return min(limit for limit in limits if limit is not None)

    def _names(self, rollout: OpenRollout, session_id: str, ids: Int32[np.ndarray, " p"], n: int) -> list[CallName]:
        same = (session_id, ids.tobytes())
        repetition = rollout.repetitions[same]
        rollout.repetitions[same] += 1
        where = (self._run_seed, rollout.rollout_id, rollout.attempt, session_id, ids, repetition)
        return [name_call(*where, choice) for choice in range(n)]

    async def _sample(self, ids: list[int], names: Sequence[CallName], room: int) -> list[Sample]:
        requests = [
            SampleRequest(
                prompt_ids=tuple(ids),
                max_new_tokens=room,
                temperature=self._policy.temperature,
                top_p=self._policy.top_p,
                top_k=self._policy.top_k,
                seed=name.seed,
                stop_ids=self._codec.stop_ids,
                request_id=name.call_id,
            )
            for name in names
        ]
        failure: BaseException
        try:
            if len(requests) == 1:
                return [await self._sampler.complete(requests[0])]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._sampler.complete(request)) for request in requests]
            return [task.result() for task in tasks]
        except* SamplerError as errors:
            failure = errors.exceptions[0]
        # Outside the block, where an exception would be wrapped in a group.
        raise Refusal(
            f"The model cannot answer: {failure} Try again; if it stays so, look at the log of the run.",
            status=503,
            code="sampler_failed",
            retry=True,
        ) from failure

    async def _commit(self, rollout: OpenRollout, calls: list[Call]) -> None:
        """Puts sampled calls on disk; from here on the rollout waits for the reply to be settled."""
        if not rollout.begin_reply():
            rollout.counts["late"] += len(calls)
            await self._store.sampled(rollout.life, calls, "late")
            raise closed(rollout)
        try:
            await self._store.sampled(rollout.life, calls)
        except (StoreError, asyncio.CancelledError):
            rollout.end_reply()
            raise

    def _answer(
        self,
        rollout: OpenRollout,
        envelope: Envelope,
        request: ChatRequest,
        prompt: Prompt,
        calls: list[tuple[Call, Choice]],
        keys: tuple[CallKey, ...],
    ) -> Answer:
        for call, choice in calls:
            rollout.turns.add(
                Turn(
                    call_id=call.call_id,
                    session_id=envelope.session_id,
                    prompt_ids=tuple(prompt.ids),
                    output_ids=tuple(call.output_ids.tolist()),
                    content=choice.content or "",
                    tool_calls=call.tool_calls,
                )
            )
            rollout.counts.update(["calls", f"finish/{call.finish}", f"parse/{call.parse_status}"])
        reply = Reply(
            id=f"chatcmpl-{keys[0].call_id}",
            created=int(envelope.started_s),
            model=request.model,
            choices=[choice for _, choice in calls],
            prompt_tokens=len(prompt.ids),
            completion_tokens=sum(len(call.output_ids) for call, _ in calls),
        )
        return Answer(reply, keys)


def closed(rollout: OpenRollout) -> Refusal:
    """What a harness hears that goes on after its rollout was closed."""
    return Refusal(
        f"Rollout {rollout.rollout_id!r}, attempt {rollout.attempt}, is closed; its calls are frozen. End the harness "
        "before its rollout is closed.",
        status=409,
        code="rollout_closed",
    )


def _notes(request: ChatRequest, prompt: Prompt, room: int) -> dict[str, Any]:
    return {
        "max_new_tokens": room,
        "max_tokens_asked": request.max_tokens,
        "asked": request.asked,
        "stream": request.stream,
        "spliced": prompt.spliced,
        "rewrites": prompt.rewrites,
    }
