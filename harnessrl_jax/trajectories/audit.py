"""Calls and rollouts as they were kept -> what contradicts the rules, where, and what to do. Nothing is raised.

A record that exists has passed the checks of its own fields; what is audited here is how records stand to one another
and to the text that was sampled. `balance` audits what they become.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int, Int32

from harnessrl_jax.trajectories.records import Call, Rollout, Span
from harnessrl_jax.trajectories.roles import OutputRoles

Rule = Literal[
    "file", "digest", "record", "torn", "state", "column", "orphan", "identity", "parent", "late", "version", "reward",
    "parse", "prompt", "lineage", "weight",
]  # fmt: skip


class Finding(NamedTuple):
    """One thing that is wrong.

    Attributes:
      rule: what it breaks.
      where: the record.
      what: what was found, and what was wanted.
      fix: what to do about it.
    """

    rule: Rule
    where: str
    what: str
    fix: str


class CallPlace(NamedTuple):
    """What names a call, and where it stands in its rollout."""

    call_id: str
    rollout_id: str
    attempt: int
    seq: int
    choice: int


def audit_names(places: Iterable[CallPlace]) -> list[Finding]:
    """Call ids that are used twice in a run, and places of a rollout that hold two calls.

    >>> [finding.what for finding in audit_names([CallPlace("c", "r", 0, 0, 0), CallPlace("c", "r", 0, 1, 0)])]
    ['the id is used by 2 calls']
    """
    every = list(places)
    out: list[Finding] = []
    for call_id, times in Counter(place.call_id for place in every).items():
        if times > 1:
            fix = "Delete the copies; the id of a call names one sample of the run."
            out.append(Finding("identity", f"call {call_id!r}", f"the id is used by {times} calls", fix))
    for (rollout, attempt, seq, choice), times in Counter(place[1:] for place in every).items():
        if times > 1:
            what = f"request {seq}, choice {choice}, is taken by {times} calls"
            where = f"rollout {rollout!r}, attempt {attempt}"
            out.append(Finding("identity", where, what, "Delete the copies, or give them their own places."))
    return out


def audit_calls(calls: Sequence[Call], rollouts: Sequence[Rollout]) -> list[Finding]:
    """Parents, times, versions and rewards of the records of one or more groups.

    Args:
      calls: of every attempt, those that came too late left out.
      rollouts: the outcomes there are, of the same attempts.

    Returns:
      What is wrong: a parent that is not an earlier call of the attempt; a call of another group than its rollout; a
      call that began after its rollout had ended; weights older than those the rollout began with; a rollout without
      the reward its status promises, or with rewards of calls that do not exist.
    """
    outcome = {(rollout.rollout_id, rollout.attempt): rollout for rollout in rollouts}
    known = {(call.rollout_id, call.attempt, call.call_id): call for call in calls}
    out: list[Finding] = []
    for call in calls:
        if call.parent_call_id is not None:
            out += _parent(call, known.get((call.rollout_id, call.attempt, call.parent_call_id)))
        if (rollout := outcome.get((call.rollout_id, call.attempt))) is not None:
            out += _beside_rollout(call, rollout)
    for rollout in rollouts:
        out += _rewards(rollout, {key[2] for key in known if key[:2] == (rollout.rollout_id, rollout.attempt)})
    return out


def audit_parsing(call: Call, roles: OutputRoles, *, served: bool) -> list[Finding]:
    """Whether a record says of its sampled ids what the parser says.

    Args:
      call: the record.
      roles: what `assign_roles` gives for its `output_ids`, the end of turn left out.
      served: whether the request allowed tool calls; else the harness was handed none.

    Returns:
      A finding where tool calls, roles or status differ.
    """
    said = tuple((block.name, block.arguments) for block in roles.parsed.calls) if served else ()
    kept = tuple((tool.name, tool.arguments) for tool in call.tool_calls)
    pairs = (
        ("tool calls", kept, said),
        ("spans", _spelled(call.spans), _spelled(roles.spans)),
        ("parse_status", call.parse_status, roles.parsed.status),
    )
    fix = "Read it with the tokenizer and the version that captured it; if the parser changed, capture the call again."
    return [
        Finding("parse", call_name(call), f"the record's {name} are {here!r}, the sampled ids give {there!r}", fix)
        for name, here, there in pairs
        if here != there
    ]


def audit_prompt(call: Call, spliced: Sequence[str], sampled: Sequence[Call]) -> list[Finding]:
    """Whether a prompt holds the sampled ids of the turns it claims to continue, whole and in order.

    Args:
      call: the record.
      spliced: ids of the calls whose ids stand in its prompt, as the gateway noted.
      sampled: calls of the same attempt.

    Returns:
      A finding for the first turn that is unknown or that is not there.
    """
    known = {other.call_id: other for other in sampled}
    fix = "Leave the rollout out: its prompt is not the text that the harness and the model shared."
    at = 0
    for call_id in spliced:
        turn = known.get(call_id)
        if turn is None:
            return [
                Finding("prompt", call_name(call), f"the prompt claims the turn of {call_id!r}, which is unknown", fix)
            ]
        found = _find(call.prompt_ids, turn.output_ids, at)
        if found < 0:
            what = (
                f"the prompt claims the turn of {call_id!r}, but its {len(turn.output_ids)} sampled ids are not there"
            )
            return [Finding("prompt", call_name(call), what, fix)]
        at = found + len(turn.output_ids)
    return []


def _parent(call: Call, parent: Call | None) -> list[Finding]:
    fix = "Set parent_call_id to the call that opened this session, or to null."
    if parent is None:
        what = f"parent_call_id {call.parent_call_id!r} is no call of its rollout"
    elif parent.seq >= call.seq:
        what = f"parent_call_id {call.parent_call_id!r} has seq {parent.seq}, not before its own {call.seq}"
    else:
        return []
    return [Finding("parent", call_name(call), what, fix)]


def _beside_rollout(call: Call, rollout: Rollout) -> list[Finding]:
    out: list[Finding] = []
    if (call.run_id, call.task_id, call.group_id) != (rollout.run_id, rollout.task_id, rollout.group_id):
        here, there = ((r.run_id, r.task_id, r.group_id) for r in (call, rollout))
        what = f"(run, task, group) is {here}, its rollout has {there}"
        out.append(Finding("identity", call_name(call), what, "Delete the record that belongs elsewhere."))
    if call.started_s > rollout.finished_s:
        late = call.started_s - rollout.finished_s
        what = f"began {late:.3f} s after its rollout had ended, and counts"
        out.append(
            Finding("late", call_name(call), what, "Set its state to 'late', so that it is kept and not trained.")
        )
    if call.version_start < rollout.version:
        what = f"sampled by weights {call.version_start}, but its rollout began with weights {rollout.version}"
        fix = "Leave the rollout out; the sampler served old weights, or two runs shared the store."
        out.append(Finding("version", call_name(call), what, fix))
    return out


def _rewards(rollout: Rollout, known: set[str]) -> list[Finding]:
    where = f"rollout {rollout.rollout_id!r}, attempt {rollout.attempt}"
    out: list[Finding] = []
    if rollout.reward is None and rollout.status != "infra_failure":
        what = f"status {rollout.status!r} without a reward, so that none of its tokens is trained"
        out.append(Finding("reward", where, what, "Run its verifier again and store the reward as a new attempt."))
    if rollout.reward is not None and rollout.status == "infra_failure":
        what = f"reward {rollout.reward:g} of a rollout that the machine failed; it is not used"
        out.append(Finding("reward", where, what, "Set the status to what happened, or the reward to null."))
    if unknown := sorted(rollout.process_rewards.keys() - known):
        what = f"process rewards of calls that do not exist: {', '.join(map(repr, unknown))}"
        out.append(Finding("reward", where, what, "Remove them, or restore the calls."))
    return out


def _find(text: Int32[np.ndarray, " p"], piece: Int32[np.ndarray, " o"], start: int) -> int:
    """First place from `start` on where all of `piece` stands in `text`; -1 if there is none."""
    if not len(piece):
        return start
    ends = len(text) - len(piece)
    starts: Int[np.ndarray, " place"] = start + np.flatnonzero(text[start : max(ends + 1, start)] == piece[0])
    return next((int(at) for at in starts if np.array_equal(text[at : at + len(piece)], piece)), -1)


def _spelled(spans: Sequence[Span]) -> tuple[tuple[str, int, int], ...]:
    return tuple((span.role.name, span.start, span.end) for span in spans)


def call_name(call: Call) -> str:
    """What a finding calls a call."""
    return f"call {call.call_id!r} of rollout {call.rollout_id!r}, attempt {call.attempt}"
