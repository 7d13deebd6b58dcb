"""The calls of one rollout, in any order -> who continues whom, and which calls are live, with the evidence.

Token truth decides: a call continues the call whose prompt + output is the longest prefix of its own prompt. What the
harness says about itself is a hint that is kept next to it.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

from harnessrl_jax.errors import LineageError
from harnessrl_jax.trajectories.records import Call
from harnessrl_jax.trajectories.trees import ROOT, PrefixTree, build, path

Link = Literal["opens", "extends", "rewrites"]
State = Literal["live", "superseded", "rejected", "auxiliary", "undelivered"]


class LinkedCall(NamedTuple):
    """A call in its place.

    Attributes:
      call: the record.
      parent_call_id: the call whose prompt + output this prompt extends, in the same agent; None at a root.
      opened_by: the call of another agent or session that the record names as the opener; None if there is none.
      link: "extends" its parent; "opens" a conversation; "rewrites" = the session had calls, but this prompt extends
        none of them: the history was changed, and the tree branches where the ids differ.
      state: only a "live" call is trained. "superseded": a proven retry took its place. "rejected": its branch was
        discarded by the harness. "auxiliary": not part of the task. "undelivered": the harness never got it whole.
      evidence: why this link and state, in words.
    """

    call: Call
    parent_call_id: str | None
    opened_by: str | None
    link: Link
    state: State
    evidence: str


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
    links = _prefix_links(ordered)
    parents = {call_id: link.parent for call_id, link in links.items()}
    continued = {parent for parent in parents.values() if parent is not None}
    lost = _superseded(ordered, continued)
    known = {call.call_id for call in ordered}
    linked: list[LinkedCall] = []
    for call in ordered:
        link, link_evidence = _link(call, links[call.call_id])
        state, state_evidence = _state(call, lost, call.call_id in continued)
        hint = call.parent_call_id if call.parent_call_id in known else None
        evidence = "; ".join(filter(None, [link_evidence, state_evidence, _hint_evidence(call, known)]))
        linked.append(
            LinkedCall(
                call=call,
                parent_call_id=parents[call.call_id],
                opened_by=hint if hint != parents[call.call_id] else None,
                link=link,
                state=state,
                evidence=evidence,
            )
        )
    first = ordered[0]
    return Lineage(run_id=first.run_id, rollout_id=first.rollout_id, attempt=first.attempt, calls=tuple(linked))


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


class _PrefixLink(NamedTuple):
    """The call that a prompt extends; without one, the earlier call of its session it shares most with, if any."""

    parent: str | None
    nearest: str | None = None
    shared: int = 0
    asked_before: bool = False


def _prefix_links(calls: Sequence[Call]) -> dict[str, _PrefixLink]:
    out: dict[str, _PrefixLink] = {}
    for agent in {call.agent for call in calls}:
        own = [call for call in calls if call.agent == agent]
        full = [np.concatenate([call.prompt_ids, call.output_ids]) for call in own]
        tree, leaf = build([*full, *(call.prompt_ids for call in own)])
        end, prompt = leaf[: len(own)], leaf[len(own) :]
        parents = _deepest_ends(own, tree, end, prompt)
        for place, call in enumerate(own):
            parent = parents[place]
            before = [i for i in range(place) if own[i].session_id == call.session_id]
            if parent is not None or not before:
                out[call.call_id] = _PrefixLink(None if parent is None else own[parent].call_id)
                continue
            shared = _shared_depth(tree, end[before], int(prompt[place]))
            nearest = int(np.flatnonzero(shared == shared.max())[-1])
            asked_before = bool(np.any(prompt[before] == prompt[place]))
            out[call.call_id] = _PrefixLink(None, own[before[nearest]].call_id, int(shared[nearest]), asked_before)
    return out


def _deepest_ends(
    calls: Sequence[Call], tree: PrefixTree, end: Int32[np.ndarray, " call"], prompt: Int32[np.ndarray, " call"]
) -> list[int | None]:
    """For each call the number of the other call whose last token lies deepest on the path of its prompt.

    An empty output continues nothing, so it is no parent: that also keeps the links free of cycles. Where several
    calls end on the same node (siblings that sampled the same), the same session wins, then the latest call before.
    """
    sampled = np.array([len(call.output_ids) > 0 for call in calls])
    on_path = (end[:, None] <= prompt[None, :]) & (prompt[None, :] < tree.subtree_end[end][:, None]) & sampled[:, None]
    depth = np.where(on_path, tree.depth[end][:, None], ROOT)
    deepest = depth.max(axis=0)
    out: list[int | None] = []
    for child, call in enumerate(calls):
        if deepest[child] == ROOT:
            out.append(None)
            continue
        ends = np.flatnonzero(depth[:, child] == deepest[child]).tolist()
        best = max(ends, key=lambda i: (calls[i].session_id == call.session_id, i if i < child else -i))
        out.append(best)
    return out


def _shared_depth(tree: PrefixTree, end: Int32[np.ndarray, " call"], prompt: int) -> Int64[np.ndarray, " call"]:
    """How many tokens the path to each of some nodes shares with the path to `prompt`.

    The nodes on the path are nested ranges of nodes, so those that hold a node are the first few.
    """
    on_path = path(tree, prompt)
    begun = np.searchsorted(on_path, end, side="right")
    open_still = np.searchsorted(-tree.subtree_end[on_path], -end, side="left")
    return np.minimum(begun, open_still).astype(np.int64)


def _superseded(calls: Sequence[Call], continued: set[str]) -> dict[str, str]:
    """call_id -> evidence, for each call that a proven retry replaced."""
    lost: dict[str, str] = {}
    for position, call in enumerate(calls):
        same = [
            other
            for other in calls[:position]
            if (other.agent, other.session_id, other.choice) == (call.agent, call.session_id, call.choice)
            and other.call_id not in lost
            and (other.request_digest == call.request_digest or np.array_equal(other.prompt_ids, call.prompt_ids))
        ]
        if not same:
            continue
        failed = [other for other in same if other.request_digest == call.request_digest and _failed(other)]
        earlier = (failed or same)[-1]
        if call.retry:
            proof = "the client declared a retry"
        elif failed:
            proof = f"the same request bytes came again after a call that {_failure(earlier)}"
        else:
            continue
        if earlier.call_id in continued and call.call_id not in continued:
            lost[call.call_id] = f"retry of {earlier.call_id}, whose answer was used ({proof})"
        else:
            lost[earlier.call_id] = f"replaced by {call.call_id} ({proof})"
    return lost


def _failed(call: Call) -> bool:
    return not call.delivered or call.finish in ("aborted", "error")


def _failure(call: Call) -> str:
    return f"ended with finish={call.finish}" if call.finish in ("aborted", "error") else "was never delivered"


def _state(call: Call, lost: dict[str, str], used: bool) -> tuple[State, str]:
    if call.call_id in lost:
        return "superseded", lost[call.call_id]
    if not _failed(call):
        return "live", ""
    if used and call.finish not in ("aborted", "error"):
        return "live", "marked undelivered, but a later prompt contains its answer"
    return "undelivered", _failure(call)


def _link(call: Call, link: _PrefixLink) -> tuple[Link, str]:
    if link.parent is not None:
        return "extends", f"prompt extends {link.parent}"
    if link.nearest is None or link.asked_before:
        return "opens", ""
    return "rewrites", f"history differs from {link.nearest} at token {link.shared} of {len(call.prompt_ids)}"


def _hint_evidence(call: Call, known: set[str]) -> str:
    if call.parent_call_id is None or call.parent_call_id in known:
        return ""
    return f"names the unknown call {call.parent_call_id} as its opener"
