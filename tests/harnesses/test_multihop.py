"""The multi-hop program as a process, against a scripted model over real HTTP. One warm process serves all tests."""

import ast
import asyncio
import itertools
import json
import pathlib
import queue
import sqlite3
import subprocess
import sys
import threading

import pytest
from starlette.responses import JSONResponse

from harnessrl_jax.harnesses import multihop_command
from harnessrl_jax.tasks.search import SearchIndex

PROGRAM = pathlib.Path(multihop_command(pathlib.Path("x"), 1)[1])
PROMPTS = json.loads(PROGRAM.with_name("prompts.json").read_text())
REPLIES = PROMPTS["replies"]
PATIENCE_S = 60.0
PASSAGES = [
    ("bern", "Capital of Switzerland: Bern"),
    ("paris", "Capital of France: Paris"),
    ("highest", "Highest point of France: Mont Blanc"),
    ("nile", 'National anthem of Sudan: "We are the army of God" and the Nile'),
    ("which", "Which country is which"),
]


class Harness:
    """The running program: jobs in, results out."""

    def __init__(self, command, model):
        self.model, self.numbers, self.results = model, itertools.count(), queue.Queue()
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.reader = threading.Thread(target=lambda: [self.results.put(json.loads(x)) for x in self.process.stdout])
        self.reader.start()

    def send(self, script):
        rollout = f"r{next(self.numbers)}"
        self.model.scripts[rollout] = script
        url = f"http://127.0.0.1:{self.model.port}/run/{rollout}/0"
        job = {"job": rollout, "question": "What is it?", "base_url": url, "api_key": f"key-{rollout}"}
        print(json.dumps(job), file=self.process.stdin, flush=True)
        return rollout

    def ask(self, script):
        """The result of one job, and the requests it made."""
        rollout = self.send(script)
        result = self.results.get(timeout=PATIENCE_S)
        assert result.pop("job") == rollout
        return result, self.model.of(rollout)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    path = tmp_path_factory.mktemp("index") / "facts.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE VIRTUAL TABLE passages USING fts5(id UNINDEXED, text, tokenize='unicode61')")
        connection.executemany("INSERT INTO passages VALUES (?, ?)", PASSAGES)
    connection.close()
    return path


@pytest.fixture(scope="module")
def harness(model, index):
    running = Harness(multihop_command(index, 8), model)
    yield running
    running.process.stdin.close()
    status = running.process.wait(PATIENCE_S)
    running.reader.join()
    running.process.stdout.close()
    assert status == 0  # it ends when its stdin ends


def completed(answer):
    return {"status": "completed", "answer": answer, "detail": ""}


def test_one_hop(harness):
    def script(seen):
        return [("search", "capital France")] if seen.turn == 0 else [("answer", "Paris")]

    result, (first, second) = harness.ask(script)
    assert result == completed("Paris")
    assert (first.agent, first.session, first.headers["authorization"]) == (
        "central",
        "central",
        f"Bearer key-{first.rollout}",
    )
    assert first.body["messages"] == [
        {"role": "system", "content": PROMPTS["agents"]["central"]["system"]},
        {"role": "user", "content": "What is it?"},
    ]
    assert first.body["tools"] == [PROMPTS["tools"][name] for name in ("ask_researcher", "search", "answer")]
    call = second.body["messages"][2]["tool_calls"][0]
    assert call["function"] == {"name": "search", "arguments": '{"query": "capital France"}'}
    assert second.body["messages"][:2] == first.body["messages"]
    assert second.body["messages"][3] == {
        "role": "tool",
        "tool_call_id": call["id"],
        "content": "Capital of France: Paris\nCapital of Switzerland: Bern\nHighest point of France: Mont Blanc",
    }


def test_a_researcher_has_its_own_session_and_its_report_comes_back(harness):
    def script(seen):
        if seen.agent == "researcher":
            return [("search", "Sudan")] if seen.turn == 0 else [("report", f"found: {seen.last}")]
        return [("ask_researcher", "anthem of Sudan?")] if seen.turn == 0 else [("answer", seen.last)]

    result, requests = harness.ask(script)
    assert result == completed(f"found: {PASSAGES[3][1]}")
    assert [(seen.agent, seen.session) for seen in requests] == [
        ("central", "central"),
        ("researcher", "researcher-0-0"),
        ("researcher", "researcher-0-0"),
        ("central", "central"),
    ]
    assert requests[1].body["messages"] == [
        {"role": "system", "content": PROMPTS["agents"]["researcher"]["system"]},
        {"role": "user", "content": "anthem of Sudan?"},
    ]
    assert requests[1].body["tools"] == [PROMPTS["tools"][name] for name in ("search", "report")]


def test_researchers_of_one_turn_work_side_by_side_and_reply_in_order(harness):
    both, second_is_done = asyncio.Barrier(2), asyncio.Event()

    async def script(seen):
        if seen.agent == "central":
            results = [message["content"] for message in seen.body["messages"] if message["role"] == "tool"]
            asks = [("ask_researcher", "one"), ("search", "Bern"), ("ask_researcher", "two")]
            return [("answer", " | ".join(results))] if results else asks
        await asyncio.wait_for(both.wait(), PATIENCE_S)  # one after the other would never pass
        if seen.last == "one":
            await asyncio.wait_for(second_is_done.wait(), PATIENCE_S)
        second_is_done.set()
        return [("report", seen.last)]

    result, requests = harness.ask(script)
    assert result == completed(f"one | {PASSAGES[0][1]} | two")
    assert {seen.session for seen in requests} == {"central", "researcher-0-0", "researcher-0-2"}


