"""Token ids in, sampled token ids out: what every sampler promises, and the plain values that cross. No JAX here."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from jaxtyping import Float, Int32, UInt8

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
    """Keeps this many most probable tokens, before `min_p` and `top_p`; 0 keeps all."""
    min_p: float = 0.0
    """Keeps tokens of at least this share of the highest probability, in [0, 1), before `top_p`; 0 keeps all."""
    seed: int = 0
    """In [0, 2**64). Equal requests with equal seeds give equal tokens."""
    stop_ids: tuple[int, ...] = ()
    """Sampling ends after any of these; it is part of the output."""
    stop: tuple[str, ...] = ()
    """Sampling ends after the token that completes any of these texts; its tokens are part of the output."""
    banned_ids: tuple[int, ...] = ()
    """Never sampled."""
    grammar: str = ""
    """What the whole output has to be, in the Lark notation of `llguidance`; "" leaves it free. One of `stop_ids` ends
    it where the grammar does."""
    request_id: str = ""
    """For messages only."""
    on_tokens: Callable[[list[int]], None] | None = field(default=None, compare=False, repr=False)
    """Told the ids as they are sampled, in order, before the answer, from any thread; must return at once. A sampler
    that learns of them only at the end need not call it."""
    on_logps: Callable[[list[float]], None] | None = field(default=None, compare=False, repr=False)
    """Told the log-probability of each of these tokens under the model itself, in nats, right before `on_tokens`; by a
    sampler that knows it by then."""

    def __post_init__(self) -> None:
        """Refuses impossible values."""
        name = f"Request {self.request_id!r}: "
        if not self.prompt_ids:
            raise SamplerError(f"{name}the prompt is empty; a sampler needs at least one token to continue.")
        if min((*self.prompt_ids, *self.stop_ids, *self.banned_ids)) < 0:
            raise SamplerError(f"{name}a token id is negative; ids are 0 or more.")
        if self.max_new_tokens < 1:
            raise SamplerError(f"{name}max_new_tokens is {self.max_new_tokens}; ask for at least 1.")
        if not 0.0 <= self.temperature < float("inf"):
            raise SamplerError(f"{name}temperature is {self.temperature}; give 0 (greedy) or a positive number.")
        if not 0.0 < self.top_p <= 1.0:
            raise SamplerError(f"{name}top_p is {self.top_p}; it must be in (0, 1], and 1 keeps every token.")
        if self.top_k < 0:
            raise SamplerError(f"{name}top_k is {self.top_k}; it must be 0 or more, and 0 keeps every token.")
        if not 0.0 <= self.min_p < 1.0:
            raise SamplerError(f"{name}min_p is {self.min_p}; it must be in [0, 1), and 0 keeps every token.")
        if "" in self.stop:
            raise SamplerError(f"{name}a stop text is empty; leave it out.")
        if self.grammar and not self.stop_ids:
            raise SamplerError(f"{name}a grammar ends with a stop id, and there is none; give at least one.")
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
    """`stop`: the last token is a stop id or completes a stop text. `length`: max_new_tokens were sampled."""
    raw_logps: Float[np.ndarray, " out"] | None = None
    """Log-probability under the model itself: temperature 1, every token kept."""
    survival: Float[np.ndarray, " out"] | None = None
    """Probability, at the request's temperature (1 where that is 0), of the tokens that could be sampled: those that
    the grammar, banned_ids, top_k, min_p and top_p left; in (0, 1]. With it `logps + log(survival)` is the
    log-probability at that temperature over the whole vocabulary, except where greedy."""
    experts: UInt8[np.ndarray, "token layer active"] | None = None
    """Of a mixture: the experts that every token it read went to in each layer, those of the prompt, then those of
    `output_ids` but the last."""


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
