"""What is written is read back, by state, life and group; a file that cannot be trusted is refused."""

import asyncio
import dataclasses
import shutil
import sqlite3
import subprocess
import sys
import threading

import numpy as np
import pytest

from harnessrl_jax.errors import StoreError
from harnessrl_jax.gateway import schema
from harnessrl_jax.gateway.rows import CallKey, Intent
from harnessrl_jax.gateway.store import Store
from harnessrl_jax.trajectories.records import Call, LogpKind, Role, Rollout, Span, ToolCall


def a_call(number=0, rollout_id="r", attempt=0, group_id="g", **changes):
    fields = dict(
        run_id="run",
        task_id="t",
        group_id=group_id,
        rollout_id=rollout_id,
        attempt=attempt,
        session_id="s",
        agent="central",
        trainable=True,
        parent_call_id=None,
        call_id=f"c{number}",
        seq=number,
        choice=0,
        harness="h",
        dialect="openai-chat",
        prompt_ids=np.array([5, 6, 7]),
        output_ids=np.array([8, 2]),
        logps=np.array([-0.5, -0.25], np.float32),
        logp_kind=LogpKind(mode="processed", temperature=0.7, top_p=0.9, top_k=3),
        version_start=4,
        version_end=5,
        finish="tool_calls",
        parse_status="ok",
        tool_calls=(ToolCall(id="x", name="é", arguments='{"q": "\x00"}'),),
        spans=(Span(role=Role.ACTION, start=0, end=1),),
        delivered=False,
        request_digest="d",
        retry=True,
        request='{"messages": ["é\\ud800"]}',
        started_s=1.5,
        finished_s=2.5,
    )
    return Call(**fields | changes)


def intend(store, call, life=1, notes=None):
    key = CallKey(call.rollout_id, call.attempt, life, call.call_id)
    store.intend([Intent(key, call.group_id, call.seq, call.choice, call.prompt_ids, call.request)], notes or {})
    return key


def keep(store, call, life=1, state="delivered"):
    """A call through all its states."""
    key = intend(store, call, life)
    asyncio.run(store.sampled(life, [call]))
    store.settle([key], state)
    store.flush()


def a_rollout(**changes):
    fields = dict(
        run_id="run",
        task_id="t",
        group_id="g",
        rollout_id="r",
        attempt=0,
        harness="h",
        status="completed",
        reward=0.5,
        process_rewards={"c0": 0.25},
        answer="Nairobi",
        detail="",
        version=3,
        started_s=1.0,
        finished_s=2.0,
    )
    return Rollout(**fields | changes)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "calls.sqlite"


@pytest.fixture
def store(path):
    with Store(path, run_id="run") as opened:
        yield opened


def test_a_call_comes_back_as_it_was(store):
    store.open_attempt("r", 0)
    mixture = a_call(experts=np.arange(a_call().prompt_ids.size + a_call().output_ids.size - 1)[:, None, None])
    plain = a_call(1, logps=None, logp_kind=None, tool_calls=(), spans=(), parent_call_id="c0")
    intend(store, mixture, notes={"rewrites": ["unknown"]})
    intend(store, plain)
    asyncio.run(store.sampled(1, [mixture, plain]))
    first, second = store.calls("r", 0)
    assert (first.call, first.state, first.notes) == (mixture, "sampled", {"rewrites": ["unknown"]})
    assert (second.call, second.call.logps) == (plain, None)


def test_a_call_goes_through_its_states(store):
    store.open_attempt("r", 0)
    key = intend(store, a_call())
    store.flush()
    assert store.counts() == {"calls/intent": 1}
    assert store.calls("r", 0) == []
    asyncio.run(store.sampled(1, [a_call()]))
    assert [kept.call.delivered for kept in store.calls("r", 0)] == [False]
    store.settle([key], "delivered")
    store.flush()
    assert [kept.call.delivered for kept in store.calls("r", 0)] == [True]
    assert store.counts() == {"calls/delivered": 1}


@pytest.mark.parametrize(("state", "counted"), [("undelivered", 1), ("late", 0), ("failed", 0)])
def test_which_states_are_answers(store, state, counted):
    store.open_attempt("r", 0)
    keep(store, a_call(), state=state)
    assert len(store.calls("r", 0)) == counted
    assert len(store.calls("r", 0, states=[state])) == 1


def test_calls_are_ordered_by_arrival_and_choice(store):
    store.open_attempt("r", 0)
    for number, choice in ((2, 0), (0, 1), (0, 0), (10, 0)):
        keep(store, a_call(number, choice=choice, call_id=f"c{number}.{choice}"))
    assert [kept.call.call_id for kept in store.calls("r", 0)] == ["c0.0", "c0.1", "c2.0", "c10.0"]


