"""A path -> a checked SQLite database of calls; a torn, newer or foreign file is refused with the way out."""

import contextlib
import sqlite3
from pathlib import Path

from harnessrl_jax.errors import StoreError

APPLICATION_ID = 0x48524C58
SCHEMA_VERSION = 1

# An attempt that a resumed run opens again gets a new `life`; only the rows of its latest life count.
_TABLES = """
CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE attempts (
  rollout_id TEXT NOT NULL, attempt INTEGER NOT NULL, life INTEGER NOT NULL,
  PRIMARY KEY (rollout_id, attempt)
) STRICT;
CREATE TABLE calls (
  rollout_id TEXT NOT NULL, attempt INTEGER NOT NULL, life INTEGER NOT NULL, call_id TEXT NOT NULL,
  group_id TEXT NOT NULL, seq INTEGER NOT NULL, choice INTEGER NOT NULL,
  state TEXT NOT NULL, detail TEXT NOT NULL DEFAULT '',
  record TEXT, prompt_ids BLOB NOT NULL, output_ids BLOB, logps BLOB,
  request TEXT NOT NULL, notes TEXT NOT NULL, digest TEXT,
  UNIQUE (rollout_id, attempt, life, call_id)
) STRICT;
CREATE INDEX calls_of_group ON calls (group_id);
CREATE TABLE rollouts (
  rollout_id TEXT NOT NULL, attempt INTEGER NOT NULL, life INTEGER NOT NULL,
  group_id TEXT NOT NULL, version INTEGER NOT NULL, status TEXT NOT NULL,
  record TEXT NOT NULL, digest TEXT NOT NULL,
  UNIQUE (rollout_id, attempt, life)
) STRICT;
CREATE INDEX rollouts_of_group ON rollouts (group_id);
"""


def open_reader(path: Path, run_id: str | None, *, create: bool) -> sqlite3.Connection:
    """A checked connection that reads.

    Args:
      path: the file.
      run_id: the run that owns it, or None to accept any.
      create: whether to create the database where there is none.

    Raises:
      StoreError: the file is missing, cannot be trusted, or belongs to another run.
    """
    if not create and not path.exists():
        raise StoreError(f"{path}: no such file. Give the path of a run's call store.")
    with contextlib.ExitStack() as stack:
        try:
            if create:
                with contextlib.closing(connect(path)) as writing:
                    _create(writing, run_id)
            reader = stack.enter_context(contextlib.closing(connect(path, read_only=True)))
            _check(reader, path, run_id)
        except sqlite3.DatabaseError as error:
            raise StoreError(_torn(path, str(error))) from error
        stack.pop_all()
    return reader


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """A connection in autocommit mode that flushes to disk at every commit."""
    address = f"{path.resolve().as_uri()}?mode={'ro' if read_only else 'rwc'}"
    connection = sqlite3.connect(address, uri=True, isolation_level=None, check_same_thread=False, timeout=30.0)
    try:
        connection.execute("PRAGMA synchronous = FULL")
    except sqlite3.DatabaseError:
        connection.close()
        raise
    return connection


def lock(path: Path) -> sqlite3.Connection:
    """Keeps every other writer out until the returned connection is closed or the process ends.

    Raises:
      StoreError: another process writes this store.
    """
    if not path.parent.is_dir():
        raise StoreError(f"{path}: the folder {path.parent} does not exist. Create it, or give another path.")
    holder = sqlite3.connect(f"{path}.lock", timeout=0.0, isolation_level=None, check_same_thread=False)
    try:
        holder.execute("BEGIN EXCLUSIVE")
    except sqlite3.OperationalError as error:
        holder.close()
        raise StoreError(
            f"{path}: another process is writing this store. Wait for it or stop it; to look at the store meanwhile, "
            "open it read-only."
        ) from error
    return holder


def _check(connection: sqlite3.Connection, path: Path, run_id: str | None) -> None:
    """Refuses a database that this version cannot trust."""
    if _pragma(connection, "application_id") != APPLICATION_ID:
        raise StoreError(f"{path}: a SQLite file, but not a call store. Give another path, or move the file away.")
    version = _pragma(connection, "user_version")
    if version != SCHEMA_VERSION:
        age = "more recent" if version > SCHEMA_VERSION else "less recent"
        raise StoreError(
            f"{path}: store schema {version}, from a {age} version of harnessrl_jax; this one reads schema "
            f"{SCHEMA_VERSION}. Use the version that wrote the file, or give another path."
        )
    verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if verdict != "ok":
        raise StoreError(_torn(path, " ".join(verdict.split())))
    owner = connection.execute("SELECT value FROM settings WHERE name = 'run_id'").fetchone()
    if run_id is not None and owner is not None and owner[0] != run_id:
        raise StoreError(
            f"{path}: holds the calls of run {owner[0]!r}, not of {run_id!r}. Calls of two runs are never mixed: give "
            "each run its own folder."
        )


def _create(connection: sqlite3.Connection, run_id: str | None) -> None:
    """Writes the tables into an empty file; leaves any other alone."""
    if connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
        return
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("BEGIN IMMEDIATE")
    for statement in _TABLES.split(";"):
        connection.execute(statement)
    if run_id is not None:
        connection.execute("INSERT INTO settings VALUES ('run_id', ?)", (run_id,))
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute("COMMIT")


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _torn(path: Path, reason: str) -> str:
    return (
        f"{path}: damaged or not a SQLite file ({reason}). Save what can be read with `sqlite3 {path.name} .recover`, "
        "or move the file away and start with an empty store."
    )
