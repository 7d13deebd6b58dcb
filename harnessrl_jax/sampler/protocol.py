"""Token ids in, sampled token ids out: what every sampler promises, and the plain values that cross. No JAX here."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from jaxtyping import Float, Int32

from harnessrl_jax.errors import SamplerError
from harnessrl_jax.trajectories.records import LogpKind


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One model call. The sampled tokens depend on nothing but these values and the weights.

    Raises:
      SamplerError: a value no sampler can use.
    """

    prompt_ids: tuple[int, ...]
    """Everything the model reads, at least one token."""
    max_new_tokens: int
    """At least 1. Together with the prompt it must fit the sampler's context: the caller clamps."""
    temperature: float = 1.0
    """0 takes the most probable token."""
    top_p: float = 1.0
    """Keeps the fewest tokens that reach this probability, in (0, 1]; 1 keeps all."""
    top_k: int = 0
    """Keeps this many most probable tokens, before `top_p`; 0 keeps all."""
    seed: int = 0
    """In [0, 2**64). Equal requests with equal seeds give equal tokens."""
    stop_ids: tuple[int, ...] = ()
    """Sampling ends after any of these; it is part of the output."""
    request_id: str = ""
    """For messages only."""
    on_tokens: Callable[[list[int]], None] | None = field(default=None, compare=False, repr=False)
    """Told the ids as they are sampled, in order, before the answer, from any thread; must return at once. A sampler
    that learns of them only at the end need not call it."""

    def __post_init__(self) -> None:
        """Refuses impossible values."""
        name = f"Request {self.request_id!r}: "
        if not self.prompt_ids:
            raise SamplerError(f"{name}the prompt is empty; a sampler needs at least one token to continue.")
        if min(self.prompt_ids) < 0 or min(self.stop_ids, default=0) < 0:
            raise SamplerError(f"{name}a token id is negative; ids are 0 or more.")
        if self.max_new_tokens < 1:
            raise SamplerError(f"{name}max_new_tokens is {self.max_new_tokens}; ask for at least 1.")
        if not 0.0 <= self.temperature < float("inf"):
            raise SamplerError(f"{name}temperature is {self.temperature}; give 0 (greedy) or a positive number.")
        if not 0.0 < self.top_p <= 1.0:
            raise SamplerError(f"{name}top_p is {self.top_p}; it must be in (0, 1], and 1 keeps every token.")
        if self.top_k < 0:
            raise SamplerError(f"{name}top_k is {self.top_k}; it must be 0 or more, and 0 keeps every token.")
        if not 0 <= self.seed < 2**64:
            raise SamplerError(f"{name}seed is {self.seed}; it must be in [0, 2**64).")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The answer to one request. Per-token fields have one entry per output token; absent is None, never zero."""

    output_ids: Int32[np.ndarray, " out"]
    logps: Float[np.ndarray, " out"] | None
    """Log-probability in nats under the distribution that `logp_kind` describes."""
    logp_kind: LogpKind | None
    versions: Int32[np.ndarray, " out"]
    """Version of the weights that sampled each token."""
    finish: Literal["stop", "length"]
    """`stop`: the last token is a stop id. `length`: max_new_tokens were sampled."""
    raw_logps: Float[np.ndarray, " out"] | None = None
    """Log-probability under the model itself: temperature 1, every token kept."""
    survival: Float[np.ndarray, " out"] | None = None
    """Probability, at the request's temperature, of the tokens that top_p and top_k kept, in (0, 1]. With it
    `logps + log(survival)` is the log-probability at that temperature over the whole vocabulary."""


class Sampler(Protocol):
    """Serves requests concurrently. Errors are SamplerError."""

    async def start(self) -> None:
        """Takes whatever serving needs; returns when requests can be served."""
        ...

    async def complete(self, request: SampleRequest) -> Sample:
        """Samples until a stop id or the length limit. Cancelling the call frees what it held."""
        ...

    def load_weights(self, params: Any, version: int) -> None:
        """Serves with these weights from now on; requests under way go on with them. May be called from any thread."""
        ...

    async def close(self) -> None:
        """Fails what is pending and gives everything back. Idempotent."""
        ...