def test_calls_of_a_group_and_of_one_attempt(store):
    for rollout, attempt, group in (("b", 0, "g"), ("a", 0, "g"), ("a", 1, "g"), ("c", 0, "other")):
        store.open_attempt(rollout, attempt)
        keep(store, a_call(rollout_id=rollout, attempt=attempt, group_id=group))
    of_group = [(kept.call.rollout_id, kept.call.attempt) for kept in store.calls_of_group("g")]
    assert of_group == [("a", 0), ("a", 1), ("b", 0)]
    assert [kept.call.attempt for kept in store.calls("a", 1)] == [1]
    store.put_rollout(a_rollout(rollout_id="d", group_id="no calls"))
    assert store.groups() == ["g", "no calls", "other"]


def test_an_attempt_opened_again_hides_what_it_had(path):
    with Store(path) as store:
        assert store.open_attempt("r", 0) == 1
        keep(store, a_call(0))
        keep(store, a_call(1))
        store.put_rollout(a_rollout())
    with Store(path) as store:
        assert len(store.calls("r", 0)) == 2
        assert store.open_attempt("r", 0) == 2
        assert (store.calls("r", 0), store.rollouts()) == ([], [])
        keep(store, a_call(0, version_start=9, version_end=9), life=2)
        store.put_rollout(a_rollout(reward=1.0))
        assert [kept.call.version_start for kept in store.calls("r", 0)] == [9]
        assert [rollout.reward for rollout in store.rollouts("g")] == [1.0]
        assert store.counts() == {
            "calls/delivered": 1,
            "calls/abandoned": 2,
            "rollouts/completed": 1,
            "rollouts/abandoned": 1,
        }


def test_what_a_killed_process_tried_again_is_not_the_last_attempt(path):
    """It died after a second attempt; started again, the first one works."""
    with Store(path) as store:
        for attempt, status in enumerate(("infra_failure", "completed")):
            store.open_attempt("r", attempt)
            keep(store, a_call(attempt=attempt))
            reward = {"reward": None, "answer": None} if status == "infra_failure" else {}
            store.put_rollout(a_rollout(attempt=attempt, status=status, process_rewards={}, **reward))
        store.open_attempt("other", 1)
        keep(store, a_call(rollout_id="other", attempt=1))
    with Store(path) as store:
        assert store.open_attempt("r", 0) == 2
        keep(store, a_call(version_start=9, version_end=9), life=2)
        store.put_rollout(a_rollout(reward=1.0))
        assert [(rollout.attempt, rollout.reward) for rollout in store.rollouts()] == [(0, 1.0)]
        found = [(kept.call.rollout_id, kept.call.attempt) for kept in store.calls_of_group("g")]
        assert found == [("other", 1), ("r", 0)]
        # Tried again in earnest, it is there.
        assert store.open_attempt("r", 1) == 3
        keep(store, a_call(attempt=1), life=3)
        assert len(store.calls("r", 1)) == 1
        assert len(store.calls("r", 0)) == 1


def test_an_intent_without_an_answer_is_lost_at_the_next_opening(path):
    with Store(path) as store:
        store.open_attempt("r", 0)
        intend(store, a_call())
        assert store.lost == 0
    with Store(path) as store:
        assert store.lost == 1
        assert store.counts() == {"calls/lost": 1}


def test_a_rollout_is_stored_once(store):
    store.put_rollout(a_rollout())
    store.put_rollout(a_rollout())
    assert store.rollouts() == [a_rollout()]
    with pytest.raises(StoreError, match=r"Rollout 'r', attempt 0, is stored with another outcome\. .* new attempt"):
        store.put_rollout(a_rollout(reward=0.0))
    assert store.rollouts() == [a_rollout()]
    store.put_rollout(a_rollout(attempt=1, reward=None, answer=None))
    assert [rollout.attempt for rollout in store.rollouts("g")] == [0, 1]
    assert store.rollouts("other") == []


def test_a_changed_row_is_refused(path):
    with Store(path) as store:
        store.open_attempt("r", 0)
        keep(store, a_call())
        store.put_rollout(a_rollout())
    connection = sqlite3.connect(path)
    connection.execute("UPDATE calls SET output_ids = ?", (np.array([8, 3], np.int32).tobytes(),))
    connection.execute("UPDATE rollouts SET record = replace(record, '0.5', '1.0')")
    connection.commit()
    connection.close()
    with Store(path) as store:
        with pytest.raises(StoreError, match=r"call 'c0' does not match its digest.*Restore the file"):
            store.calls("r", 0)
        with pytest.raises(StoreError, match=r"a rollout does not match its digest"):
            store.rollouts()


