"""`doctor`: reads a call store, or the store of a run folder, and says what breaks the rules, where, and the fix."""

import contextlib
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from harnessrl_jax.errors import LineageError, StoreError
from harnessrl_jax.gateway import TextCodec, schema
from harnessrl_jax.gateway.capture import Reader
from harnessrl_jax.gateway.dialects import PATHS
from harnessrl_jax.gateway.exchange import Request
from harnessrl_jax.gateway.refusal import Refusal
from harnessrl_jax.gateway.rows import StoredCall
from harnessrl_jax.gateway.store import ANSWERED
from harnessrl_jax.launch.kept import locate
from harnessrl_jax.launch.store_audit import RawCall, RawRollout, orphan, read_call, read_rollout
from harnessrl_jax.monitor.views import printable
from harnessrl_jax.trajectories import Call, Lineage, Rollout, build_lineage
from harnessrl_jax.trajectories.audit import (
    CallPlace,
    Finding,
    audit_calls,
    audit_names,
    audit_parsing,
    audit_prompt,
)
from harnessrl_jax.trajectories.balance import audit_lineage, audit_weights

SHOWN = 5
"""Findings of one rule that are printed; the others are counted."""

Reread = Callable[[Call], list[Finding]]


class Audit(NamedTuple):
    """What a store holds, what is wrong with it, and what could not be looked at."""

    path: Path
    findings: tuple[Finding, ...]
    counts: dict[str, int]
    skipped: tuple[str, ...]


def doctor(target: Path, model: Path | None, *, every: bool = False) -> int:
    """Prints the audit of a store.

    Args:
      target: a run folder, or a call store.
      model: folder of the tokenizer that captured the calls; a run folder knows its own.
      every: print all findings, not the first few of each kind.

    Returns:
      0 if nothing is wrong, 1 if something is.

    Raises:
      ConfigError: there is no such store.
      TextError: the model folder cannot be read.
    """
    found = audit(target, model)
    _print(Console(highlight=False), found, len(found.findings) if every else SHOWN)
    return 1 if found.findings else 0


def audit(target: Path, model: Path | None = None) -> Audit:
    """Every check on every row; see `doctor`."""
    kept = locate(target, model)
    finished = kept.folder is not None and kept.folder.finished() is not None
    store, reread = kept.store, _reread(kept.codec())
    skipped = () if reread else ("tool calls and roles: give the tokenizer with --model FOLDER",)
    try:
        with contextlib.closing(schema.open_reader(store, None, create=False)) as connection:
            connection.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
            findings, counts = _audit(connection, reread, finished=finished)
    except StoreError as error:
        findings, counts = [Finding("file", str(store), str(error), "See above; nothing else can be checked.")], {}
    return Audit(store, tuple(findings), counts, skipped)


def _reread(codec: TextCodec | None) -> Reread | None:
    """Reads a call's sampled ids again, as its request asked for; None without a tokenizer."""
    if codec is None:
        return None
    reader = Reader(codec)

    def check(call: Call) -> list[Finding]:
        request = _request(call)
        finish = "length" if call.finish == "length" else "stop"
        roles = reader.roles(call.output_ids.tolist(), finish, () if request is None else request.tools)
        return audit_parsing(call, roles, served=request is None or request.calls)

    return check


def _request(call: Call) -> Request | None:
    """The request of a call in the gateway's form; None if it came another way, or is no request any more."""
    dialect = next((dialect for dialect in PATHS.values() if dialect.name == call.dialect), None)
    try:
        return None if dialect is None else dialect.parse(call.request)
    except Refusal:
        return None


