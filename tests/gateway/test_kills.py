"""Killed at any moment under load, again and again on one store: no reply that was received is missing or doubled."""

import asyncio
import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys

import httpx

from harnessrl_jax.gateway import Store
from harnessrl_jax.gateway.store import ANSWERED

KILLS = 10
CLIENTS = 6
# Imports once, then forks one server for each line that it reads.
NURSERY = """
import json, os, pathlib, sys
sys.path.insert(0, sys.argv[1])
import conftest
from harnessrl_jax.gateway import Limits, TextCodec
codec = TextCodec(pathlib.Path(sys.argv[2]))
call = '<tool_call>{"name": "search", "arguments": {"query": "Nairobi"}}</tool_call>'
for line in sys.stdin:
    if os.fork() == 0:
        house = conftest.House(pathlib.Path(sys.argv[3]), codec, lambda prompt: call, delay_s=0.001,
                               limits=Limits(max_calls=10**6))
        house.sampler.hold = "held"
        print(json.dumps([os.getpid(), *house.open(line.strip())]), flush=True)
        conftest.time.sleep(600)
    os.wait()
"""


async def on_disk(path, rollout):
    """Waits for a call that has no answer yet."""
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as reader:
        while not reader.execute("SELECT 1 FROM calls WHERE rollout_id = ? AND state = 'intent'", [rollout]).fetchall():
            await asyncio.sleep(0.01)


async def ask_until_it_dies(path, rollout, pid, base_url, api_key, kills_after):
    """One call that stays under way, and clients that ask without pause; the process is killed after so many replies.

    Returns the calls received.
    """
    received = []
    headers = {"authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(headers=headers, trust_env=False, timeout=30) as client:

        async def ask(name):
            number = 0
            while True:
                number += 1
                body = {"messages": [{"role": "user", "content": f"{name} {number}"}], "stream": number % 2 == 0}
                try:
                    reply = await client.post(f"{base_url}/v1/chat/completions", json=body)
                except httpx.TransportError:
                    return
                assert reply.status_code == 200
                received.append(call_in(reply.text, streamed=body["stream"]))
                if len(received) == kills_after:
                    os.kill(pid, signal.SIGKILL)

        held = asyncio.create_task(ask("held"))
        await asyncio.wait_for(on_disk(path, rollout), 30)
        await asyncio.gather(held, *(ask(name) for name in range(CLIENTS)))
    return received


def call_in(text, *, streamed):
    """The call that a whole reply names."""
    if not streamed:
        return json.loads(text)["id"]
    assert text.endswith("data: [DONE]\n\n")
    return json.loads(text.partition("data: ")[2].partition("\n")[0])["id"]


def test_no_received_reply_is_ever_lost_or_doubled(tmp_path, model_folder):
    path = tmp_path / "calls.sqlite"
    rng = random.Random(0)
    received = {}
    arguments = [sys.executable, "-c", NURSERY, os.path.dirname(__file__), str(model_folder), str(path)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as nursery:
        for number in range(KILLS):
            print(f"k{number}", file=nursery.stdin, flush=True)
            pid, base_url, api_key = json.loads(nursery.stdout.readline())
            asked = ask_until_it_dies(path, f"k{number}", pid, base_url, api_key, rng.randint(1, 24))
            received[f"k{number}"] = asyncio.run(asked)
        nursery.stdin.close()
    with Store(path) as store:
        for rollout, names in received.items():
            kept = [one.call for one in store.calls(rollout, 0)]
            for unique in (names, [call.call_id for call in kept], [call.seq for call in kept]):
                assert len(set(unique)) == len(unique)
            assert {name.removeprefix("chatcmpl-") for name in names} <= {call.call_id for call in kept}
        counts = store.counts()
    assert sum(map(len, received.values())) <= sum(counts.get(f"calls/{state}", 0) for state in ANSWERED)
    # Each server died with a call under way: those are marked, not forgotten.
    assert counts["calls/lost"] >= KILLS
