"""What one rollout may use up, and what it has used."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import NamedTuple

from harnessrl_jax.gateway.refusal import Refusal


class Limits(NamedTuple):
    """What one rollout may use up.

    What is over a limit of calls or tokens is refused, since no waiting helps; what is over the limit of concurrency
    waits, since refusing it would lose it.
    """

    max_calls: int = 64
    """Model calls; further ones are refused with 429. A request for n choices is n calls."""
    max_new_tokens: int | None = None
    """Sampled tokens of one call; None leaves it to the context."""
    max_tokens: int | None = None
    """Sampled tokens of all calls together. A call may sample what was left when it began, so that calls under way at
    the same time can pass the limit; once it is reached, further calls are refused with 429."""
    max_concurrent: int | None = None
    """Requests that are answered at the same time; further ones wait for their turn, in order of arrival."""


class Budget:
    """What a rollout has used. Belongs to the gateway's event loop.

    Attributes:
      limits: what it may use.
      requests: how many were let in.
      calls: how many were let in; a request for n choices is n of them.
      tokens: how many were sampled.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.requests = 0
        self.calls = 0
        self.tokens = 0
        self._lanes = None if limits.max_concurrent is None else asyncio.Semaphore(limits.max_concurrent)

    @property
    def full(self) -> bool:
        """Whether another request would have to wait."""
        return self._lanes is not None and self._lanes.locked()

    @contextlib.asynccontextmanager
    async def lane(self) -> AsyncIterator[None]:
        """Waits until few enough requests are under way, and is one of them inside."""
        if self._lanes is None:
            yield
            return
        async with self._lanes:
            yield

    def room(self, n: int) -> int | None:
        """How many tokens each of `n` calls may sample; None if the rollout does not limit them.

        Raises:
          Refusal: the rollout has used its tokens.
        """
        limits = self.limits
        if limits.max_tokens is None:
            return limits.max_new_tokens
        left = (limits.max_tokens - self.tokens) // n
        if left < 1:
            raise _used_up(f"all its {limits.max_tokens} sampled tokens", "rollout_token_limit")
        return left if limits.max_new_tokens is None else min(left, limits.max_new_tokens)

    def take(self, n: int) -> int:
        """Counts a request of `n` calls and returns its position in the rollout.

        Raises:
          Refusal: the rollout has used its calls.
        """
        if self.calls + n > self.limits.max_calls:
            raise _used_up(f"all its {self.limits.max_calls} model calls", "rollout_call_limit")
        self.requests += 1
        self.calls += n
        return self.requests - 1


def _used_up(what: str, code: str) -> Refusal:
    text = f"This rollout has used {what}. Stop the harness, or open the rollout with a higher limit."
    return Refusal(text, status=429, code=code)