def _audit(
    connection: sqlite3.Connection, reread: Reread | None, *, finished: bool
) -> tuple[list[Finding], dict[str, int]]:
    ask = connection.execute
    out = [
        Finding("file", "indices and constraints", verdict, "Save what can be read with `sqlite3 FILE .recover`.")
        for (verdict,) in ask("PRAGMA integrity_check").fetchall()
        if verdict != "ok"
    ]
    attempts = {
        (rollout, attempt): life for rollout, attempt, life in ask("SELECT rollout_id, attempt, life FROM attempts")
    }
    owner = ask("SELECT value FROM settings WHERE name = 'run_id'").fetchone()
    run_id = owner[0] if owner else None
    outcomes: dict[str, list[Rollout]] = {}
    decided: dict[tuple[str, int], str] = {}
    rows = ask(f"SELECT {', '.join(RawRollout._fields)} FROM rollouts ORDER BY rollout_id, attempt, life")
    for raw in (RawRollout(*row) for row in rows):
        wrong, rollout = read_rollout(raw, run_id)
        out += orphan(raw, attempts) + wrong
        if raw.life == attempts.get((raw.rollout_id, raw.attempt)):
            decided[raw.rollout_id, raw.attempt] = raw.status
            if rollout is not None:
                outcomes.setdefault(raw.group_id, []).append(rollout)
    places: list[CallPlace] = []
    counts: Counter[str] = Counter(rollouts=sum(map(len, outcomes.values())))
    groups = {row[0] for row in ask("SELECT DISTINCT group_id FROM calls")} | set(outcomes)
    for group in sorted(groups):
        stored: list[StoredCall] = []
        rows = ask(f"SELECT {', '.join(RawCall._fields)} FROM calls WHERE group_id = ? ORDER BY seq, choice", (group,))
        for raw in (RawCall(*row) for row in rows):
            wrong, call = read_call(raw, run_id)
            out += orphan(raw, attempts) + wrong
            current = raw.life == attempts.get((raw.rollout_id, raw.attempt))
            counts[raw.state if current else "abandoned"] += 1
            if current and call is not None and raw.state in ANSWERED:
                stored.append(call)
                places.append(CallPlace(raw.call_id, raw.rollout_id, raw.attempt, raw.seq, raw.choice))
        out += _group(stored, outcomes.get(group, []), reread)
    out += audit_names(places)
    if finished:
        out += _undecided(attempts, decided)
    return out, dict(counts)


def _group(stored: Sequence[StoredCall], rollouts: Sequence[Rollout], reread: Reread | None) -> list[Finding]:
    """Everything about the readable records of one group."""
    calls = [kept.call for kept in stored]
    out = audit_calls(calls, rollouts)
    lineages: list[Lineage] = []
    for attempt in _attempts(stored):
        own = [kept.call for kept in attempt]
        for kept in attempt:
            if reread is not None:
                out += reread(kept.call)
            out += audit_prompt(kept.call, kept.notes.get("spliced", ()), own)
        try:
            lineages.append(build_lineage(own))
        except LineageError as error:
            out.append(Finding("lineage", f"rollout {own[0].rollout_id!r}", str(error), "Remove what contradicts it."))
    for lineage in lineages:
        out += audit_lineage(lineage)
    return out + audit_weights(rollouts, lineages)


def _attempts(stored: Sequence[StoredCall]) -> Iterator[list[StoredCall]]:
    by_attempt: dict[tuple[str, int], list[StoredCall]] = {}
    for kept in stored:
        by_attempt.setdefault((kept.call.rollout_id, kept.call.attempt), []).append(kept)
    yield from by_attempt.values()


def _undecided(attempts: Mapping[tuple[str, int], int], decided: Mapping[tuple[str, int], str]) -> list[Finding]:
    """Attempts of a finished run that have no outcome; while a run goes on they are at work.

    An attempt that is not the machine's failure is the last: those behind it were left by a process that was killed,
    and are hidden.
    """
    last = {rollout: attempt for (rollout, attempt), status in decided.items() if status != "infra_failure"}
    what = "the run is finished, but the attempt has no outcome, so that its calls are in no group"
    fix = "Start the run again with its configuration, which runs what is missing; or delete the rows of the attempt."
    return [
        Finding("orphan", f"rollout {rollout!r}, attempt {attempt}", what, fix)
        for rollout, attempt in sorted(attempts.keys() - decided.keys())
        if attempt < last.get(rollout, attempt + 1)
    ]


def _print(console: Console, found: Audit, shown: int) -> None:
    held = ", ".join(f"{number:,} {name}" for name, number in sorted(found.counts.items()) if number)
    console.print(Text(f"{printable(str(found.path))}: {held or 'nothing'}"), soft_wrap=True)
    for what in found.skipped:
        console.print(Text(f"not checked: {what}", style="yellow"), soft_wrap=True)
    kinds = Counter(finding.rule for finding in found.findings)
    for rule, number in kinds.items():
        console.print(Text(f"\n{rule}: {number:,} wrong", style="bold red"))
        for finding in [finding for finding in found.findings if finding.rule == rule][:shown]:
            console.print(Text(printable(f"  {finding.where}\n    found: {finding.what}")), soft_wrap=True)
            console.print(Text(printable(f"    fix:   {finding.fix}"), style="green"), soft_wrap=True)
        if number > shown:
            console.print(Text(f"  and {number - shown:,} more; --all prints every one", style="grey62"))
    console.print(Text("\nNothing is wrong." if not found.findings else f"\n{len(found.findings):,} things are wrong."))