@pytest.mark.parametrize(
    "bad",
    [
        [("fly", "away")],
        [("report", "not a tool of central")],
        [("search", b"{not json")],
        [("search", b'"text"')],
        [("search", b'{"question": "wrong name"}')],
        [("search", b'{"query": 7}')],
        [("search", b'{"query": "x", "more": "y"}')],
        [("answer", b"{}")],
        "I think it is Bern.",
        "",
    ],
)
def test_a_bad_call_is_told_so_and_costs_a_turn(harness, bad):
    result, requests = harness.ask(lambda seen: bad if seen.turn == 0 else [("answer", "Bern")])
    assert result == completed("Bern")
    said, told = requests[1].body["messages"][2:]
    assert told["content"] == REPLIES["bad_call"]
    if isinstance(bad, str):
        assert (said, told["role"]) == ({"role": "assistant", "content": bad}, "user")
    else:
        assert told["tool_call_id"] == said["tool_calls"][0]["id"]


def test_an_answer_ends_the_rollout_whatever_stands_beside_it(harness):
    result, requests = harness.ask(lambda seen: [("ask_researcher", "x"), ("answer", ""), ("answer", "second")])
    assert result == completed("")
    assert len(requests) == 1


def test_a_central_agent_without_calls_left_gives_up(harness):
    result, requests = harness.ask(lambda seen: [("search", "Bern")])
    assert (result["status"], result["answer"]) == ("gave_up", None)
    assert len(requests) == PROMPTS["agents"]["central"]["max_calls"]


def test_a_researcher_without_calls_left_reports_nothing(harness):
    def script(seen):
        if seen.agent == "researcher":
            return "Hm."
        return [("ask_researcher", "x")] if seen.turn == 0 else [("answer", seen.last)]

    result, requests = harness.ask(script)
    assert result == completed(REPLIES["no_report"])
    assert sum(seen.agent == "researcher" for seen in requests) == PROMPTS["agents"]["researcher"]["max_calls"]


def refusal(status, code):
    # The client waits as long as it is told before a retry.
    return JSONResponse({"error": {"message": "no", "code": code}}, status, headers={"retry-after-ms": "1"})


def test_a_full_context_is_a_truncation(harness):
    result, requests = harness.ask(lambda seen: refusal(400, "context_length_exceeded"))
    assert (result["status"], result["answer"]) == ("truncated", None)
    assert result["detail"].startswith("BadRequestError: Error code: 400")
    assert len(requests) == 1


def test_a_model_that_fails_is_asked_again_and_then_reported(harness):
    result, requests = harness.ask(lambda seen: refusal(500, None))
    assert result["status"] == "error"
    assert result["detail"].startswith("InternalServerError: Error code: 500")
    assert [seen.headers["x-stainless-retry-count"] for seen in requests] == ["0", "1", "2"]
    assert len({seen.raw for seen in requests}) == 1


def test_one_failing_researcher_ends_the_rollout(harness):
    never = asyncio.Event()

    async def script(seen):
        if seen.agent == "central":
            return [("ask_researcher", "fails"), ("ask_researcher", "waits")]
        return await never.wait() if seen.last == "waits" else refusal(409, "closed")

    result, _ = harness.ask(script)
    assert result["status"] == "error"
    assert result["detail"].startswith("ConflictError")


def test_jobs_run_side_by_side(harness):
    both = asyncio.Barrier(2)

    async def script(seen):
        await asyncio.wait_for(both.wait(), PATIENCE_S)
        return [("answer", seen.rollout)]

    sent = {harness.send(script), harness.send(script)}
    assert {harness.results.get(timeout=PATIENCE_S)["answer"] for _ in range(2)} == sent


def test_the_search_is_the_one_of_the_task(harness, index):
    queries = [
        "which country has the capital Paris",
        "what is the which",
        "HIGHEST point; DROP TABLE passages",
        'anthem "army" NOT god',
        "text:Bern* OR (",
        "no such word",
        "?!",
        "",
    ]

    def script(seen):
        results = [message["content"] for message in seen.body["messages"] if message["role"] == "tool"]
        return [("answer", json.dumps(results))] if results else [("search", query) for query in queries]

    result, _ = harness.ask(script)
    reference = SearchIndex(index)
    expected = ["\n".join(text for _, text in reference(query)) or REPLIES["nothing_found"] for query in queries]
    reference.close()
    assert json.loads(result["answer"]) == expected
    assert expected.count(REPLIES["nothing_found"]) == 3


def test_the_program_needs_nothing_but_the_standard_library_and_openai():
    tree = ast.parse(PROGRAM.read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) == {"openai"}


def test_a_missing_index_is_said(tmp_path):
    done = subprocess.run(
        multihop_command(tmp_path / "none.sqlite", 1), capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 2
    assert f"--index {tmp_path / 'none.sqlite'}: no such file" in done.stderr
