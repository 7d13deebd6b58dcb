"""A call is on disk before the last byte of its reply; kills, disconnects and late replies lose and double nothing."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse

import httpx
import openai
import pytest

from harnessrl_jax.errors import GatewayError, StoreError
from harnessrl_jax.gateway import Store

ASK = [{"role": "user", "content": "Hi"}]


def scope_of(house, body):
    path = urllib.parse.urlsplit(house.endpoint.base_url).path + "/central/v1/chat/completions"
    headers = [(b"authorization", b"Bearer " + house.endpoint.api_key.encode())]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    return scope | {"headers": headers, "http_version": "1.1", "scheme": "http", "root_path": "", "server": ("x", 1)}


async def drive(house, body, on_send, *, gone=False, hold=None):
    """Runs one request through the application, watching each message it sends."""
    asked = False

    async def receive():
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        if gone:
            return {"type": "http.disconnect"}
        return await asyncio.Event().wait()

    async def send(message):
        on_send(message)
        while hold is not None and not hold.is_set():
            await asyncio.sleep(0.01)

    await house.sampler.start()
    await house.app(scope_of(house, body), receive, send)


@pytest.mark.parametrize("stream", [False, True])
def test_the_call_is_on_disk_before_the_last_byte_is_sent(house, stream):
    h = house(lambda prompt: "Yes.")
    states = []

    def look(message):
        # A connection of its own: it sees only what was committed.
        with Store(h.store.path, read_only=True) as reader:
            states.append((message["type"], [kept.state for kept in reader.calls("r0", 0)]))

    asyncio.run(drive(h, {"messages": ASK, "stream": stream}, look))
    assert states[-1] == ("http.response.body", ["sampled"])
    assert [kept.state for kept in h.calls()] == ["delivered"]


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_sent_that_could_not_be_stored(house, stream):
    h = house(lambda prompt: "A secret.")
    real, sent = h.store.writer.commit, []

    async def fail(operation):
        raise StoreError("The disk is full.")

    h.store.writer.commit = fail
    asyncio.run(drive(h, {"messages": ASK, "stream": stream}, sent.append))
    h.store.writer.commit = real
    assert sent[0]["status"] == 503
    body = b"".join(message.get("body", b"") for message in sent)
    assert b"A secret." not in body
    assert json.loads(body)["error"]["code"] == "store_failed"
    h.rollouts.close("run", "r0", 0, timeout_s=1.0)


def test_a_client_that_left_gets_an_undelivered_call(house):
    h = house(lambda prompt: "Yes.")
    asyncio.run(drive(h, {"messages": ASK}, lambda message: None, gone=True))
    assert [(kept.state, kept.call.delivered) for kept in h.calls()] == [("undelivered", False)]
    assert h.rollouts.close("run", "r0", 0)["undelivered"] == 1


def test_a_socket_closed_while_sampling_keeps_the_call(house):
    h = house(lambda prompt: "Yes.", delay_s=0.3)
    place = urllib.parse.urlsplit(h.endpoint.base_url)
    body = json.dumps({"messages": ASK}).encode()
    head = f"POST {place.path}/central/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection((place.hostname, place.port)) as connection:
        connection.sendall(f"{head}Authorization: Bearer {h.endpoint.api_key}\r\n\r\n".encode() + body)
        while not h.sampler.requests:
            time.sleep(0.01)
    deadline = time.monotonic() + 10
    while not h.calls() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.05)
    assert [kept.state for kept in h.calls()] == ["undelivered"]


def test_a_reply_that_comes_after_the_rollout_was_closed_is_late(house):
    h = house(lambda prompt: "Yes.", delay_s=0.3)
    replies = []
    asking = threading.Thread(target=lambda: replies.append(h.post({"messages": ASK})))
    asking.start()
    while not h.sampler.requests:
        time.sleep(0.01)
    h.rollouts.close("run", "r0", 0)
    frozen = h.calls()
    asking.join()
    assert (replies[0].status_code, replies[0].json()["error"]["code"]) == (409, "rollout_closed")
    assert frozen == h.calls() == []
    assert [kept.call.delivered for kept in h.calls(["late"])] == [False]
    assert h.store.counts() == {"calls/late": 1}


def test_a_server_that_stops_leaves_no_open_intent(house):
    h = house(lambda prompt: "Yes.", delay_s=60)
    replies = []
    asking = threading.Thread(target=lambda: replies.append(h.post({"messages": ASK})))
    asking.start()
    while not h.sampler.requests:
        time.sleep(0.01)
    h.server.stop()
    asking.join()
    assert (replies[0].status_code, replies[0].json()["error"]["code"]) == (503, "shutting_down")
    h.store.flush()
    assert h.store.counts() == {"calls/failed": 1}


def test_closing_waits_until_a_reply_on_its_way_is_settled(house):
    h = house(lambda prompt: "Yes.")
    sending, hold, closed = threading.Event(), threading.Event(), threading.Event()
    request = drive(h, {"messages": ASK}, lambda message: sending.set(), hold=hold)
    asking = threading.Thread(target=lambda: asyncio.run(request))
    asking.start()
    assert sending.wait(10)
    with pytest.raises(
        GatewayError, match=r"attempt 0: 1 replies were still being sent after 0\.05 s\. Stop the harness"
    ):
        h.rollouts.close("run", "r0", 0, timeout_s=0.05)
    assert h.rollouts.open_count() == 0  # it may not call the model any more
    closing = threading.Thread(target=lambda: (h.rollouts.close("run", "r0", 0), closed.set()))
    closing.start()
    assert not closed.wait(0.1)
    hold.set()
    assert closed.wait(10)
    assert [kept.state for kept in h.store.calls("r0", 0)] == ["delivered"]
    asking.join()
    closing.join()


def test_closing_waits_for_what_the_harness_has_received(house):
    h = house(lambda prompt: "Yes.")
    for number in range(8):
        endpoint = h.open(f"w{number}")
        with httpx.Client(trust_env=False, headers={"authorization": f"Bearer {endpoint.api_key}"}) as client:
            client.post(f"{endpoint.base_url}/v1/chat/completions", json={"messages": ASK}).raise_for_status()
            h.rollouts.close("run", f"w{number}", 0)
            assert [kept.state for kept in h.store.calls(f"w{number}", 0)] == ["delivered"]


SERVE = """
import json, pathlib, sys
sys.path.insert(0, sys.argv[1])
import conftest
from harnessrl_jax.gateway import TextCodec
call = '<tool_call>{"name": "search", "arguments": {"query": "Nairobi"}}</tool_call>'
house = conftest.House(pathlib.Path(sys.argv[3]), TextCodec(pathlib.Path(sys.argv[2])), lambda prompt: call)
house.sampler.hold = "Wait"
print(json.dumps(house.endpoint), flush=True)
sys.stdin.read()
"""


def test_a_kill_right_after_a_reply_loses_nothing(tmp_path, model_folder):
    path = tmp_path / "calls.sqlite"
    arguments = [sys.executable, "-c", SERVE, os.path.dirname(__file__), str(model_folder), str(path)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        base_url, api_key = json.loads(server.stdout.readline())
        with openai.OpenAI(base_url=f"{base_url}/central/v1", api_key=api_key, max_retries=0, timeout=20) as client:
            create = client.chat.completions.create
            with pytest.raises(openai.APITimeoutError):
                create(model="m", messages=[{"role": "user", "content": "Wait"}], timeout=0.5)
            whole = create(model="m", messages=ASK).choices[0].message.tool_calls[0].id
            chunks = create(model="m", messages=ASK, stream=True)
            parts = [part.id for chunk in chunks for choice in chunk.choices for part in choice.delta.tool_calls or []]
        os.kill(server.pid, signal.SIGKILL)
    with Store(path) as store:
        assert store.lost == 1
        one, two = store.calls("r0", 0)
        assert [kept.call.tool_calls[0].id for kept in (one, two)] == [whole, parts[0]]
        assert {one.state, two.state} <= {"sampled", "delivered"}
        assert json.loads(two.call.request)["stream"] is True
        # A resumed run opens the attempt again: only what it samples then counts.
        assert store.open_attempt("r0", 0) == 2
        assert store.calls("r0", 0) == []
        assert store.counts() == {"calls/abandoned": 3}
