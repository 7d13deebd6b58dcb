"""Requests and replies as lists of int32, for servers that carry nothing but token ids. NumPy only.

A request is `MARK`, a number of words, that many words of JSON with what is asked for, then the prompt. A reply has
`COLUMNS` numbers a token: its id, the bits of its log-probability, of its raw log-probability and of the survival, and
-1 - the version of the weights. None but the first can be taken for a token id, except the bits of the survival, which
are larger than any.

Weights and early ends travel beside them, as JSON to the methods `LOAD` and `END` of `SERVICE`.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from harnessrl_jax.errors import SamplerError, WishError
from harnessrl_jax.sampler.protocol import SampleRequest

MARK = -3
COLUMNS = 5
SIGN = -(2**31)
HEADER = 128
"""Words that a request may take besides its prompt."""
SERVICE, LOAD, END = "harnessrl_jax.Sampler", "Load", "End"
SENT = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop_ids", "request_id")
AT_HOME = ("prompt_ids", "stop", "on_tokens", "on_logps")
"""Sent otherwise, or done by whoever asks."""


class Asked(NamedTuple):
    """A request and the number under which it can be ended early; None where nobody will."""

    request: SampleRequest
    number: int | None


def encode(request: SampleRequest, number: int) -> list[int]:
    """The request as numbers.

    Raises:
      WishError: it asks for something that has no place in them.
    """
    name = f"Request {request.request_id!r}: "
    for field in dataclasses.fields(request):
        if field.name not in SENT + AT_HOME and getattr(request, field.name) != field.default:
            raise WishError(
                f"{name}this sampler has no {field.name}. Leave it out, or use the sampler in this process."
            )
    text = json.dumps({field: getattr(request, field) for field in SENT} | {"number": number}).encode()
    words = np.frombuffer(text.ljust(-(-len(text) // 4) * 4), np.int32)
    if len(words) > HEADER - 2:
        raise WishError(
            f"{name}its stop ids and its name take {len(text)} bytes; at most {4 * HEADER - 8} can be sent."
        )
    return [MARK, len(words), *words.tolist(), *request.prompt_ids]


def decode(numbers: Sequence[int]) -> Asked:
    """Inverse of `encode`. Raises SamplerError where they are no request."""
    try:
        (mark, size), rest = numbers[:2], numbers[2:]
        wanted = json.loads(np.array(rest[:size], np.int32).tobytes())
        number = int(wanted.pop("number"))
        given: dict[str, Any] = wanted | {"prompt_ids": tuple(rest[size:]), "stop_ids": tuple(wanted["stop_ids"])}
        request = SampleRequest(**given)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise SamplerError(f"{len(numbers)} numbers are not a request ({type(error).__name__}: {error}).") from error
    if mark != MARK:
        raise SamplerError(f"{len(numbers)} numbers are not a request: they begin with {mark}, not with {MARK}.")
    return Asked(request, number)


def rows(numbers: Sequence[int]) -> list[tuple[Int32[np.ndarray, "1 4"], int]]:
    """The tokens of a reply: what `Job.add` takes, and the version of each."""
    table = np.asarray(numbers, np.int32).reshape(-1, COLUMNS)
    return [(row[None, :4], -1 - int(row[4])) for row in table]


def json_bytes(message: dict[str, Any]) -> bytes:
    """A message to `SERVICE`, or its answer."""
    return json.dumps(message).encode()


def json_answer(data: bytes) -> dict[str, Any]:
    """Inverse of `json_bytes`."""
    return json.loads(data)
