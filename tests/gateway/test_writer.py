"""One thread writes: a failure of the disk stops it, a refusal concerns its own caller only."""

import asyncio
import sqlite3

import pytest

from harnessrl_jax.errors import StoreError
from harnessrl_jax.gateway import Store, schema
from harnessrl_jax.gateway.writer import Writer


@pytest.fixture
def path(tmp_path):
    """An empty store, closed."""
    Store(tmp_path / "calls.sqlite").close()
    return tmp_path / "calls.sqlite"


def test_a_full_disk_stops_everything_and_says_so(path):
    def connect():
        connection = schema.connect(path)
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages + 2}")
        return connection

    writer = Writer(connect, "Call store X")
    insert = lambda connection: connection.execute("INSERT INTO settings VALUES ('a', ?)", ("x" * 100_000,)).close()
    with pytest.raises(StoreError, match=r"Call store X cannot be written: .*full.* No reply is sent for a call"):
        writer.commit_blocking(insert)
    with pytest.raises(StoreError, match=r"cannot be written"):
        asyncio.run(writer.commit(lambda connection: None))
    writer.close()
    with Store(path) as store:
        assert store.counts() == {}


def test_a_refused_operation_does_not_harm_its_neighbours(path):
    writer = Writer(lambda: schema.connect(path), "X")

    def refuse(connection):
        raise StoreError("no")

    async def both():
        good = writer.commit(lambda connection: connection.execute("INSERT INTO settings VALUES ('a', 'b')").rowcount)
        bad = writer.commit(refuse)
        return await asyncio.gather(good, bad, return_exceptions=True)

    value, error = asyncio.run(both())
    writer.close()
    assert value == 1
    assert isinstance(error, StoreError)
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT value FROM settings WHERE name = 'a'").fetchone() == ("b",)
    connection.close()
