"""Rollouts and their lineages -> the calls that are trained, and a counted reason for every other. NumPy only."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from harnessrl_jax.errors import LineageError
from harnessrl_jax.trajectories.lineage import Lineage, LinkedCall
from harnessrl_jax.trajectories.records import Call, Rollout

Truncated = Literal["keep", "mask"]
Key = tuple[str, str, int]


class Drop(NamedTuple):
    """How much one reason removed: calls, and tokens they sampled."""

    calls: int
    tokens: int


class UsedCall(NamedTuple):
    """A call to train: its rollout, and its position among the trained calls of its agent there, from 0."""

    rollout: Rollout
    call: Call
    agent_index: int


def rollout_key(record: Rollout | Lineage) -> Key:
    """What names one attempt of one rollout."""
    return record.run_id, record.rollout_id, record.attempt


def baseline_rollouts(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The rollouts that a baseline may count: last attempts, with a reward, whose infrastructure held; sorted."""
    return [rollout for rollout in last_attempts(rollouts).values() if _unusable(rollout) is None]


def last_attempts(rollouts: Sequence[Rollout]) -> dict[tuple[str, str], Rollout]:
    """The last attempt of each rollout by (run_id, rollout_id), sorted; LineageError if one is given twice."""
    out: dict[tuple[str, str], Rollout] = {}
    seen: set[Key] = set()
    for rollout in sorted(rollouts, key=lambda r: (r.run_id, r.group_id, r.rollout_id, r.attempt)):
        if rollout_key(rollout) in seen:
            raise LineageError(
                f"Rollout {rollout.rollout_id!r}, attempt {rollout.attempt}, was given twice. Give each record once."
            )
        seen.add(rollout_key(rollout))
        out[rollout.run_id, rollout.rollout_id] = rollout
    return out


def used_calls(
    rollouts: Sequence[Rollout], lineages: Sequence[Lineage], *, truncated: Truncated
) -> tuple[list[UsedCall], dict[str, Drop]]:
    """Sorts the calls of a step into those that are trained and those that are not.

    Args:
      rollouts: the rollouts of a step, in any order.
      lineages: of their attempts, in any order.
      truncated: whether tokens of truncated rollouts are trained.

    Returns:
      The calls to train in canonical order (run, group, rollout, session, prompt, output, seq), and what every reason
      removed. Each sampled token is in exactly one of the two.

    Raises:
      LineageError: a record twice, records that disagree, or a process reward for a call that does not exist.
    """
    last = last_attempts(rollouts)
    given = {rollout_key(rollout): rollout for rollout in rollouts}
    used: list[UsedCall] = []
    calls: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    _check_lineages(lineages, given)
    for lineage in lineages:
        rollout = given.get(rollout_key(lineage))
        latest = last.get((lineage.run_id, lineage.rollout_id))
        index: Counter[str] = Counter()
        for linked in lineage.calls:
            reason = _reason(linked, rollout, latest, truncated)
            if reason is None and rollout is not None:
                used.append(UsedCall(rollout, linked.call, index[linked.call.agent]))
                index[linked.call.agent] += 1
            else:
                calls[str(reason)] += 1
                tokens[str(reason)] += len(linked.call.output_ids)
    dropped = {reason: Drop(calls=calls[reason], tokens=tokens[reason]) for reason in sorted(calls)}
    return sorted(used, key=lambda item: canonical_order(item.call)), dropped


def drop_reasons(rollouts: Sequence[Rollout], lineages: Sequence[Lineage], *, truncated: Truncated) -> dict[str, str]:
    """Why each call that `used_calls` leaves out is left out, by call_id; the words are those of its counts.

    Args:
      rollouts: as for `used_calls`.
      lineages: as for `used_calls`.
      truncated: as for `used_calls`.

    Returns:
      The reasons.
    """
    last = last_attempts(rollouts)
    given = {rollout_key(rollout): rollout for rollout in rollouts}
    out: dict[str, str] = {}
    for lineage in lineages:
        latest = last.get((lineage.run_id, lineage.rollout_id))
        for linked in lineage.calls:
            reason = _reason(linked, given.get(rollout_key(lineage)), latest, truncated)
            if reason is not None:
                out[linked.call.call_id] = reason
    return out


def canonical_order(call: Call) -> tuple[Any, ...]:
    """Sorts calls by what they are, so that the order of their arrival cannot matter."""
    prompt, output = (np.asarray(ids, ">i4").tobytes() for ids in (call.prompt_ids, call.output_ids))
    where = (call.run_id, call.group_id, call.rollout_id, call.attempt, call.session_id)
    return *where, prompt, output, call.seq, call.choice, call.call_id


def merge_drops(*counts: Mapping[str, Drop]) -> dict[str, Drop]:
    """The sum of several counts, by reason."""
    calls: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for count in counts:
        for reason, drop in count.items():
            calls[reason] += drop.calls
            tokens[reason] += drop.tokens
    return {reason: Drop(calls=calls[reason], tokens=tokens[reason]) for reason in sorted(calls)}


def _unusable(rollout: Rollout) -> str | None:
    if rollout.status == "infra_failure":
        return "infra_failure"
    return "no_reward" if rollout.reward is None else None


def _reason(linked: LinkedCall, rollout: Rollout | None, latest: Rollout | None, truncated: Truncated) -> str | None:
    """Why a call is not trained, most fundamental reason first; None if it is."""
    if not linked.call.trainable:
        return "frozen_agent"
    if rollout is None or latest is None:
        return "no_rollout"
    if rollout.attempt != latest.attempt:
        return "earlier_attempt"
    if reason := _unusable(rollout):
        return reason
    if linked.state != "live":
        return linked.state
    if rollout.status == "truncated" and truncated == "mask":
        return "truncated_rollout"
    return None if len(linked.call.output_ids) else "empty_output"


def _check_lineages(lineages: Sequence[Lineage], rollouts: Mapping[Key, Rollout]) -> None:
    seen: set[Key] = set()
    ids: dict[str, str] = {}
    for lineage in lineages:
        key = rollout_key(lineage)
        where = f"Lineage of rollout {lineage.rollout_id!r}, attempt {lineage.attempt}"
        if key in seen:
            raise LineageError(f"{where}, was given twice. Give each lineage once.")
        seen.add(key)
        for linked in lineage.calls:
            call = linked.call
            if call.call_id in ids:
                raise LineageError(
                    f"{where}: call_id {call.call_id!r} is also used in rollout {ids[call.call_id]!r}. "
                    "A call_id must be unique in the run."
                )
            ids[call.call_id] = lineage.rollout_id
            if key in rollouts and rollouts[key].group_id != call.group_id:
                raise LineageError(
                    f"{where}: call {call.call_id!r} has group {call.group_id!r}, its rollout has group "
                    f"{rollouts[key].group_id!r}. Record both under the group of the step."
                )
        if key in rollouts:
            _check_process_rewards(where, lineage, rollouts[key])


def _check_process_rewards(where: str, lineage: Lineage, rollout: Rollout) -> None:
    known = {linked.call.call_id for linked in lineage.calls}
    if unknown := sorted(rollout.process_rewards.keys() - known):
        raise LineageError(
            f"{where}: process_rewards name {', '.join(map(repr, unknown))}, which the rollout did not call. "
            f"Known calls: {', '.join(sorted(known))}."
        )
