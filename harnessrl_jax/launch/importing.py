"""`import`: files of lines, or ATIF documents -> a new call store; what is assumed or passed over is counted."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from harnessrl_jax.errors import ConfigError, RecordError
from harnessrl_jax.gateway import Store
from harnessrl_jax.gateway.rows import CallKey, Intent
from harnessrl_jax.launch.kept import Attempt, Format, report
from harnessrl_jax.trajectories import LogpKind, Rollout
from harnessrl_jax.trajectories.audit import CallPlace, audit_names
from harnessrl_jax.trajectories.interchange import KeptCall, Origin, Records, from_atif, from_lines


class Foreign(NamedTuple):
    """What the command line says of ATIF documents that another program wrote."""

    run_id: str
    task_id: str | None
    """None gives each document a task of its own, named like its file."""
    trainable_agents: tuple[str, ...] | None
    logp_kind: LogpKind | None
    version: int


def take_in(files: Sequence[Path], form: Format, store: Path, foreign: Foreign) -> int:
    """Reads files into a new call store.

    Raises:
      ConfigError: the store exists already, or a file cannot be read.
      RecordError: a file holds something that is no record; the message names file and place.
    """
    if store.exists():
        raise ConfigError(f"{store}: exists already. Calls are taken into a new store only; give another path.")
    notes: Counter[str] = Counter()
    found: list[Records] = []
    for path in files:
        try:
            found.append(_read_lines(path) if form == "jsonl" else _read_document(path, foreign, notes))
        except RecordError as error:
            raise RecordError(f"{path}: {error}") from error
    calls = [item for records in found for item in records.calls]
    rollouts = [rollout for records in found for rollout in records.rollouts]
    _check_names(calls, rollouts)
    runs = sorted({item.call.run_id for item in calls} | {rollout.run_id for rollout in rollouts})
    if len(runs) != 1:
        raise ConfigError(
            f"The files hold records of {len(runs)} runs ({', '.join(runs) or 'none'}); a store belongs to one run. "
            "Import the runs one by one."
        )
    with Store(store, run_id=runs[0]) as opened:
        for attempt in _grouped(calls, rollouts):
            _put(opened, attempt)
    report(f"{len(calls):,} calls and {len(rollouts):,} outcomes in {store}", "assumed or passed over", notes)
    return 0


def _read_lines(path: Path) -> Records:
    with _open(path) as file:
        return from_lines(file)


def _read_document(path: Path, foreign: Foreign, notes: Counter[str]) -> Records:
    with _open(path) as file:
        try:
            document = json.load(file)
        except (ValueError, RecursionError) as error:
            raise RecordError(f"not JSON ({error}).") from error
    if not isinstance(document, dict):
        raise RecordError(f"a JSON object is wanted, got {type(document).__name__}.")
    origin = Origin(
        run_id=foreign.run_id,
        task_id=foreign.task_id or path.stem,
        rollout_id=path.stem,
        trainable_agents=foreign.trainable_agents,
        logp_kind=foreign.logp_kind,
        version=foreign.version,
    )
    records, said = from_atif(document, origin)
    notes.update(said)
    return records


def _open(path: Path) -> TextIO:
    try:
        return path.open(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}. Give files that were exported before.") from error


def _check_names(calls: Sequence[KeptCall], rollouts: Sequence[Rollout]) -> None:
    """Refuses records that are there twice, before anything is written."""
    places = [CallPlace(c.call_id, c.rollout_id, c.attempt, c.seq, c.choice) for c in (item.call for item in calls)]
    for finding in audit_names(places):
        raise RecordError(f"{finding.where}: {finding.what}. {finding.fix}")
    seen: set[tuple[str, int]] = set()
    for rollout in rollouts:
        key = (rollout.rollout_id, rollout.attempt)
        if key in seen:
            raise RecordError(f"rollout {key[0]!r}, attempt {key[1]}, has two outcomes in the files. Give each once.")
        seen.add(key)


def _grouped(calls: Sequence[KeptCall], rollouts: Sequence[Rollout]) -> Iterator[Attempt]:
    outcome = {(rollout.rollout_id, rollout.attempt): rollout for rollout in rollouts}
    by_attempt: dict[tuple[str, int], list[KeptCall]] = {key: [] for key in outcome}
    for item in calls:
        by_attempt.setdefault((item.call.rollout_id, item.call.attempt), []).append(item)
    for key, own in sorted(by_attempt.items()):  # an attempt hides those behind it when it is opened
        yield Attempt(outcome.get(key), tuple(own))


def _put(store: Store, attempt: Attempt) -> None:
    """Writes one attempt through the states that its calls went through."""
    if attempt.calls:
        first = attempt.calls[0].call
        life = store.open_attempt(first.rollout_id, first.attempt)
        for item in attempt.calls:
            call = item.call
            key = CallKey(call.rollout_id, call.attempt, life, call.call_id)
            intent = Intent(key, call.group_id, call.seq, call.choice, call.prompt_ids, call.request)
            store.intend([intent], item.notes)
        for state in ("sampled", "late"):
            own = [item.call for item in attempt.calls if (item.state == "late") == (state == "late")]
            asyncio.run(store.sampled(life, own, state))
        for item in attempt.calls:
            if item.state in ("delivered", "undelivered"):
                key = CallKey(item.call.rollout_id, item.call.attempt, life, item.call.call_id)
                store.settle([key], item.state)
    if attempt.rollout is not None:
        store.put_rollout(attempt.rollout)
