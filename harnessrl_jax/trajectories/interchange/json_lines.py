"""Calls and rollouts <-> lines of JSON, one record a line, nothing lost. NumPy only, no file.

The first line names the format and its number. Every other is a record with the schema number of its own, so that a
file that was cut, joined or edited is refused with the number of the line.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

from harnessrl_jax.errors import RecordError
from harnessrl_jax.trajectories.records import Call, Rollout

FORMAT = "harnessrl_jax.calls"
VERSION = 1
STATES = ("sampled", "delivered", "undelivered", "late")


class KeptCall(NamedTuple):
    """A call, and what its store knew besides.

    Attributes:
      call: the record.
      state: "sampled", "delivered", "undelivered" or "late"; `call.delivered` is True exactly if it is "delivered".
      notes: what the gateway noted, JSON values.
    """

    call: Call
    state: str
    notes: Mapping[str, Any]


class Records(NamedTuple):
    """What a file holds, in its order."""

    calls: tuple[KeptCall, ...]
    rollouts: tuple[Rollout, ...]


def kept(call: Call) -> KeptCall:
    """A call of which no more is known than its record says."""
    return KeptCall(call, "delivered" if call.delivered else "sampled", {})


def to_lines(calls: Iterable[KeptCall], rollouts: Iterable[Rollout]) -> Iterator[str]:
    """One line for each record, without the line break; outcomes first.

    >>> list(to_lines([], []))
    ['{"format": "harnessrl_jax.calls", "version": 1}']
    """
    yield json.dumps({"format": FORMAT, "version": VERSION})
    for rollout in rollouts:
        yield json.dumps({"record": "rollout"} | rollout.to_json(), allow_nan=False)
    for item in calls:
        about = {"record": "call", "state": item.state, "notes": dict(item.notes)}
        yield json.dumps(about | item.call.to_json(), allow_nan=False)


def from_lines(lines: Iterable[str]) -> Records:
    """The records that `to_lines` wrote.

    Args:
      lines: with or without line breaks; empty ones are passed over.

    Returns:
      Equal records, in the order of the lines.

    Raises:
      RecordError: a line is no record of this format; the message has its number.

    Example:
      >>> from_lines(to_lines([], []))
      Records(calls=(), rollouts=())
    """
    calls: list[KeptCall] = []
    rollouts: list[Rollout] = []
    begun = False
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        data = _object(number, line)
        if not begun:
            _check_head(number, data)
            begun = True
            continue
        try:
            record = _record(data)
        except RecordError as error:
            raise RecordError(f"line {number}: {error}") from error
        if isinstance(record, Rollout):
            rollouts.append(record)
        else:
            calls.append(record)
    if not begun:
        raise RecordError("line 1: the file is empty. A file of calls begins with a line that names its format.")
    return Records(tuple(calls), tuple(rollouts))


def _object(number: int, line: str) -> dict[str, Any]:
    try:
        data: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordError(
            f"line {number}: not JSON ({error}). If it is the last line, the file was cut; export it again."
        ) from error
    if not isinstance(data, dict):
        raise RecordError(f"line {number}: a JSON object is wanted, got {type(data).__name__}.")
    return cast(dict[str, Any], data)


def _check_head(number: int, data: Mapping[str, Any]) -> None:
    if data.get("format") != FORMAT:
        raise RecordError(
            f"line {number}: format is {data.get('format')!r}, wanted {FORMAT!r}. The first line of a file of calls "
            "names its format."
        )
    if data.get("version") != VERSION:
        raise RecordError(
            f"line {number}: version {data.get('version')!r} of the format, this version of the library reads "
            f"{VERSION}. Read the file with the version that wrote it."
        )


def _record(data: dict[str, Any]) -> KeptCall | Rollout:
    kind = data.pop("record", None)
    if kind == "rollout":
        return Rollout.from_json(data)
    if kind != "call":
        raise RecordError(f"record is {kind!r}; wanted 'call' or 'rollout'.")
    state, notes = data.pop("state", None), data.pop("notes", None)
    if state not in STATES or not isinstance(notes, dict):
        raise RecordError(
            f"state is {state!r}, wanted one of {', '.join(STATES)}; notes is {notes!r}, wanted an object."
        )
    call = Call.from_json(data)
    if call.delivered != (state == "delivered"):
        raise RecordError(f"call {call.call_id!r} has delivered = {call.delivered} and state {state!r}, which differ.")
    return KeptCall(call, state, cast(dict[str, Any], notes))
