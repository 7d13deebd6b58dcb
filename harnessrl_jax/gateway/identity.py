"""Who calls -> stable names and seeds. Pure: no clock and no arrival order enters a seed or an id."""

import hashlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from harnessrl_jax.errors import GatewayError
from harnessrl_jax.gateway.refusal import bad_request
from harnessrl_jax.trajectories.headers import claims

_NAME = re.compile(r"[A-Za-z0-9._~-]{1,128}")
_SESSION = re.compile(r"[\x21-\x7e]{1,256}")
# Every id that a reply carries: of itself, of its items and of its tool calls.
_OURS = re.compile(r"(?:[a-z]+_)*([0-9a-f]{24})(?:[0-9]{2,})?")


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


def call_of(identity: Any) -> str | None:
    """The call that an id in a reply names; None for an id that was not made here.

    Example:
      >>> call_of("fc_call_0123456789abcdef0123456701"), call_of("msg_2")
      ('0123456789abcdef01234567', None)
    """
    ours = _OURS.fullmatch(identity) if isinstance(identity, str) else None
    return ours.group(1) if ours else None


def check_name(kind: str, value: str) -> str:
    """Returns `value` if it can stand in a URL as it is; GatewayError if not."""
    if not _NAME.fullmatch(value):
        raise GatewayError(
            f"{kind} is {value!r}; it becomes part of a URL and may hold 1 to 128 letters, digits and . _ ~ - only."
        )
    return value


def session_of(headers: Mapping[str, str], agent: str) -> str:
    """The conversation that a request belongs to: what the harness says, else one per agent.

    Args:
      headers: of the request, names in lower case.
      agent: who asks, by the path.

    Raises:
      Refusal: the name is not 1 to 256 visible ASCII characters.
    """
    said = claims(headers)
    session = headers.get("x-session-id") or (said.thread if said else "") or headers.get("x-litellm-session-id")
    if not session:
        return agent
    if not _SESSION.fullmatch(session):
        where = "x-session-id" if "x-session-id" in headers else "session"
        raise bad_request("The name of the session must be 1 to 256 visible ASCII characters.", param=where)
    return session
