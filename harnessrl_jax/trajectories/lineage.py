"""The calls of one rollout, in any order -> who continues whom, and which calls are live, with the evidence.

Token truth decides: a call continues the call whose prompt + output is the longest prefix of its own prompt. What the
harness says about itself is a hint that is kept next to it. The plain values that a place is made of (`Agent`, `Fork`,
`Evidence` and the words for links, states and categories) are in `evidence`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from harnessrl_jax.errors import LineageError
from harnessrl_jax.trajectories.agents import name_agents
from harnessrl_jax.trajectories.evidence import Agent, Evidence, Fork, Link, State
from harnessrl_jax.trajectories.forks import Decode
from harnessrl_jax.trajectories.known import Known, know
from harnessrl_jax.trajectories.places import Place, place_calls
from harnessrl_jax.trajectories.records import Call
from harnessrl_jax.trajectories.retries import failure, siblings, superseded
from harnessrl_jax.trajectories.states import Used, auxiliary, rejected


class LinkedCall(NamedTuple):
    """A call in its place.

    Attributes:
      call: the record.
      agent: who made it, and what told this agent apart from others.
      session: call_id of the call that opened its conversation; a conversation is one agent's, rewrites and summaries
        included.
      parent_call_id: the call whose prompt + output this prompt extends, in the same agent; None at a root. A changed
        history whose beginning is intact "rewrites" or "continues", and has a parent all the same.
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
    session: str
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
        """How many agents and conversations there are, and calls of each kind.

        Returns:
          `agents`, `sessions`, `siblings`, and by name `state/...`, `link/...`, `fork/...` (a fork is counted once,
          however often its prompt was asked) and `agent/...` (calls by what told their agent apart).
        """
        out = Counter(f"state/{linked.state}" for linked in self.calls)
        out += Counter(f"link/{linked.link}" for linked in self.calls)
        out += Counter(f"agent/{linked.agent.source}" for linked in self.calls)
        forks = {
            (item.fork.from_call_id, item.call.prompt_ids.tobytes()): item.fork for item in self.calls if item.fork
        }
        out += Counter(f"fork/{fork.category}" for fork in forks.values())
        out["siblings"] = sum(linked.sibling_of is not None for linked in self.calls)
        out["sessions"] = len({linked.session for linked in self.calls})
        out["agents"] = len({(linked.agent.name, linked.agent.thread) for linked in self.calls})
        return {name: number for name, number in sorted(out.items()) if number}


def build_lineage(calls: Sequence[Call], decode: Decode | None = None) -> Lineage:
    """Links the calls of one attempt of one rollout and decides which of them count.

    A retry needs proof: the client's retry flag, or the same request bytes after a call that failed or never arrived.
    Without proof equal requests are siblings (voting, parallel branches) and all live. Of a proven pair the one whose
    answer later prompts contain stays, else the later one. What else is not live, and why, is in `states`.

    Args:
      calls: records of one (run, rollout, attempt), at least one, in any order.
      decode: ids -> text, control tokens spelled out. It names the text at forks and tells more of their categories
        apart; links and states do not depend on it.

    Returns:
      The lineage; equal for every order of `calls`. The work is a sort and a pass over the tokens.

    Raises:
      LineageError: no call, calls of several attempts, a call_id twice, or an agent both trained and not.
    """
    ordered = sorted(calls, key=_request_order)
    _check(ordered)
    known = know(ordered, decode)
    places = place_calls(known)
    again = _repeats(ordered, known)
    used = Used(known.parent, known.quotes)
    heads = {place.session: known.read(place.session) for place in places}
    side = auxiliary(ordered, known.said, places, used, heads)
    dropped = rejected(ordered, places, used) | side
    agents = name_agents(ordered, known.said, [place.session for place in places], heads, side)
    first, known_at = ordered[0], {call.call_id: call.seq for call in ordered}
    return Lineage(
        run_id=first.run_id,
        rollout_id=first.rollout_id,
        attempt=first.attempt,
        calls=tuple(
            _with_named_opener(_linked(known, again, number, agents[number], place, dropped.get(number)), known_at)
            for number, place in enumerate(places)
        ),
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


class _Repeats(NamedTuple):
    """What repeats another call, by call_id, and what the harness never had."""

    lost: dict[str, Evidence]
    failed: dict[str, Evidence]
    siblings: dict[str, Evidence]
    used: set[str]


def _repeats(calls: Sequence[Call], known: Known) -> _Repeats:
    used = {calls[extended].call_id for extended in known.parent if extended is not None}
    failed = {call.call_id: why for call in calls if (why := failure(call, call.call_id in used)) is not None}
    lost: dict[str, Evidence] = {}
    again: dict[str, Evidence] = {}
    for _, members in known.prefixes.values():
        own = [calls[number] for number in members]
        lost |= superseded(own, used)
        again |= siblings([call for call in own if call.call_id not in lost and call.call_id not in failed])
    return _Repeats(lost, failed, again, used)


def _linked(
    known: Known, again: _Repeats, number: int, agent: Agent, place: Place, dropped: Evidence | None
) -> LinkedCall:
    call, parent = known.calls[number], known.parent[number]
    state, why = _state(call, again, dropped)
    sibling = again.siblings.get(call.call_id)
    linked = LinkedCall(
        call=call,
        agent=agent,
        session=known.calls[place.session].call_id,
        parent_call_id=None if parent is None else known.calls[parent].call_id,
        opened_by=next((item.call_id for item in place.evidence if item.about == "opener"), None),
        sibling_of=None if sibling is None else sibling.call_id,
        link=place.link,
        fork=place.fork,
        state=state,
        evidence=tuple(item for item in (*place.evidence, sibling, why) if item is not None),
    )
    return linked


def _state(call: Call, again: _Repeats, dropped: Evidence | None) -> tuple[State, Evidence | None]:
    if call.call_id in again.lost:
        return "superseded", again.lost[call.call_id]
    if call.call_id in again.failed:
        return "undelivered", again.failed[call.call_id]
    if dropped is not None:
        return ("rejected" if dropped.kind == "other_summary_used" else "auxiliary"), dropped
    if not call.delivered:
        words = "marked undelivered, but a later prompt contains its answer"
        return "live", Evidence("state", "answer_used", None, words)
    return "live", None


def _with_named_opener(linked: LinkedCall, known_at: Mapping[str, int]) -> LinkedCall:
    """The call with the opener that its record names, which outweighs one that was found."""
    named = linked.call.parent_call_id
    if named is None or named == linked.parent_call_id:
        return linked
    if known_at.get(named, linked.call.seq) < linked.call.seq:
        evidence = Evidence("opener", "named_opener", named, f"names {named} as its opener")
        others = [item for item in linked.evidence if item.about != "opener"]
        return linked._replace(opened_by=named, evidence=(*others, evidence))
    what = "the later" if named in known_at else "the unknown"
    evidence = Evidence("opener", "unknown_opener", named, f"names {what} call {named} as its opener")
    return linked._replace(evidence=(*linked.evidence, evidence))
