"""The calls of one rollout, in any order -> who continues whom, and which calls are live, with the evidence.

Token truth decides: a call continues the call whose prompt + output is the longest prefix of its own prompt. What the
harness says about itself is a hint that is kept next to it. The plain values that a place is made of (`Agent`, `Fork`,
`Evidence` and the words for links, states and categories) are in `evidence`.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from harnessrl_jax.errors import LineageError
from harnessrl_jax.trajectories.evidence import Agent, Evidence, Fork, Link, State
from harnessrl_jax.trajectories.prefixes import Prefixes, history, link_prefixes, shared_tokens
from harnessrl_jax.trajectories.records import Call
from harnessrl_jax.trajectories.retries import failure, siblings, superseded

SHOWN_IDS = 16


class LinkedCall(NamedTuple):
    """A call in its place.

    Attributes:
      call: the record.
      agent: who made it, and what told this agent apart from others.
      parent_call_id: the call whose prompt + output this prompt extends, in the same agent; None at a root.
      opened_by: the call of another agent or session that opened this conversation; None if none is known.
      sibling_of: the first call that had the same prompt, where this one asks again on purpose; None elsewhere.
      link: "extends" its parent; "opens" a conversation; "rewrites" = the history it takes up was changed, and the tree
        branches where the ids differ; "continues" = a summary stands for the history; "handoff" = another agent goes on
        with the same messages.
      fork: where and how a "rewrites", "continues" or "handoff" leaves its history; None for the other links.
      state: only a "live" call is trained. "superseded": a proven retry took its place. "rejected": its branch was
        discarded by the harness. "auxiliary": not part of the task. "undelivered": the harness never got it whole.
      evidence: what all of this rests on.
    """

    call: Call
    agent: Agent
    parent_call_id: str | None
    opened_by: str | None
    sibling_of: str | None
    link: Link
    fork: Fork | None
    state: State
    evidence: tuple[Evidence, ...]

    @property
    def words(self) -> str:
        """The evidence as one sentence part."""
        return "; ".join(evidence.words for evidence in self.evidence)


class Lineage(NamedTuple):
    """The calls of one attempt of one rollout in request order, each in its place."""

    run_id: str
    rollout_id: str
    attempt: int
    calls: tuple[LinkedCall, ...]

    def counts(self) -> dict[str, int]:
        """How many calls have each state and each link, by "state/..." and "link/..."."""
        states = Counter(f"state/{linked.state}" for linked in self.calls)
        return dict(sorted((states + Counter(f"link/{linked.link}" for linked in self.calls)).items()))


def build_lineage(calls: Sequence[Call]) -> Lineage:
    """Links the calls of one attempt of one rollout and decides which of them count.

    A retry needs proof: the client's retry flag, or the same request bytes after a call that failed or never arrived.
    Without proof equal requests are siblings (voting, parallel branches) and all live. Of a proven pair the one whose
    answer later prompts contain stays, else the later one.

    Args:
      calls: records of one (run, rollout, attempt), at least one, in any order.

    Returns:
      The lineage; equal for every order of `calls`.

    Raises:
      LineageError: no call, calls of several attempts, a call_id twice, or an agent both trained and not.
    """
    ordered = sorted(calls, key=_request_order)
    _check(ordered)
    linked: dict[str, LinkedCall] = {}
    for name in dict.fromkeys(call.agent for call in ordered):
        linked |= _link_agent([call for call in ordered if call.agent == name])
    known = linked.keys()
    first = ordered[0]
    return Lineage(
        run_id=first.run_id,
        rollout_id=first.rollout_id,
        attempt=first.attempt,
        calls=tuple(_with_opener(linked[call.call_id], known) for call in ordered),
    )


def _request_order(call: Call) -> tuple[int, int, str, bytes, bytes, str]:
    prompt, output = (np.asarray(ids, ">i4").tobytes() for ids in (call.prompt_ids, call.output_ids))
    return call.seq, call.choice, call.session_id, prompt, output, call.call_id


def _check(calls: Sequence[Call]) -> None:
    if not calls:
        raise LineageError(
            "build_lineage: got no calls. Give the calls of one rollout; a rollout without any has none."
        )
    first = calls[0]
    where = f"build_lineage of rollout {first.rollout_id!r}"
    trained: dict[str, bool] = {}
    seen: set[str] = set()
    for call in calls:
        here = (call.run_id, call.group_id, call.rollout_id, call.attempt)
        wanted = (first.run_id, first.group_id, first.rollout_id, first.attempt)
        if here != wanted:
            raise LineageError(
                f"{where}: call {call.call_id!r} has (run, group, rollout, attempt) {here}, the others {wanted}. "
                "Build one lineage for each attempt of each rollout."
            )
        if call.call_id in seen:
            raise LineageError(f"{where}: call_id {call.call_id!r} occurs twice. Give each stored call once.")
        seen.add(call.call_id)
        if trained.setdefault(call.agent, call.trainable) != call.trainable:
            raise LineageError(
                f"{where}: agent {call.agent!r} is trainable in some calls and not in others (call {call.call_id!r}). "
                "Decide once for each agent when the rollout is opened."
            )


def _link_agent(calls: Sequence[Call]) -> dict[str, LinkedCall]:
    """The calls of one agent, in request order, each in its place."""
    prefixes = link_prefixes(calls)
    used = {calls[parent].call_id for parent in prefixes.parent if parent is not None}
    lost = superseded(calls, used)
    failed = {call.call_id: failure(call, call.call_id in used) for call in calls}
    again = siblings([call for call in calls if call.call_id not in lost and failed[call.call_id] is None])
    out: dict[str, LinkedCall] = {}
    for place, call in enumerate(calls):
        link, fork, reason = _link(calls, prefixes, place)
        state, why = _state(call, lost.get(call.call_id), failed[call.call_id], call.call_id in used)
        sibling = again.get(call.call_id)
        parent = prefixes.parent[place]
        out[call.call_id] = LinkedCall(
            call=call,
            agent=Agent(call.agent, "", "name"),
            parent_call_id=None if parent is None else calls[parent].call_id,
            opened_by=None,
            sibling_of=None if sibling is None else sibling.call_id,
            link=link,
            fork=fork,
            state=state,
            evidence=tuple(item for item in (reason, sibling, why) if item is not None),
        )
    return out


def _link(calls: Sequence[Call], prefixes: Prefixes, place: int) -> tuple[Link, Fork | None, Evidence | None]:
    call, parent = calls[place], prefixes.parent[place]
    if parent is not None:
        extended = calls[parent].call_id
        return "extends", None, Evidence("link", "token_prefix", extended, f"prompt extends {extended}")
    before = [i for i in range(place) if calls[i].session_id == call.session_id]
    if not before or any(np.array_equal(calls[i].prompt_ids, call.prompt_ids) for i in before):
        return "opens", None, None
    shared = shared_tokens(prefixes, calls, place)
    nearest = max(before, key=lambda i: (shared[i], i))
    position, other = int(shared[nearest]), calls[nearest]
    words = f"history differs from {other.call_id} at token {position} of {len(call.prompt_ids)}"
    fork = Fork(
        from_call_id=other.call_id,
        category="unknown",
        position=position,
        before=tuple(history(other)[position : position + SHOWN_IDS].tolist()),
        after=tuple(call.prompt_ids[position : position + SHOWN_IDS].tolist()),
        before_text=None,
        after_text=None,
    )
    return "rewrites", fork, Evidence("link", "same_session", other.call_id, words)


def _state(call: Call, lost: Evidence | None, failed: Evidence | None, used: bool) -> tuple[State, Evidence | None]:
    if lost is not None:
        return "superseded", lost
    if failed is not None:
        return "undelivered", failed
    if not call.delivered:
        words = "marked undelivered, but a later prompt contains its answer"
        return "live", Evidence("state", "answer_used", None, words)
    return "live", None


def _with_opener(linked: LinkedCall, known: Collection[str]) -> LinkedCall:
    named = linked.call.parent_call_id
    if named is None or named == linked.parent_call_id:
        return linked
    if named in known:
        evidence = Evidence("opener", "named_opener", named, f"names {named} as its opener")
        return linked._replace(opened_by=named, evidence=(*linked.evidence, evidence))
    evidence = Evidence("opener", "unknown_opener", named, f"names the unknown call {named} as its opener")
    return linked._replace(evidence=(*linked.evidence, evidence))
