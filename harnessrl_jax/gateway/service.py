"""A request of an open rollout -> a reply whose calls are on disk. Knows no HTTP."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from harnessrl_jax.errors import StoreError
from harnessrl_jax.gateway.capture import Captured, Envelope, Place, Reader
from harnessrl_jax.gateway.conversation import Prompt, build_prompt
from harnessrl_jax.gateway.exchange import Head, Reply, Request
from harnessrl_jax.gateway.grammar import Grammars
from harnessrl_jax.gateway.identity import CallName, call_of, name_call
from harnessrl_jax.gateway.logprobs import refuse_unknown
from harnessrl_jax.gateway.refusal import Refusal, bad_request
from harnessrl_jax.gateway.registry import OpenRollout
from harnessrl_jax.gateway.rows import CallKey, Intent
from harnessrl_jax.gateway.sampling import Ears, OnText, SamplingPolicy, listener, room_for, sample_all, sample_requests
from harnessrl_jax.gateway.store import Store
from harnessrl_jax.gateway.text import TextCodec
from harnessrl_jax.gateway.turns import Message, Turn, echo_of
from harnessrl_jax.gateway.writer import Writes
from harnessrl_jax.sampler.protocol import Sample, Sampler
from harnessrl_jax.trajectories.records import Call


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
        self.policy = policy
        self._run_seed = run_seed
        self._reader = Reader(codec)
        self._grammars = Grammars(codec.tool_format, codec.control)

    @property
    def writes(self) -> Writes:
        """How calls got on disk."""
        return self._store.writer.writes

    async def answer(
        self, rollout: OpenRollout, envelope: Envelope, request: Request, on_text: OnText | None = None
    ) -> Answer:
        """Samples a reply and stores it.

        Args:
          rollout: who asks.
          envelope: what the request says outside its fields.
          request: what is asked.
          on_text: told the text of each choice as it is sampled, as far as nothing can change it any more.

        Raises:
          Refusal: the prompt leaves no room, the form that is asked for cannot be enforced, the rollout has used its
            budget or was closed, or the sampler failed.
          StoreError: the calls could not be stored, so nothing may be sent.
          TextError: the template refuses the messages.
        """
        if rollout.budget.full:
            rollout.count("waited")
        async with rollout.budget.lane():
            if rollout.closed:
                rollout.count("late")
                raise closed(rollout)
            return await self._answer(rollout, envelope, request, on_text)

    async def _answer(
        self, rollout: OpenRollout, envelope: Envelope, request: Request, on_text: OnText | None
    ) -> Answer:
        messages = self._messages(rollout, request)
        prompt = build_prompt(self._codec, rollout.turns, envelope.session_id, messages, request.tools)
        refuse_unknown(request, self._codec.bytes_of)
        room = room_for(self.policy, request, len(prompt.ids), rollout.budget.room(request.n))
        grammar = self._grammars.of(request.constraint, request.tools, opened=self._reader.opened(prompt.ids))
        seq = rollout.budget.take(request.n)
        for reason in prompt.rewrites:
            rollout.count(f"rewrite/{reason}")
        ids = np.array(prompt.ids, np.int32)
        names = self._names(rollout, envelope.seed_name, ids, request.n)
        keys = tuple(CallKey(rollout.rollout_id, rollout.attempt, rollout.life, name.call_id) for name in names)
        intents = [Intent(key, rollout.group_id, seq, choice, ids, envelope.body) for choice, key in enumerate(keys)]
        self._store.intend(intents, _notes(request, prompt, room))
        head = Head(
            request=request, call_id=names[0].call_id, created=int(envelope.started_s), prompt_tokens=len(prompt.ids)
        )
        try:
            samples = await self._sample(head, prompt.ids, names, room, grammar, on_text)
            finished_s = self.clock()
            captured = [
                self._reader.read(rollout, envelope, request, Place(seq, choice, ids, name, finished_s), sample)
                for choice, (name, sample) in enumerate(zip(names, samples, strict=True))
            ]
        except BaseException as error:
            # Cancelled or broken, an intent must not look as if its process had died.
            self._store.settle(keys, "failed", f"{type(error).__name__}: {error}")
            rollout.count("failed", len(keys))
            raise
        rollout.spend(sum(len(sample.output_ids) for sample in samples))
        await self._commit(rollout, [one.call for one in captured])
        _remember(rollout, messages, head, captured)
        return Answer(_reply(head, captured), keys)

    def count(self, rollout: OpenRollout, envelope: Envelope, request: Request) -> int:
        """How many tokens the model would read for this request; nothing is sampled or stored.

        Raises:
          Refusal: it goes on from a reply that is not known here.
          TextError: the template refuses the messages.
        """
        messages = self._messages(rollout, request)
        return len(build_prompt(self._codec, rollout.turns, envelope.session_id, messages, request.tools).ids)

    def settle(self, rollout: OpenRollout, answer: Answer, delivered: bool) -> None:
        """Notes whether the reply went out whole. Exactly once per answer."""
        self._store.settle(answer.keys, "delivered" if delivered else "undelivered")
        rollout.count("delivered" if delivered else "undelivered", len(answer.keys))
        rollout.end_reply()

    def _messages(self, rollout: OpenRollout, request: Request) -> Sequence[Message]:
        """The whole conversation, also where the request only names the reply that it goes on from."""
        if request.previous is None:
            return request.messages
        before = rollout.turns.conversation(call_of(request.previous) or "")
        if before is None:
            raise bad_request(
                f"previous_response_id {request.previous!r} is no reply of this attempt that was stored. Send the "
                "conversation as input.",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        return [*request.messages[: request.lead], *before, *request.messages[request.lead :]]

    def _names(self, rollout: OpenRollout, seed_name: str, ids: Int32[np.ndarray, " p"], n: int) -> list[CallName]:
        same = (seed_name, ids.tobytes())
        repetition = rollout.repetitions[same]
        rollout.repetitions[same] += 1
        where = (self._run_seed, rollout.rollout_id, rollout.attempt, seed_name, ids, repetition)
        return [name_call(*where, choice) for choice in range(n)]

    async def _sample(
        self, head: Head, ids: list[int], names: Sequence[CallName], room: int, grammar: str, on_text: OnText | None
    ) -> list[Sample]:
        wanted = self._codec.bytes_of if head.request.logprobs else None
        live = lambda: self._reader.live(ids, head.request)
        listeners = [
            Ears() if on_text is None else listener(live(), head, choice, on_text, wanted)
            for choice in range(len(names))
        ]
        stop_ids = self._codec.stop_ids
        requests = sample_requests(self.policy, head.request, ids, names, room, stop_ids, grammar, listeners)
        return await sample_all(self._sampler, requests)

    async def _commit(self, rollout: OpenRollout, calls: list[Call]) -> None:
        """Puts sampled calls on disk; from here on the rollout waits for the reply to be settled."""
        if not rollout.begin_reply():
            rollout.count("late", len(calls))
            await self._store.sampled(rollout.life, calls, "late")
            raise closed(rollout)
        try:
            await self._store.sampled(rollout.life, calls)
        except (StoreError, asyncio.CancelledError):
            rollout.end_reply()
            raise


def closed(rollout: OpenRollout) -> Refusal:
    """What a harness hears that goes on after its rollout was closed."""
    return Refusal(
        f"Rollout {rollout.rollout_id!r}, attempt {rollout.attempt}, is closed; its calls are frozen. End the harness "
        "before its rollout is closed.",
        status=409,
        code="rollout_closed",
    )


def _remember(rollout: OpenRollout, messages: Sequence[Message], head: Head, captured: Sequence[Captured]) -> None:
    """Makes the turns known, before the harness can echo them."""
    for call, choice, _ in captured:
        turn = Turn(
            call_id=call.call_id,
            session_id=call.session_id,
            prompt_ids=tuple(call.prompt_ids.tolist()),
            output_ids=tuple(call.output_ids.tolist()),
            content=choice.content or "",
            tool_calls=choice.tool_calls,
            reasoning=choice.reasoning,
            stopped_by=choice.stopped_by,
        )
        rollout.turns.add(turn)
        for event in ("calls", f"finish/{call.finish}", f"parse/{call.parse_status}"):
            rollout.count(event)
        if head.request.resumable:
            rollout.turns.keep(call.call_id, [*messages[head.request.lead :], echo_of(turn)])


def _reply(head: Head, captured: Sequence[Captured]) -> Reply:
    return Reply(
        head=head,
        choices=[one.choice for one in captured],
        completion_tokens=sum(len(one.call.output_ids) for one in captured),
        reasoning_tokens=sum(one.reasoning_tokens for one in captured),
    )


def _notes(request: Request, prompt: Prompt, room: int) -> dict[str, Any]:
    """What is kept next to a call: how its prompt came about, and what of its request was not followed."""
    return {
        "max_new_tokens": room,
        "max_tokens_asked": request.max_tokens,
        "asked": request.asked,
        "ignored": request.ignored,
        "normalised": request.normalised,
        "stream": request.stream,
        "spliced": prompt.spliced,
        "rewrites": prompt.rewrites,
    }