def edit(path, statement):
    connection = sqlite3.connect(path)
    connection.execute(statement)
    connection.commit()
    connection.close()


def newer(path):
    edit(path, f"PRAGMA user_version = {schema.SCHEMA_VERSION + 1}")


def older(path):
    edit(path, "PRAGMA user_version = 0")


def foreign(path):
    edit(path, "PRAGMA application_id = 1")


def torn(path):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def rotten(path):
    data = bytearray(path.read_bytes())
    data[-4096:] = b"\xff" * 4096
    path.write_bytes(data)


def garbage(path):
    path.write_bytes(b"calls\n" * 1000)


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (newer, r"store schema 2, from a more recent version .* reads schema 1\. Use the version that wrote"),
        (older, r"store schema 0, from a less recent version"),
        (foreign, r"not a call store\. Give another path"),
        (torn, r"damaged or not a SQLite file .*\.recover`, or move the file away"),
        (rotten, r"damaged or not a SQLite file .*\.recover`, or move the file away"),
        (garbage, r"damaged or not a SQLite file .*\.recover`, or move the file away"),
    ],
)
def test_a_file_that_cannot_be_trusted_is_refused(path, damage, message, read_only):
    with Store(path) as store:
        store.open_attempt("r", 0)
        for number in range(50):
            intend(store, a_call(number))
    damage(path)
    before = path.read_bytes()
    with pytest.raises(StoreError, match=message):
        Store(path, read_only=read_only)
    assert path.read_bytes() == before


def test_another_runs_file_is_refused(path):
    Store(path, run_id="one").close()
    with pytest.raises(StoreError, match=r"calls of run 'one', not of 'two'.*its own folder"):
        Store(path, run_id="two")
    Store(path).close()


def test_a_second_writer_is_refused_and_readers_are_not(path, store):
    with pytest.raises(StoreError, match=r"another process is writing this store.*read-only"):
        Store(path)
    script = f"from pathlib import Path; from harnessrl_jax.gateway import Store; Store(Path({str(path)!r}))"
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "another process is writing this store" in other.stderr
    store.open_attempt("r", 0)
    keep(store, a_call())
    with Store(path, read_only=True) as reader:
        assert len(reader.calls("r", 0)) == 1
        with pytest.raises(StoreError, match=r"opened to read only"):
            reader.flush()


def test_a_missing_file_or_folder_is_named(path):
    with pytest.raises(StoreError, match=r"calls\.sqlite: no such file"):
        Store(path, read_only=True)
    with pytest.raises(StoreError, match=r"the folder .*/none does not exist"):
        Store(path.parent / "none/calls.sqlite")


def test_a_closed_store_refuses_and_closes_twice(path):
    store = Store(path)
    store.close()
    store.close()
    with pytest.raises(StoreError, match=r"is closed; nothing more"):
        store.flush()


def test_many_calls_at_once_share_few_flushes(store):
    async def one(number):
        call = a_call(number)
        intend(store, call)
        await store.sampled(1, [call])

    async def all_of_them():
        await asyncio.gather(*map(one, range(64)))

    store.open_attempt("r", 0)
    before = store.writer.writes.transactions
    asyncio.run(all_of_them())
    assert len(store.calls("r", 0)) == 64
    assert store.writer.writes.transactions - before <= 8


def test_what_nobody_waits_for_is_written_soon(path, store):
    store.open_attempt("r", 0)
    intend(store, a_call())
    waited = threading.Event()
    for _ in range(200):
        if store.counts():
            break
        waited.wait(0.01)
    assert store.counts() == {"calls/intent": 1}


def test_threads_and_loops_write_side_by_side(store):
    def blocking(rollout):
        for attempt in range(20):
            store.put_rollout(a_rollout(rollout_id=rollout, attempt=attempt))

    async def one(number):
        intend(store, a_call(number))
        await store.sampled(1, [a_call(number)])

    async def many():
        await asyncio.gather(*map(one, range(100)))

    store.open_attempt("r", 0)
    threads = [threading.Thread(target=blocking, args=(f"r{i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    asyncio.run(many())
    for thread in threads:
        thread.join()
    assert store.counts() == {"calls/sampled": 100, "rollouts/completed": 60}


def test_a_copy_of_a_closed_store_is_whole(path, tmp_path):
    with Store(path) as store:
        store.open_attempt("r", 0)
        keep(store, a_call())
    shutil.copy(path, tmp_path / "copy.sqlite")
    with Store(tmp_path / "copy.sqlite", read_only=True) as store:
        assert store.calls("r", 0)[0].call == dataclasses.replace(a_call(), delivered=True)
