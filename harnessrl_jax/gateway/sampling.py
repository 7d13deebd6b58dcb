"""What the trainer wants, what a request may have, prompt ids -> the sampler -> samples, with text on the way."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harnessrl_jax.errors import SamplerError, WishError
from harnessrl_jax.gateway.exchange import Head, Kind, Request
from harnessrl_jax.gateway.identity import CallName
from harnessrl_jax.gateway.live import Live
from harnessrl_jax.gateway.refusal import ContextOverflow, Refusal, bad_request
from harnessrl_jax.sampler.protocol import Sample, Sampler, SampleRequest

OnText = Callable[[Head, int, Kind, str], None]
"""Told text of a choice as soon as no further token can change it."""
OnTokens = Callable[[list[int]], None]


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
    listeners: Sequence[OnTokens | None],
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
            on_tokens=listener,
        )
        for name, listener in zip(names, listeners, strict=True)
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


def listener(live: Live, head: Head, choice: int, on_text: OnText) -> OnTokens:
    """From tokens in the sampler's thread to text on the event loop that asks. Call it on that loop.

    A loop that is behind is woken once for all tokens that wait. A sampler on the loop itself wakes nobody: its tokens
    are shown in the loop's next turn.
    """
    loop, own = asyncio.get_running_loop(), threading.get_ident()
    heard: deque[list[int]] = deque()
    woken = threading.Event()

    def show() -> None:
        # Before the ids are taken: those that come later wake the loop again.
        woken.clear()
        new: list[int] = []
        while heard:
            new += heard.popleft()
        if new:
            for kind, delta in live.feed(new):
                on_text(head, choice, kind, delta)

    def hear(new: list[int]) -> None:
        heard.append(new)
        if not woken.is_set():
            woken.set()
            # The loop ends before the sampler where the process stops; nobody is left to show anything to.
            with contextlib.suppress(RuntimeError):
                (loop.call_soon if threading.get_ident() == own else loop.call_soon_threadsafe)(show)

    return hear
