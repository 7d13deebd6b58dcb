"""Passages -> a full-text index in one SQLite file, and the reference search over it.

Table `passages(id UNINDEXED, text)`, FTS5 with the tokenizer `unicode61`. A query becomes its words, without stop
words, each quoted, OR-ed; results are ordered by bm25, then by rowid, so that the order is the same on every machine.
"""

import contextlib
import functools
import os
import re
import sqlite3
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from harnessrl_jax.errors import TaskError
from harnessrl_jax.tasks.facts import Fact, Passage

RESULTS = 3
MAX_TERMS = 24
REMEMBERED = 4096
STOP_WORDS = frozenset(("what", "which", "is", "are", "the", "of", "with", "whose", "country", "and", "a"))

Search = Callable[[str], Sequence[Passage]]
"""A query -> the passages found, best first."""


def match_expression(query: str) -> str:
    r"""A query of any text -> an FTS5 expression without syntax from the query; empty if there is nothing to look for.

    >>> match_expression('country whose "capital" is N\'Djamena')
    '"capital" OR "n" OR "djamena"'
    """
    words = list(dict.fromkeys(re.findall(r"[^\W_]+", query.lower())))
    terms = [word for word in words if word not in STOP_WORDS] or words
    return " OR ".join(f'"{term}"' for term in terms[:MAX_TERMS])


def build_index(facts: Iterable[Fact], path: str | os.PathLike[str]) -> None:
    """Writes the index of `facts` to `path`, replacing a file that is there; the file appears whole or not at all.

    Raises:
      TaskError: the SQLite of this Python has no FTS5.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    unfinished.unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(unfinished)) as connection:
        _fill(connection, facts)
    os.replace(unfinished, path)


def _fill(connection: sqlite3.Connection, facts: Iterable[Fact]) -> None:
    try:
        connection.execute("CREATE VIRTUAL TABLE passages USING fts5(id UNINDEXED, text, tokenize='unicode61')")
    except sqlite3.OperationalError as error:
        raise TaskError(
            f"the search index needs SQLite with FTS5, but SQLite {sqlite3.sqlite_version} says: {error}. "
            "Use a Python build whose sqlite3 module has FTS5."
        ) from error
    connection.executemany("INSERT INTO passages(id, text) VALUES (?, ?)", (fact.passage for fact in facts))
    connection.commit()


class SearchIndex:
    """An open index; call it with a query. From any thread, but from one at a time; recent results are remembered.

    Args:
      source: the file `build_index` wrote, or facts to index in memory.

    Raises:
      TaskError: the file does not exist.
    """

    def __init__(self, source: str | os.PathLike[str] | Iterable[Fact]):
        if isinstance(source, str | os.PathLike):
            if not Path(source).is_file():
                raise TaskError(f"search index {os.fspath(source)!r} does not exist; write it with tasks.build_index.")
            self._connection = sqlite3.connect(
                f"{Path(source).resolve().as_uri()}?mode=ro", uri=True, check_same_thread=False
            )
        else:
            self._connection = sqlite3.connect(":memory:", check_same_thread=False)
            _fill(self._connection, source)
        self._close = weakref.finalize(self, self._connection.close)
        self._remembered = functools.lru_cache(REMEMBERED)(self._find)

    def __call__(self, query: str, k: int = RESULTS) -> list[Passage]:
        """The `k` best passages for `query`; fewer, or none, if fewer share a word with it."""
        return list(self._remembered(query, k))

    def _find(self, query: str, k: int) -> tuple[Passage, ...]:
        expression = match_expression(query)
        if not expression:
            return ()
        statement = "SELECT id, text FROM passages WHERE passages MATCH ? ORDER BY bm25(passages), rowid LIMIT ?"
        rows = self._connection.execute(statement, (expression, k))
        return tuple(Passage(*row) for row in rows)

    def close(self) -> None:
        """Closes the file. An index that nobody holds any more closes it too."""
        self._close()


def search(path: str | os.PathLike[str], query: str, k: int = RESULTS) -> list[Passage]:
    """One search in the index at `path`; see `SearchIndex`."""
    index = SearchIndex(path)
    try:
        return index(query, k)
    finally:
        index.close()
