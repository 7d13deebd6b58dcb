"""A call store of a small run, written by the store itself: two rollouts, a sub-agent, a retry, what came too late."""

import asyncio
import json
import pathlib
import sqlite3

import numpy as np
import pytest

import harnessrl_jax
from harnessrl_jax.gateway import Store, TextCodec
from harnessrl_jax.gateway.capture import Reader
from harnessrl_jax.gateway.rows import CallKey, Intent, digest
from harnessrl_jax.trajectories.records import Call, LogpKind, Rollout, ToolCall

MODEL = pathlib.Path(harnessrl_jax.__file__).parent / "assets" / "quickstart"
SEARCH = '<tool_call>\n{"name": "search", "arguments": {"query": "capital of Chad"}}\n</tool_call>'


class Script:
    """Makes records as the gateway would: ids by the tokenizer, tool calls and spans by the parser."""

    def __init__(self):
        self.codec = TextCodec(MODEL)
        self.reader = Reader(self.codec)

    def call(self, seq, messages, said, before=None, **changes):
        """A call that says `said`; its prompt goes on from the ids of the call `before`, or is rendered."""
        text = lambda m: self.codec.encode(m, "")
        if before is None:
            prompt = self.codec.prompt(messages)
        else:
            more = text("\n<|im_start|>user\n" + messages[-1]["content"] + "<|im_end|>\n<|im_start|>assistant\n")
            prompt = [*before.prompt_ids.tolist(), *before.output_ids.tolist(), *more]
        output = [*text(said), self.codec.stop_ids[0]]
        roles = self.reader.roles(output, "stop")
        tools = tuple(ToolCall(id=f"t{seq}", name=b.name, arguments=b.arguments) for b in roles.parsed.calls)
        fields = dict(
            run_id="run", task_id="t", group_id="g", rollout_id="a", attempt=0, session_id="main", agent="central",
            trainable=True, parent_call_id=None, call_id=f"a{seq}", seq=seq, choice=0, harness="demo 1.0",
            dialect="openai-chat", prompt_ids=prompt, output_ids=output,
            logps=-(np.arange(len(output), dtype=np.float32) + 1) / 7,
            logp_kind=LogpKind(mode="processed", temperature=0.7, top_p=0.9, top_k=3), version_start=2, version_end=2,
            finish="tool_calls" if tools else "stop", parse_status=roles.parsed.status, tool_calls=tools,
            spans=roles.spans, delivered=True, request_digest=f"d{seq}", retry=False,
            request=json.dumps({"messages": messages}), started_s=10.0 + seq, finished_s=10.5 + seq,
        )  # fmt: skip
        return Call(**fields | changes)


def rollout_of(rollout_id, reward, **changes):
    fields = dict(
        run_id="run", task_id="t", group_id="g", rollout_id=rollout_id, attempt=0, harness="demo 1.0",
        status="completed", reward=reward, process_rewards={}, answer="N'Djamena", detail="", version=2,
        started_s=10.0, finished_s=20.0,
    )  # fmt: skip
    return Rollout(**fields | changes)


def keep(store, call, *, life=1, state="delivered", spliced=()):
    key = CallKey(call.rollout_id, call.attempt, life, call.call_id)
    intent = Intent(key, call.group_id, call.seq, call.choice, call.prompt_ids, call.request)
    store.intend([intent], {"spliced": list(spliced)})
    asyncio.run(store.sampled(life, [call], "late" if state == "late" else "sampled"))
    if state != "late":
        store.settle([key], state)


def said(role, content, **more):
    return {"role": role, "content": content} | more


@pytest.fixture(scope="session")
def script():
    return Script()


@pytest.fixture(scope="session")
def calls(script):
    """By name: central asks, a researcher searches after a lost first try, central answers; and a second rollout."""
    system, question = said("system", "You answer."), said("user", "What is the capital of Chad?")
    ask = script.call(0, [system, question], SEARCH)
    sub = dict(session_id="sub", agent="researcher", parent_call_id="a0", request_digest="same")
    look = [said("user", "capital of Chad")]
    first = script.call(1, look, "I look.", delivered=False, **sub)
    again = script.call(2, look, "N'Djamena, it says.", retry=True, **sub)
    echo = said("assistant", None, tool_calls=[{"id": "t0", "function": {"name": "search", "arguments": "{}"}}])
    result = said("tool", "N'Djamena", tool_call_id="t0")
    answer = script.call(3, [system, question, echo, result], "N'Djamena", before=ask)
    other = script.call(0, [system, question], "Moundou", rollout_id="b", call_id="b0", logps=None, logp_kind=None)
    late = script.call(4, [system, said("user", "more")], "Late.", call_id="a4", started_s=30.0, finished_s=31.0)
    return dict(ask=ask, first=first, again=again, answer=answer, other=other, late=late)


@pytest.fixture
def store_path(tmp_path, calls):
    """The file. Rollout b was begun once before; one call of it never got an answer."""
    path = tmp_path / "calls.sqlite"
    with Store(path, run_id="run") as store:
        store.open_attempt("a", 0)
        store.open_attempt("b", 0)
        keep(store, calls["other"])
        assert store.open_attempt("b", 0) == 2
        keep(store, calls["ask"])
        keep(store, calls["first"], state="undelivered")
        keep(store, calls["again"])
        keep(store, calls["answer"], spliced=["a0"])
        keep(store, calls["late"], state="late")
        keep(store, calls["other"], life=2)
        lost = CallKey("b", 0, 2, "b1")
        store.intend([Intent(lost, "g", 1, 0, calls["other"].prompt_ids, "{}")], {})
        store.put_rollout(rollout_of("a", 1.0, process_rewards={"a0": 0.5}))
        store.put_rollout(rollout_of("b", 0.0))
    return path


def seal(path):
    """Digests that fit the rows, as if they had been written so."""
    connection = sqlite3.connect(path)
    rows = connection.execute(
        "SELECT rowid, record, prompt_ids, output_ids, logps, request FROM calls WHERE record IS NOT NULL"
    ).fetchall()
    for number, record, prompt, output, logps, request in rows:
        sealed = digest(record, prompt, output, logps or b"", request)
        connection.execute("UPDATE calls SET digest = ? WHERE rowid = ?", (sealed, number))
    for number, record in connection.execute("SELECT rowid, record FROM rollouts").fetchall():
        connection.execute("UPDATE rollouts SET digest = ? WHERE rowid = ?", (digest(record), number))
    connection.commit()
    connection.close()


def rewrite_all(path, table, **fields):
    """New values in every record of a table and in its columns of the same name, well sealed."""
    connection = sqlite3.connect(path)
    columns = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
    for number, record in connection.execute(f"SELECT rowid, record FROM {table}").fetchall():
        if record is not None:
            text = json.dumps(json.loads(record) | fields)
            connection.execute(f"UPDATE {table} SET record = ? WHERE rowid = ?", (text, number))
    for name in columns & fields.keys():
        connection.execute(f"UPDATE {table} SET {name} = ?", (fields[name],))
    connection.commit()
    connection.close()
    seal(path)


@pytest.fixture
def rewrite():
    return rewrite_all


@pytest.fixture
def reseal():
    return seal


@pytest.fixture
def outcome():
    return rollout_of


@pytest.fixture
def model():
    return MODEL
