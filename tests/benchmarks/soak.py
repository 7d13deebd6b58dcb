"""Rollouts with every kind of trouble, on a real gateway and store: nothing lost, nothing doubled, memory flat.

    python tests/benchmarks/soak.py [--rollouts 2000] [--at-once 16] [--seed 0]

The scripted expert of the embedded task samples; the clients play its harness over real connections. On the way they
leave before a reply has come, stop reading it, send bodies that are no request, repeat requests, give rollouts up in
the middle, and the weights change every 50 rollouts. A reply that a client read to its end must be in the store once,
as delivered; `doctor` must find nothing; the memory of the process must not grow with the rollouts.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import pathlib
import random
import sys
import tempfile
import time
from collections import Counter
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import harnessrl_jax
from harnessrl_jax.gateway import Endpoint, Gateway, Limits, Rollouts, SamplingPolicy, Server, Store, TextCodec
from harnessrl_jax.gateway.app import create_app
from harnessrl_jax.launch.doctor import audit
from harnessrl_jax.tasks import ExpertSampler

PACKAGE = pathlib.Path(harnessrl_jax.__file__).parent
FOLDER = PACKAGE / "assets/quickstart"
PROMPTS = json.loads((PACKAGE / "harnesses/multihop/prompts.json").read_text())
POLICY = SamplingPolicy(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=200, context_tokens=4000)
SWAP_EVERY = 50
ANSWERS = ("Nothing found.", "Kenya: capital Nairobi.", "Fako: a mountain of 4,095 metres in Cameroon.")
BROKEN = (b"{", b"\xff", b"[]", b'{"messages": 3}', b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}')


class Client:
    """One rollout's harness: HTTP by hand, so that connections can be treated badly."""

    def __init__(self, endpoint: Endpoint, rng: random.Random, seen: Counter[str]) -> None:
        self.place = urlsplit(endpoint.base_url)
        self.key = endpoint.api_key
        self.rng = rng
        self.seen = seen
        self.received: list[str] = []

    async def converse(self, question: str, calls: int) -> None:
        """Asks as the central agent does until it answers, or the rollout is given up."""
        role = PROMPTS["agents"]["central"]
        tools = [PROMPTS["tools"][name] for name in role["tools"]]
        messages: list[Any] = [{"role": "system", "content": role["system"]}, {"role": "user", "content": question}]
        for _ in range(calls):
            message = await self.ask({"messages": messages, "tools": tools, "stream": False})
            uses = message.get("tool_calls") or []
            if not uses or uses[0]["function"]["name"] == "answer":
                return
            found = [{"role": "tool", "tool_call_id": use["id"], "content": self.rng.choice(ANSWERS)} for use in uses]
            messages = [*messages, message, *found]
        self.seen["given up"] += 1

    async def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """One call, with trouble before it now and then; returns the message."""
        data, trouble = json.dumps(body).encode(), self.rng.random()
        retry = 0
        if trouble < 0.1:
            self.seen["left before the reply"] += 1
            await self.send(data, wait_s=self.rng.random() * 0.02)
            retry = 1
        elif trouble < 0.15:
            self.seen["stopped reading"] += 1
            await self.send(json.dumps(body | {"stream": True}).encode(), read=1, wait_s=0.05)
            retry = 1
        elif trouble < 0.2:
            self.seen["malformed"] += 1
            status, _ = await self.whole(self.rng.choice(BROKEN))
            if status != 400:
                raise AssertionError(f"a malformed body got {status}")
        elif trouble < 0.25:
            self.seen["repeated"] += 1
            await self.whole(data)
        status, reply = await self.whole(data, retry)
        if status != 200:
            raise AssertionError(f"status {status}: {reply!r}")
        return json.loads(reply)["choices"][0]["message"]

    async def whole(self, data: bytes, retry: int = 0) -> tuple[int, bytes]:
        """Sends a request and reads all of its reply."""
        reader, writer = await self.open(data, retry)
        head, _, reply = (await reader.read(-1)).partition(b"\r\n\r\n")
        writer.close()
        status = int(head.split()[1])
        if status == 200:
            self.received.append(json.loads(reply)["id"].removeprefix("chatcmpl-"))
        return status, reply

    async def send(self, data: bytes, *, read: int = 0, wait_s: float) -> None:
        """Sends a request and leaves without its reply."""
        reader, writer = await self.open(data, 0)
        if read:
            await reader.read(read)
        await asyncio.sleep(wait_s)
        writer.transport.abort()

    async def open(self, data: bytes, retry: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection on which the request was sent."""
        reader, writer = await asyncio.open_connection(self.place.hostname, self.place.port)
        head = (
            f"POST {self.place.path}/central/v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            f"Authorization: Bearer {self.key}\r\nX-Stainless-Retry-Count: {retry}\r\nContent-Length: {len(data)}\r\n"
        )
        writer.write(head.encode() + b"\r\n" + data)
        await writer.drain()
        return reader, writer


class Soak(NamedTuple):
    """What is shared by all rollouts."""

    store: Store
    rollouts: Rollouts
    sampler: ExpertSampler
    seen: Counter[str]
    wrong: list[str]
    memory: list[tuple[int, float]]
    """Rollouts done, and the MiB of the process then."""


async def rollout(soak: Soak, number: int, seed: int) -> None:
    """Opens a rollout, plays it, closes it and compares what was received with what was stored."""
    rng, name = random.Random(seed * 1_000_003 + number), f"r{number}"
    endpoint = await asyncio.to_thread(
        soak.rollouts.open, run_id="soak", task_id=f"t{number % 100}", group_id=f"g{number // 8}", rollout_id=name,
        attempt=0, harness="soak", trainable_agents=("central",), limits=Limits(max_calls=100, max_concurrent=4),
    )  # fmt: skip
    client = Client(endpoint, rng, soak.seen)
    await client.converse(f"Which is the capital of country number {number % 100}?", rng.randint(1, 6))
    await asyncio.to_thread(soak.rollouts.close, "soak", name, 0)
    stored = await asyncio.to_thread(soak.store.calls, name, 0)
    states = {kept.call.call_id: kept.state for kept in stored}
    soak.seen["calls"] += len(stored)
    soak.seen["received"] += len(client.received)
    if len(states) != len(stored) or len(set(client.received)) != len(client.received):
        soak.wrong.append(f"{name}: a call twice")
    soak.wrong.extend(
        f"{name}: {call} {states.get(call)}" for call in client.received if states.get(call) != "delivered"
    )
    prompts = [kept.call.version_start for kept in stored]
    if prompts != sorted(prompts):
        soak.wrong.append(f"{name}: an older version after a newer one")


async def run(soak: Soak, total: int, at_once: int, seed: int) -> None:
    """All rollouts, some at a time; new weights in between."""
    lanes = asyncio.Semaphore(at_once)
    done = 0

    async def one(number: int) -> None:
        nonlocal done
        async with lanes:
            if number % SWAP_EVERY == SWAP_EVERY - 1:
                soak.sampler.load_weights(None, number // SWAP_EVERY + 1)
                soak.seen["weight swaps"] += 1
            await rollout(soak, number, seed)
        done += 1
        if done % max(1, total // 10) == 0:
            gc.collect()
            soak.memory.append((done, resident_mib()))
            print(f"{done} rollouts, {soak.memory[-1][1]:.0f} MiB", file=sys.stderr, flush=True)

    for first in range(0, total, 500):
        await asyncio.gather(*(one(number) for number in range(first, min(total, first + 500))))


def resident_mib() -> float:
    """Memory of this process."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def main() -> int:
    """Prints what happened; 1 if something was lost, doubled or wrong."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--rollouts", type=int, default=2000)
    top.add_argument("--at-once", type=int, default=16)
    top.add_argument("--seed", type=int, default=0)
    given = top.parse_args()
    started, cpu = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "calls.sqlite"
        with contextlib.closing(Store(path)) as store, Server() as server:
            sampler, codec = ExpertSampler(FOLDER), TextCodec(FOLDER)
            rollouts = Rollouts(store, server.url)
            gateway = Gateway(
                store=store, sampler=sampler, codec=codec, policy=POLICY, run_seed=given.seed, clock=time.time
            )
            server.start(create_app(gateway, rollouts, sampler))
            soak = Soak(store, rollouts, sampler, Counter(), [], [])
            asyncio.run(run(soak, given.rollouts, given.at_once, given.seed))
            events = rollouts.counts()
            server.stop()
            store.flush()
            states = store.counts()
        findings = audit(path, FOLDER).findings
    wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    print(f"{given.rollouts} rollouts, {wall:.0f} s, {cpu:.0f} s of CPU: {dict(sorted(soak.seen.items()))}")
    print(f"store: {states}; events: {dict(sorted(events.items()))}")
    print(f"memory: {', '.join(f'{mib:.0f} MiB after {done}' for done, mib in soak.memory)}")
    print(f"lost, doubled or wrong: {soak.wrong or 'none'}; doctor: {findings or 'nothing is wrong'}")
    return 1 if soak.wrong or findings else 0


if __name__ == "__main__":
    sys.exit(main())
