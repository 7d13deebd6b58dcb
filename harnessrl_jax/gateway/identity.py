"""Who calls -> stable names and seeds. Pure: no clock and no arrival order enters a seed or an id."""

import hashlib
import re
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from harnessrl_jax.errors import GatewayError
from harnessrl_jax.gateway.refusal import bad_request

_NAME = re.compile(r"[A-Za-z0-9._~-]{1,128}")
_SESSION = re.compile(r"[\x21-\x7e]{1,256}")


class CallName(NamedTuple):
    """Identity of one choice of one request, and the seed it is sampled with."""

    call_id: str
    seed: int

    def tool_call(self, index: int) -> str:
        """The id of the call's tool call number `index`, from 0."""
        return f"call_{self.call_id}{index:02d}"


def name_call(
    run_seed: int,
    rollout_id: str,
    attempt: int,
    session_id: str,
    prompt_ids: Int32[np.ndarray, " p"],
    repetition: int,
    choice: int,
) -> CallName:
    """A name and a seed that are the same in every run with the same seed.

    Args:
      run_seed: the run's seed.
      rollout_id: with `attempt`, the run of the harness.
      attempt: which try of it.
      session_id: the conversation.
      prompt_ids: what the model reads.
      repetition: how many requests of this session had the same prompt before.
      choice: which of the request's choices.

    Returns:
      A 24-digit call id, unique in the attempt, and a seed in [0, 2**64).
    """
    total = hashlib.blake2b(digest_size=20)
    for part in (str(run_seed), rollout_id, str(attempt), session_id, str(repetition), str(choice)):
        total.update(len(part).to_bytes(4, "little") + part.encode())
    total.update(prompt_ids.astype("<i4").tobytes())
    value = total.digest()
    return CallName(call_id=value[:12].hex(), seed=int.from_bytes(value[12:], "little"))


def check_name(kind: str, value: str) -> str:
    """Returns `value` if it can stand in a URL as it is; GatewayError if not."""
    if not _NAME.fullmatch(value):
        raise GatewayError(
            f"{kind} is {value!r}; it becomes part of a URL and may hold 1 to 128 letters, digits and . _ ~ - only."
        )
    return value


def session_of(header: str | None, agent: str) -> str:
    """The conversation that a request belongs to: what the harness says, else one per agent.

    Raises:
      Refusal: the header is not 1 to 256 visible ASCII characters.
    """
    if header is None:
        return agent
    if not _SESSION.fullmatch(header):
        raise bad_request("x-session-id must be 1 to 256 visible ASCII characters.", param="x-session-id")
    return header
