"""A model's tokenizer -> the token that completes a stop text, and the tokens that a grammar allows next. No JAX."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt32
from tokenizers import Tokenizer

from harnessrl_jax.errors import SamplerError
from harnessrl_jax.sampler.protocol import SampleRequest

BYTES = 4  # of one character in UTF-8, at most
SCHEMAS = "Constrained sampling needs the package `llguidance`: install it with `pip install 'harnessrl-jax[schemas]'`."


class Vocabulary:
    """What tokens mean, for requests that end at a text or follow a grammar.

    Args:
      tokenizer: the model's.
      size: the model's vocabulary, which may be larger than the tokenizer's.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self._tokenizer = tokenizer
        self._size = size
        self._guidance = functools.cache(self._load_guidance)

    def end_of(self, stops: Sequence[str]) -> Callable[[list[int], int], int | None]:
        """Finds where a stop text ends, whatever tokens it is spread over.

        Args:
          stops: texts, none empty.

        Returns:
          `(ids, before) -> number of ids` up to the first that completes a stop text among those after the first
          `before`, or None. It decodes only as many tokens as a stop text can have.
        """
        reach = BYTES * max(map(len, stops))

        def find(ids: list[int], before: int) -> int | None:
            start = max(0, before - reach)
            complete = lambda end: any(stop in self.decode(ids[start:end]) for stop in stops)
            if not complete(len(ids)):
                return None
            return next(end for end in range(before + 1, len(ids) + 1) if complete(end))

        return find

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens spelled out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def guide(self, request: SampleRequest) -> "GrammarGuide":
        """A guide for the request's grammar.

        Raises:
          SamplerError: `llguidance` is missing, or the grammar cannot be used.
        """
        tokens = self._guidance(request.stop_ids)
        matcher = import_llguidance().LLMatcher(tokens, request.grammar, log_level=0)
        return GrammarGuide(matcher, f"Request {request.request_id!r}")

    def _load_guidance(self, stop_ids: tuple[int, ...]) -> Any:
        """The tokenizer as `llguidance` knows it; a grammar ends with any of the stop ids."""
        text = self._tokenizer.to_str()
        return import_llguidance().LLTokenizer(text, n_vocab=self._size, eos_token=list(stop_ids))


class GrammarGuide:
    """One output under way, as `llguidance` follows it.

    Args:
      matcher: an LLMatcher.
      name: of the request, for errors.
    """

    def __init__(self, matcher: Any, name: str) -> None:
        self._matcher, self._name = matcher, name
        self._check()

    def words(self) -> UInt32[np.ndarray, " word"]:
        """The tokens that may come next, the lowest bit of the first word being token 0."""
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32).copy()
        self._check()
        return words

    def accept(self, token: int) -> None:
        """Goes on after this token."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise SamplerError(
                f"{self._name}: the grammar cannot be followed: {self._matcher.get_error().strip()}. Simplify it."
            )


def import_llguidance() -> Any:
    """The package. Raises SamplerError if it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise SamplerError(SCHEMAS) from error
    return llguidance
