"""Calls that asked the same thing again -> retries, which are proven, and siblings, which all count. NumPy only.

Asking twice is no proof: voting, parallel branches and loops that build the same prompt again all do it. A retry is
declared by the client's header, or shows in the same request bytes after a call that failed or never arrived.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from harnessrl_jax.trajectories.evidence import Evidence, EvidenceKind
from harnessrl_jax.trajectories.records import Call

Key: TypeAlias = tuple[str, str, int, str | bytes]


class _Asked(NamedTuple):
    """Calls that may be retried, by what they asked; the latest stands last."""

    same_bytes: dict[Key, list[Call]]
    same_prompt: dict[Key, list[Call]]
    failed: dict[Key, list[Call]]


def failure(call: Call, used: bool) -> Evidence | None:
    """Why the harness never had the whole answer of a call; None if it had.

    Args:
      call: the call.
      used: whether a later prompt contains its answer, which outweighs a delivery that was not confirmed.
    """
    if call.finish in ("aborted", "error"):
        return Evidence("state", "sampling_failed", None, f"ended with finish={call.finish}")
    if not call.delivered and not used:
        return Evidence("state", "not_delivered", None, "was never delivered")
    return None


def superseded(calls: Sequence[Call], used: Collection[str]) -> dict[str, Evidence]:
    """The calls that a proven retry stands in for.

    Of a proven pair the one whose answer later prompts contain stays, else the later one. If both answers were used,
    both stay. Each failure explains one retry.

    Args:
      calls: of one agent, in request order.
      used: call_ids of the answers that later prompts contain.

    Returns:
      call_id -> proof.
    """
    asked = _Asked(defaultdict(list), defaultdict(list), defaultdict(list))
    lost: dict[str, Evidence] = {}
    for call in calls:
        body, prompt = _keys(call)
        proof = _proof(call, asked, lost)
        if proof is not None:
            earlier, kind, words = proof
            kept = earlier.call_id in used and failure(earlier, used=True) is None
            if kept and call.call_id not in used:
                words = f"retry of {earlier.call_id}, whose answer was used ({words})"
                lost[call.call_id] = Evidence("state", kind, earlier.call_id, words)
                continue
            if not kept:
                lost[earlier.call_id] = Evidence("state", kind, call.call_id, f"replaced by {call.call_id} ({words})")
        asked.same_bytes[body].append(call)
        asked.same_prompt[prompt].append(call)
        if failure(call, call.call_id in used):
            asked.failed[body].append(call)
    return lost


def siblings(calls: Sequence[Call]) -> dict[str, Evidence]:
    """The calls that asked on purpose what an earlier one had asked: other choices of a request, votes, branches.

    Args:
      calls: of one agent, in request order, those left out that a retry replaced or that failed.

    Returns:
      call_id -> evidence, which names the first call with the same prompt.
    """
    first: dict[bytes, Call] = {}
    out: dict[str, Evidence] = {}
    for call in calls:
        original = first.setdefault(call.prompt_ids.tobytes(), call)
        if original is call:
            continue
        if original.seq == call.seq:
            out[call.call_id] = Evidence(
                "sibling", "same_request", original.call_id, f"another choice of the request of {original.call_id}"
            )
        else:
            words = f"asks again what {original.call_id} asked, without proof of a retry"
            out[call.call_id] = Evidence("sibling", "same_prompt", original.call_id, words)
    return out


def _keys(call: Call) -> tuple[Key, Key]:
    where = call.agent, call.session_id, call.choice
    return (*where, call.request_digest), (*where, call.prompt_ids.tobytes())


def _proof(call: Call, asked: _Asked, lost: Mapping[str, Evidence]) -> tuple[Call, EvidenceKind, str] | None:
    """The call that this one repeats, and how that is proven."""
    body, prompt = _keys(call)
    failed = _latest(asked.failed[body], lost)
    if call.retry:
        same = [other for other in (_latest(asked.same_bytes[body], lost), _latest(asked.same_prompt[prompt], lost))]
        earlier = failed or max(filter(None, same), key=lambda other: other.seq, default=None)
        return None if earlier is None else (earlier, "retry_header", "the client declared a retry")
    if failed is None:
        return None
    why = f"the same request bytes came again after a call that {_words(failed)}"
    return failed, "same_body_after_failure", why


def _words(failed: Call) -> str:
    found = failure(failed, used=False)
    return "" if found is None else found.words


def _latest(calls: list[Call], lost: Mapping[str, Evidence]) -> Call | None:
    """The last call that no retry has replaced; those that one has are taken off the list for good."""
    while calls and calls[-1].call_id in lost:
        calls.pop()
    return calls[-1] if calls else None
