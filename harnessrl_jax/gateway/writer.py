"""Operations from many threads and event loops -> few durable transactions, by one thread.

Whatever is queued when the thread is free becomes one transaction, so that many concurrent calls share one disk flush.
A caller that waits is told only after the commit.
"""

import asyncio
import sqlite3
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from harnessrl_jax.errors import StoreError

Operation = Callable[[sqlite3.Connection], Any]

_MAX_BATCH = 1024
# How long an operation that nobody waits for may stay in memory only.
_MOMENT_S = 0.02


class _Entry(NamedTuple):
    operation: Operation
    future: "Future[Any] | asyncio.Future[Any] | None"
    loop: asyncio.AbstractEventLoop | None = None


class Writes(NamedTuple):
    """What a writer has done.

    Attributes:
      transactions: durable transactions.
      operations: how many operations they held.
      failed: whether nothing can be written any more.
    """

    transactions: int
    operations: int
    failed: bool


class _Outcome(NamedTuple):
    entry: _Entry
    value: Any
    error: StoreError | None


class Writer:
    """Owns the one connection that writes.

    An operation that raises StoreError must not have written anything; only its own caller hears of it. After an error
    of the database itself nothing more is written: every later operation is refused with the same message.

    Args:
      connect: opens the connection; called in the writer's thread.
      where: what to call the store in messages.
    """

    def __init__(self, connect: Callable[[], sqlite3.Connection], where: str) -> None:
        self._transactions = self._operations = 0
        self._where = where
        self._connect = connect
        self._queue: deque[_Entry] = deque()
        self._wanted = threading.Event()
        self._failure: str | None = None
        self._closed = False
        self._gate = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="call-store", daemon=True)
        self._thread.start()

    @property
    def writes(self) -> Writes:
        """What was done so far."""
        return Writes(self._transactions, self._operations, self._failure is not None)

    def put(self, operation: Operation) -> None:
        """Queues an operation whose commit nobody waits for.

        It is committed with the next operation that somebody waits for, or within a moment; the order is kept.
        """
        self._submit(_Entry(operation, None))

    async def commit(self, operation: Operation) -> Any:
        """Queues an operation and returns its value when it is on disk.

        Raises:
          StoreError: the operation refused, or the database failed.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._submit(_Entry(operation, future, loop))
        self._wanted.set()
        return await future

    def commit_blocking(self, operation: Operation) -> Any:
        """The same for a thread without an event loop."""
        future: Future[Any] = Future()
        self._submit(_Entry(operation, future))
        self._wanted.set()
        return future.result()

    def close(self) -> None:
        """Commits what is queued and ends the thread. Idempotent."""
        with self._gate:
            self._closed = True
        self._wanted.set()
        self._thread.join()

    def _submit(self, entry: _Entry) -> None:
        # The gate keeps an entry from being queued after the thread has looked for the last time.
        with self._gate:
            if self._closed:
                raise StoreError(f"{self._where} is closed; nothing more can be written to it.")
            if self._failure is not None:
                raise StoreError(self._failure)
            self._queue.append(entry)

    def _run(self) -> None:
        connection: sqlite3.Connection | None = None
        try:
            connection = self._connect()
        except sqlite3.Error as error:
            self._fail(error)
        closing = False
        while not closing:
            self._wanted.wait(_MOMENT_S)
            self._wanted.clear()
            with self._gate:
                closing = self._closed
            while batch := self._next():
                _tell(self._execute(connection, batch) if connection else self._refused(batch))
        if connection is not None:
            connection.close()

    def _next(self) -> list[_Entry]:
        return [self._queue.popleft() for _ in range(min(len(self._queue), _MAX_BATCH))]

    def _execute(self, connection: sqlite3.Connection, batch: list[_Entry]) -> list[_Outcome]:
        if self._failure is not None:
            return self._refused(batch)
        outcomes: list[_Outcome] = []
        try:
            connection.execute("BEGIN IMMEDIATE")
            for entry in batch:
                try:
                    outcomes.append(_Outcome(entry, entry.operation(connection), None))
                except StoreError as error:
                    outcomes.append(_Outcome(entry, None, error))
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._fail(error)
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            return self._refused(batch)
        self._transactions += 1
        self._operations += len(batch)
        return outcomes

    def _fail(self, error: sqlite3.Error) -> None:
        self._failure = (
            f"{self._where} cannot be written: {error}. No reply is sent for a call that is not on disk. Free space or "
            "repair the disk, then start again: everything committed before is intact."
        )

    def _refused(self, batch: list[_Entry]) -> list[_Outcome]:
        return [_Outcome(entry, None, StoreError(self._failure)) for entry in batch]


def _tell(outcomes: list[_Outcome]) -> None:
    """Wakes every waiter; each event loop is woken once for the whole batch."""
    loops: dict[asyncio.AbstractEventLoop, list[_Outcome]] = {}
    for outcome in outcomes:
        if outcome.entry.loop is not None:
            loops.setdefault(outcome.entry.loop, []).append(outcome)
        elif outcome.entry.future is not None:
            _resolve([outcome])
    for loop, waiting in loops.items():
        try:
            loop.call_soon_threadsafe(_resolve, waiting)
        except RuntimeError:
            # The loop was closed: nobody is left to be told.
            continue


def _resolve(outcomes: list[_Outcome]) -> None:
    for entry, value, error in outcomes:
        if entry.future is None or entry.future.cancelled():
            continue
        if error is not None:
            entry.future.set_exception(error)
        else:
            entry.future.set_result(value)
