"""Rows of a call store -> what is wrong with them, and the records of those that can be read. Pure."""

import json
from collections.abc import Mapping
from typing import NamedTuple

from harnessrl_jax.errors import HarnessRLError
from harnessrl_jax.gateway.rows import CallRow, StoredCall, digest, unpack_call
from harnessrl_jax.gateway.store import ANSWERED
from harnessrl_jax.trajectories.audit import Finding
from harnessrl_jax.trajectories.records import Rollout

UNANSWERED = ("intent", "lost", "failed")
STATES = (*ANSWERED, "late", *UNANSWERED)
RESTORE = "Restore the file from a copy, or delete that row to go on without it."
REREAD = "Read it with the version of harnessrl_jax that wrote it; if that fails too, restore the file from a copy."


class RawCall(NamedTuple):
    """A row of the table of calls; the names are its columns."""

    rollout_id: str
    attempt: int
    life: int
    call_id: str
    group_id: str
    seq: int
    choice: int
    state: str
    record: str | None
    prompt_ids: bytes
    output_ids: bytes | None
    logps: bytes | None
    request: str
    notes: str
    digest: str | None

    @property
    def where(self) -> str:
        """What a finding calls it."""
        return f"call {self.call_id!r} of rollout {self.rollout_id!r}, attempt {self.attempt}, life {self.life}"


class RawRollout(NamedTuple):
    """A row of the table of rollouts; the names are its columns."""

    rollout_id: str
    attempt: int
    life: int
    group_id: str
    version: int
    status: str
    record: str
    digest: str

    @property
    def where(self) -> str:
        """What a finding calls it."""
        return f"rollout {self.rollout_id!r}, attempt {self.attempt}, life {self.life}"


Attempts = Mapping[tuple[str, int], int]
"""Latest life by rollout_id and attempt."""


def read_call(row: RawCall, run_id: str | None) -> tuple[list[Finding], StoredCall | None]:
    """What is wrong with one row, and its record.

    Args:
      row: any row of the table.
      run_id: the run that owns the store, if it says so.

    Returns:
      The findings, and the record where the row holds one that can be read.
    """
    out = _state(row) + _torn(row)
    if out or row.record is None or row.output_ids is None:
        return out, None
    seal = digest(row.record, row.prompt_ids, row.output_ids, row.logps or b"", row.request)
    if seal != row.digest:
        what = "the row does not match its digest; it was changed or damaged after it was written"
        out.append(Finding("digest", row.where, what, RESTORE))
    packed = CallRow(
        row.call_id, row.state, row.record, row.prompt_ids, row.output_ids, row.logps, row.request, row.notes, seal
    )
    try:
        stored = unpack_call(packed, row.where)
    except (HarnessRLError, ValueError, TypeError) as error:
        return [*out, Finding("record", row.where, f"no record: {error}", REREAD)], None
    call = stored.call
    names = ("rollout_id", "attempt", "call_id", "group_id", "seq", "choice")
    out += _columns(row, {name: getattr(call, name) for name in names}, call.run_id, run_id)
    return out, stored


def read_rollout(row: RawRollout, run_id: str | None) -> tuple[list[Finding], Rollout | None]:
    """What is wrong with one outcome, and its record; as `read_call`."""
    out: list[Finding] = []
    if digest(row.record) != row.digest:
        what = "the row does not match its digest; it was changed or damaged after it was written"
        out.append(Finding("digest", row.where, what, "Restore the file from a copy."))
    try:
        rollout = Rollout.from_json(json.loads(row.record))
    except (HarnessRLError, ValueError, TypeError, AttributeError) as error:
        return [*out, Finding("record", row.where, f"no record: {error}", REREAD)], None
    names = ("rollout_id", "attempt", "group_id", "version", "status")
    return out + _columns(row, {name: getattr(rollout, name) for name in names}, rollout.run_id, run_id), rollout


def orphan(row: RawCall | RawRollout, attempts: Attempts) -> list[Finding]:
    """Whether a row belongs to an attempt that was opened."""
    latest = attempts.get((row.rollout_id, row.attempt))
    if latest is None:
        what = "belongs to an attempt that was never opened, so that nothing reads it"
    elif row.life > latest:
        what = f"belongs to life {row.life} of an attempt that was opened {latest} times, so that nothing reads it"
    else:
        return []
    return [Finding("orphan", row.where, what, "Delete the row, or restore the row of its attempt.")]


def _state(row: RawCall) -> list[Finding]:
    """A call is in exactly one state, and its columns hold what that state says."""
    answered = row.state in (*ANSWERED, "late")
    missing = [name for name in ("record", "output_ids", "digest") if getattr(row, name) is None]
    if row.state not in STATES:
        what = f"state {row.state!r} is none of {', '.join(STATES)}"
    elif answered and missing:
        what = f"state {row.state!r}, but {', '.join(missing)} is missing: the answer was never stored"
    elif row.state in ("intent", "lost") and len(missing) < 3:
        what = f"state {row.state!r}, but the row holds an answer"
    else:
        return []
    return [Finding("state", row.where, what, RESTORE)]


def _torn(row: RawCall) -> list[Finding]:
    """Arrays of four bytes an item, and one log-probability for each sampled id."""
    size = {
        name: len(value) for name in ("prompt_ids", "output_ids", "logps") if (value := getattr(row, name)) is not None
    }
    what = [
        f"{name} has {length} bytes, which is no whole number of ids" for name, length in size.items() if length % 4
    ]
    if "logps" in size and size["logps"] != size.get("output_ids"):
        what.append(f"{size['logps'] // 4} log-probabilities for {size.get('output_ids', 0) // 4} sampled ids")
    return [Finding("torn", row.where, text, RESTORE) for text in what]


def _columns(row: RawCall | RawRollout, record: Mapping[str, object], run: str, owner: str | None) -> list[Finding]:
    wrong = [
        f"{name} is {getattr(row, name)!r} in its column and {value!r} in its record"
        for name, value in record.items()
        if getattr(row, name) != value
    ]
    if owner is not None and run != owner:
        wrong.append(f"run_id is {run!r}, but the store belongs to run {owner!r}")
    return [Finding("column", row.where, what, RESTORE) for what in wrong]
