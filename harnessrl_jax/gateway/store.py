"""Calls and rollouts -> a durable SQLite file, and back. A call is one row that goes through states.

    intent -> sampled -> delivered | undelivered        intent -> failed | late | lost

`intent` is written before sampling, `sampled` is on disk before the reply's last byte leaves, `delivered` follows it.
`lost` marks intents that a dead process left behind; `late` came after the rollout was closed.
"""

import json
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from harnessrl_jax.errors import StoreError
from harnessrl_jax.gateway import schema
from harnessrl_jax.gateway.rows import (
    CallKey,
    CallRow,
    Intent,
    StoredCall,
    pack_call,
    pack_rollout,
    unpack_call,
    unpack_rollout,
)
from harnessrl_jax.gateway.writer import Operation, Writer
from harnessrl_jax.trajectories.records import Call, Rollout

ANSWERED = ("sampled", "delivered", "undelivered")


class Store:
    """The calls and rollouts of one run, safe to use from any thread.

    Args:
      path: the SQLite file; it is created if missing.
      run_id: the run that owns it; another run's file is refused. None accepts any.
      read_only: look at a store that another process may be writing.

    Raises:
      StoreError: the file is torn, newer, another run's, or being written by another process.

    Attributes:
      lost: intents found at opening whose process died before an answer was stored.
    """

    def __init__(self, path: Path, *, run_id: str | None = None, read_only: bool = False) -> None:
        self.path = path
        self.lost = 0
        self._reading = threading.Lock()
        self._writer: Writer | None = None
        self._lock = None if read_only else schema.lock(path)
        try:
            self._reader = schema.open_reader(path, run_id, create=not read_only)
        except StoreError:
            self._unlock()
            raise
        if not read_only:
            self._writer = Writer(lambda: schema.connect(path), f"Call store {path}")
            try:
                self.lost = self._writer.commit_blocking(_mark_lost)
            except StoreError:
                self.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Commits what is queued and gives the file back. Idempotent."""
        # The writer goes last: closing the last connection that may write folds the log into the one file.
        with self._reading:
            self._reader.close()
        if self._writer is not None:
            self._writer.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # Writing

    @property
    def writer(self) -> Writer:
        """The thread that writes; StoreError on a read-only store."""
        if self._writer is None:
            raise StoreError(f"Call store {self.path} was opened to read only. Open it without read_only to write.")
        return self._writer

    def open_attempt(self, rollout_id: str, attempt: int) -> int:
        """Starts a life of an attempt, and returns its number, from 1. Durable.

        Rows of earlier lives are hidden, and with them every later attempt of the rollout: attempts follow one another,
        so those that are there already are what a killed process left.
        """

        def operation(connection: sqlite3.Connection) -> int:
            connection.execute(
                "UPDATE attempts SET life = life + 1 WHERE rollout_id = ? AND attempt > ?", (rollout_id, attempt)
            )
            row = connection.execute(
                "INSERT INTO attempts VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET life = life + 1 RETURNING life",
                (rollout_id, attempt),
            ).fetchone()
            return int(row[0])

        return self.writer.commit_blocking(operation)

    def intend(self, intents: Iterable[Intent], notes: Mapping[str, Any]) -> None:
        """Queues the rows of calls about to be sampled; durable at the latest with the next awaited commit."""
        note = json.dumps(notes)
        rows = [
            (*i.key, i.group_id, i.seq, i.choice, i.prompt_ids.astype(np.int32).tobytes(), i.request, note)
            for i in intents
        ]
        self.writer.put(_each(_INTEND, rows))

    async def sampled(self, life: int, calls: Iterable[Call], state: str = "sampled") -> None:
        """Stores what was sampled; returns when it is on disk.

        Args:
          life: what `open_attempt` returned.
          calls: completed records of intended calls.
          state: "sampled", or "late" for calls that no longer count.

        Raises:
          StoreError: the disk or the database failed; the reply must not be sent.
        """
        rows = [(state, *pack_call(call), call.rollout_id, call.attempt, life, call.call_id) for call in calls]
        await self.writer.commit(_each(_SAMPLED, rows))

    def settle(self, keys: Iterable[CallKey], state: str, detail: str = "") -> None:
        """Queues the last state of calls: delivered, undelivered or failed."""
        rows = [(state, detail, *key) for key in keys]
        self.writer.put(_each(_SETTLE, rows))

    def put_rollout(self, rollout: Rollout) -> None:
        """Stores the outcome of an attempt; returns when it is on disk. The same record twice is one.

        Raises:
          StoreError: the attempt has another outcome already.
        """
        self.writer.commit_blocking(_put_rollout(rollout))

    def flush(self) -> None:
        """Returns when everything queued before is on disk."""
        self.writer.commit_blocking(lambda connection: None)

    # Reading

    def calls(self, rollout_id: str, attempt: int, states: Iterable[str] = ANSWERED) -> list[StoredCall]:
        """Calls of one attempt, in order of arrival."""
        return list(self._stored("c.rollout_id = ? AND c.attempt = ?", (rollout_id, attempt), states))

    def calls_of_group(self, group_id: str, states: Iterable[str] = ANSWERED) -> list[StoredCall]:
        """Calls of every attempt of every rollout of a group, by rollout, attempt and order of arrival."""
        return list(self._stored("c.group_id = ?", (group_id,), states))

    def next_attempt(self, rollout_id: str) -> int:
        """The first attempt of a rollout that was never opened here, from 0."""
        query = "SELECT max(attempt) FROM attempts WHERE rollout_id = ?"
        last = self._select(query, (rollout_id,))[0][0]
        return 0 if last is None else last + 1

    def groups(self) -> list[str]:
        """Every group that has a call or an outcome, sorted."""
        return [
            row[0]
            for row in self._select("SELECT group_id FROM calls UNION SELECT group_id FROM rollouts ORDER BY 1", ())
        ]

    def rollouts(self, group_id: str | None = None) -> list[Rollout]:
        """Outcomes, of one group or of all, by group, rollout and attempt."""
        where = "" if group_id is None else "WHERE r.group_id = ?"
        query = f"SELECT r.record, r.digest {_LATEST_ROLLOUTS} {where} ORDER BY r.group_id, r.rollout_id, r.attempt"
        rows = self._select(query, () if group_id is None else (group_id,))
        return [unpack_rollout(record, seal, str(self.path)) for record, seal in rows]

    def counts(self) -> dict[str, int]:
        """Calls by state and rollouts by status, as `calls/STATE` and `rollouts/STATUS`; hidden rows as `abandoned`."""
        out: Counter[str] = Counter()
        for kind, column, latest in (("calls", "c.state", _LATEST_CALLS), ("rollouts", "r.status", _LATEST_ROLLOUTS)):
            counted = self._select(f"SELECT {column}, count(*) {latest} GROUP BY {column} ORDER BY {column}", ())
            out.update({f"{kind}/{name}": number for name, number in counted})
            total = self._select(f"SELECT count(*) FROM {kind}", ())[0][0]
            if hidden := total - sum(number for _, number in counted):
                out[f"{kind}/abandoned"] = hidden
        return dict(out)

    def _stored(self, where: str, values: tuple[Any, ...], states: Iterable[str]) -> Iterator[StoredCall]:
        wanted = tuple(states)
        query = (
            f"SELECT c.call_id, c.state, c.record, c.prompt_ids, c.output_ids, c.logps, c.request, c.notes, c.digest "
            f"{_LATEST_CALLS} WHERE {where} AND c.state IN ({', '.join('?' * len(wanted))}) AND c.record IS NOT NULL "
            "ORDER BY c.rollout_id, c.attempt, c.seq, c.choice"
        )
        for row in self._select(query, (*values, *wanted)):
            yield unpack_call(CallRow(*row), str(self.path))

    def _select(self, query: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        try:
            with self._reading:
                return self._reader.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise StoreError(
                f"Call store {self.path} cannot be read: {error}. Open it again, or run a fresh copy."
            ) from error


_INTEND = (
    "INSERT INTO calls (rollout_id, attempt, life, call_id, group_id, seq, choice, prompt_ids, request, notes, state) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'intent')"
)
_ROW = "WHERE rollout_id = ? AND attempt = ? AND life = ? AND call_id = ?"
_SAMPLED = f"UPDATE calls SET state = ?, record = ?, output_ids = ?, logps = ?, digest = ? {_ROW}"
_SETTLE = f"UPDATE calls SET state = ?, detail = ? {_ROW}"
_LATEST_CALLS = "FROM calls c JOIN attempts a USING (rollout_id, attempt, life)"
_LATEST_ROLLOUTS = "FROM rollouts r JOIN attempts a USING (rollout_id, attempt, life)"


def _each(statement: str, rows: list[tuple[Any, ...]]) -> Operation:
    # Nothing is returned: a cursor must not reach another thread, where its end would disturb the connection.
    def operation(connection: sqlite3.Connection) -> None:
        connection.executemany(statement, rows)

    return operation


def _mark_lost(connection: sqlite3.Connection) -> int:
    reason = "the process ended before an answer was stored"
    return connection.execute("UPDATE calls SET state = 'lost', detail = ? WHERE state = 'intent'", (reason,)).rowcount


def _put_rollout(rollout: Rollout) -> Operation:
    record, seal = pack_rollout(rollout)
    key = (rollout.rollout_id, rollout.attempt)

    def operation(connection: sqlite3.Connection) -> None:
        stored = connection.execute(
            f"SELECT r.digest {_LATEST_ROLLOUTS} WHERE r.rollout_id = ? AND r.attempt = ?", key
        ).fetchone()
        if stored is not None and stored[0] != seal:
            raise StoreError(
                f"Rollout {rollout.rollout_id!r}, attempt {rollout.attempt}, is stored with another outcome. An "
                "outcome is written once; run the rollout again as a new attempt."
            )
        if stored is None:
            connection.execute("INSERT INTO attempts VALUES (?, ?, 1) ON CONFLICT DO NOTHING", key)
            life = "SELECT rollout_id, attempt, life, ?, ?, ?, ?, ? FROM attempts WHERE rollout_id = ? AND attempt = ?"
            values = (rollout.group_id, rollout.version, rollout.status, record, seal, *key)
            connection.execute(f"INSERT INTO rollouts {life}", values)

    return operation
