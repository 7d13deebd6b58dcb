"""What the trainer wants, what a request may have, prompt ids -> the sampler -> samples, with text on the way."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from harnessrl_jax.errors import SamplerError, WishError
from harnessrl_jax.gateway.exchange import Head, Kind, Request, TokenLogp
from harnessrl_jax.gateway.identity import CallName
from harnessrl_jax.gateway.live import Live
from harnessrl_jax.gateway.refusal import ContextOverflow, Refusal, bad_request
from harnessrl_jax.sampler.protocol import Sample, Sampler, SampleRequest

OnText = Callable[[Head, int, Kind, str, tuple[TokenLogp, ...]], None]
"""Told text of a choice as soon as no further token can change it, and tokens as far as they are wanted."""


class Ears(NamedTuple):
    """What a sampler calls while it samples a choice."""

    tokens: Callable[[list[int]], None] | None = None
    logps: Callable[[list[float]], None] | None = None


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


def room_for(policy: SamplingPolicy, request: Request, prompt_tokens: int, rollout_limit: int | None) -> int:
    """How many tokens may be sampled: the smallest of all limits.

    Args:
      policy: the trainer's limits.
      request: holds the client's limit.
      prompt_tokens: what the prompt takes of the context.
      rollout_limit: the rollout's limit, or None.

    Raises:
      ContextOverflow: the prompt leaves no room.
    """
    left = policy.context_tokens - prompt_tokens
    if left < 1:
        raise ContextOverflow(prompt_tokens, policy.context_tokens)
    limits = (left, policy.max_new_tokens, rollout_limit, request.max_tokens)
    return min(limit for limit in limits if limit is not None)


def sample_requests(
    policy: SamplingPolicy,
    request: Request,
    ids: Sequence[int],
    names: Sequence[CallName],
    room: int,
    stop_ids: tuple[int, ...],
    grammar: str,
    listeners: Sequence[Ears],
) -> list[SampleRequest]:
    """One request for each choice; they differ in their seeds only."""
    return [
        SampleRequest(
            prompt_ids=tuple(ids),
            max_new_tokens=room,
            temperature=policy.temperature,
            top_p=policy.top_p,
            top_k=policy.top_k,
            seed=name.seed,
            stop_ids=stop_ids,
            stop=request.stop,
            banned_ids=request.banned,
            grammar=grammar,
            request_id=name.call_id,
            on_tokens=ears.tokens,
            on_logps=ears.logps,
        )
        for name, ears in zip(names, listeners, strict=True)
    ]


async def sample_all(sampler: Sampler, requests: Sequence[SampleRequest]) -> list[Sample]:
    """Samples all choices at once; if one fails, all do.

    Raises:
      Refusal: the sampler failed.
    """
    failure: BaseException
    try:
        if len(requests) == 1:
            return [await sampler.complete(requests[0])]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(sampler.complete(request)) for request in requests]
        return [task.result() for task in tasks]
    except* SamplerError as errors:
        failure = errors.exceptions[0]
    # Outside the block, where an exception would be wrapped in a group.
    if isinstance(failure, WishError):
        raise bad_request(f"{failure}", code="not_served") from failure
    raise Refusal(
        f"The model cannot answer: {failure} Try again; if it stays so, look at the log of the run.",
        status=503,
        code="sampler_failed",
        retry=True,
    ) from failure


def listener(
    live: Live, head: Head, choice: int, on_text: OnText, bytes_of: Callable[[int], bytes | None] | None = None
) -> Ears:
    """From tokens in the sampler's thread to text on the event loop that asks. Call it on that loop.

    A loop that is behind is woken once for all tokens that wait. A sampler on the loop itself wakes nobody: its tokens
    are shown in the loop's next turn.

    Args:
      live: finds out what can be shown.
      head: of the reply.
      choice: its number.
      on_text: told it.
      bytes_of: see `token_bytes.bytes_of`; None where log-probabilities are not wanted.
    """
    loop, own = asyncio.get_running_loop(), threading.get_ident()
    heard: deque[tuple[list[int], list[float]]] = deque()
    woken = threading.Event()
    untold: deque[TokenLogp] = deque()
    told = 0
    known: list[float] = []  # of the tokens that come next

    def show() -> None:
        nonlocal told
        # Before the ids are taken: those that come later wake the loop again.
        woken.clear()
        new: list[int] = []
        while heard:
            ids, logps = heard.popleft()
            new += ids
            if bytes_of is not None:
                untold.extend(TokenLogp(bytes_of(i) or b"", logp, False) for i, logp in zip(ids, logps, strict=False))
        for kind, delta in live.feed(new) if new else ():
            count = min(live.certain - told, len(untold))
            told += count
            on_text(head, choice, kind, delta, tuple(untold.popleft() for _ in range(count)))

    def hear(new: list[int]) -> None:
        heard.append((new, known[:]))
        known.clear()
        if not woken.is_set():
            woken.set()
            # The loop ends before the sampler where the process stops; nobody is left to show anything to.
            with contextlib.suppress(RuntimeError):
                (loop.call_soon if threading.get_ident() == own else loop.call_soon_threadsafe)(show)

    return Ears(hear, None if bytes_of is None else known.extend)
