"""CPU per call and latency: the gateway against LiteLLM's proxy, both in front of the same engine, in the same run.

    uv venv /tmp/litellm && uv pip install --python /tmp/litellm 'litellm[proxy]'
    python tests/benchmarks/gateway.py --litellm /tmp/litellm/bin/litellm [--calls 64] [--repeats 1]

The engine is a process that sends the same tokens at the same pace to whoever asks: over chat completions to LiteLLM
and to clients that need no proxy, as token ids to the gateway, which renders, decodes, parses and stores. Clients
stream chat completions. *CPU* is what the proxy's own processes used, per call, so that it is what the proxy adds to
the engine; the gateway's share holds the durable write of every call. Its connection to the engine is a plain socket,
as its own samplers work in its process; LiteLLM's is the one it comes with.
"""

import argparse
import asyncio
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

CONCURRENT = (1, 16, 128)
TOKENS, PACE_S = 32, 0.004
ROOT = pathlib.Path(__file__).parents[2]
QUESTION = "Which country borders both the largest lake and the longest river of its continent? " * 8
BODY = {"model": "policy", "stream": True, "messages": [{"role": "user", "content": QUESTION}]}


class Cost(NamedTuple):
    """What one way to call took, over all calls."""

    cpu_ms: float
    p50_ms: float
    p99_ms: float
    failed: int


# The engine


async def engine(scope: dict, receive: Any, send: Any) -> None:
    """An ASGI application: the same tokens as chat chunks, or as lines of token ids."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    as_ids = scope["path"] == "/generate"
    kind = b"text/plain" if as_ids else b"text/event-stream"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    for number in range(TOKENS):
        line = b"%d\n" % (1000 + number) if as_ids else _chunk({"content": f" word{number}"})
        await send({"type": "http.response.body", "body": line, "more_body": True})
        await asyncio.sleep(PACE_S)
    end = b"" if as_ids else _chunk({}, "stop") + b"data: [DONE]\n\n"
    await send({"type": "http.response.body", "body": end})


def _chunk(delta: dict, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "policy", "choices": [choice]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


# The gateway in front of it


def serve_gateway(engine_url: str, run: str) -> int:
    """`launch serve` with a sampler that asks the engine."""
    import numpy as np

    from harnessrl_jax import config
    from harnessrl_jax.launch.serve import Serving, address_of, serve
    from harnessrl_jax.sampler.protocol import Sample, SampleRequest
    from harnessrl_jax.trajectories.records import LogpKind

    class Remote:
        """A Sampler that reads token ids from the engine as they come."""

        async def start(self) -> None:
            """There is nothing to start."""

        async def complete(self, request: SampleRequest) -> Sample:
            """The engine's tokens."""
            ids: list[int] = []
            reader, writer = await ask(f"{engine_url}/generate", "", {"prompt": request.prompt_ids})
            await reader.readuntil(b"\r\n\r\n")
            while int(await reader.readuntil(b"\r\n"), 16):
                ids.append(int(await reader.readuntil(b"\n")))
                await reader.readuntil(b"\r\n")
                if request.on_tokens is not None:
                    request.on_tokens(ids[-1:])
            writer.close()
            kind = LogpKind(mode="raw", temperature=1.0, top_p=1.0, top_k=0)
            return Sample(
                output_ids=np.array(ids, np.int32), logps=np.full(len(ids), -1.0, np.float32), logp_kind=kind,
                versions=np.zeros(len(ids), np.int32), finish="stop",
            )  # fmt: skip

        def load_weights(self, params: Any, version: int) -> None:
            """There are none."""

        async def close(self) -> None:
            """There is nothing to close."""

    behaviour = {"context_tokens": 4096, "max_new_tokens": 256}
    settings = {"name": "cost", "steps": 1, "model": {"path": "builtin:quickstart"}, "behaviour": behaviour}
    given = config.Config.model_validate(settings)
    return serve(given, pathlib.Path(run), Serving(address_of("127.0.0.1", 0, None)), lambda config: Remote())


# The clients


async def ask(url: str, key: str, content: dict) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Posts JSON over a connection of its own; the reply is what can be read."""
    place = urlsplit(url)
    body = json.dumps(content).encode()
    head = (
        f"POST {place.path} HTTP/1.1\r\nHost: {place.netloc}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    writer.write(head.encode() + body)
    return reader, writer


async def call(url: str, key: str) -> float | None:
    """One streamed call; returns the seconds until its last byte, None if it failed."""
    started = time.perf_counter()
    reader, writer = await ask(f"{url}/chat/completions", key, BODY)
    said = await reader.read(-1)
    writer.close()
    if not said.startswith(b"HTTP/1.1 200") or b"data: [DONE]" not in said:
        print(f"no whole reply: {said[-300:]!r}", file=sys.stderr)
        return None
    return time.perf_counter() - started


async def calls(url: str, key: str, number: int, concurrent: int) -> list[float | None]:
    """`number` calls, `concurrent` at a time."""
    lanes = asyncio.Semaphore(concurrent)

    async def one() -> float | None:
        async with lanes:
            return await call(url, key)

    return list(await asyncio.gather(*(one() for _ in range(number))))


def measure(url: str, key: str, process: int | None, number: int, concurrent: int) -> Cost:
    """Costs of `number` calls; the CPU of a process and its children."""
    before = cpu_s(process) if process else 0.0
    answered = asyncio.run(calls(url, key, number, concurrent))
    seconds = sorted(one for one in answered if one is not None) or [float("nan")]
    time.sleep(0.3)  # what is done after the last byte
    used = cpu_s(process) - before if process else 0.0
    at = lambda share: 1000 * seconds[min(len(seconds) - 1, int(share * len(seconds)))]
    return Cost(1000 * used / number, at(0.5), at(0.99), answered.count(None))


def cpu_s(process: int) -> float:
    """User and system time of a process and all below it."""
    total, open_list = 0.0, [process]
    while open_list:
        one = open_list.pop()
        fields = pathlib.Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        for task in pathlib.Path(f"/proc/{one}/task").iterdir():
            open_list += [int(child) for child in (task / "children").read_text().split()]
    return total


# The processes


@contextlib.contextmanager
def started(command: list[str], **variables: str) -> Iterator[subprocess.Popen]:
    """A process that is told to stop at the end."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | variables
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)


def free_port() -> int:
    """A port that nobody has."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def wait_for(url: str, timeout_s: float = 1200.0) -> None:
    """Returns when an HTTP server answers there."""
    import httpx

    deadline = time.monotonic() + timeout_s
    with httpx.Client(trust_env=False, timeout=5) as client:
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                client.get(url)
                return
            time.sleep(0.5)
    raise TimeoutError(url)


@contextlib.contextmanager
def litellm(program: str, engine_url: str, folder: pathlib.Path) -> Iterator[tuple[str, str, int]]:
    """LiteLLM's proxy in front of the engine."""
    port = free_port()
    model = {"model": "openai/policy", "api_base": f"{engine_url}/v1", "api_key": "none"}
    settings = {
        "model_list": [{"model_name": "policy", "litellm_params": model}],
        "litellm_settings": {"telemetry": False, "num_retries": 0},
        "general_settings": {"master_key": "sk-local"},
    }
    (folder / "litellm.yaml").write_text(json.dumps(settings))
    command = [program, "--config", str(folder / "litellm.yaml"), "--host", "127.0.0.1", "--port", str(port)]
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MODE": "PRODUCTION", "LITELLM_LOG": "ERROR"}
    with started([*command, "--num_workers", "1"], **quiet) as process:
        wait_for(f"http://127.0.0.1:{port}/health/liveliness")
        yield f"http://127.0.0.1:{port}/v1", "sk-local", process.pid


@contextlib.contextmanager
def gateway(engine_url: str, folder: pathlib.Path) -> Iterator[tuple[str, str, int]]:
    """The gateway in front of the engine."""
    with started([sys.executable, __file__, "--serve", engine_url, str(folder / "run")]) as process:
        said = ""
        assert process.stdout is not None
        for line in process.stdout:
            said += line
            if "inspect" in line:
                break
        values = dict(re.findall(r"OPENAI_(BASE_URL|API_KEY)=(\S+)", said))
        yield values["BASE_URL"], values["API_KEY"], process.pid


def main() -> int:
    """Prints a table in Markdown."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--litellm", help="the program `litellm`; without it only the gateway is measured")
    top.add_argument("--calls", type=int, default=64, help="at each concurrency, at least one round of it")
    top.add_argument("--repeats", type=int, default=1)
    top.add_argument("--serve", nargs=2, metavar=("ENGINE", "RUN"), help=argparse.SUPPRESS)
    given = top.parse_args()
    if given.serve:
        return serve_gateway(*given.serve)
    port = free_port()
    server = [sys.executable, "-m", "uvicorn", "gateway:engine", "--app-dir", str(pathlib.Path(__file__).parent)]
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(
            started([*server, "--port", str(port), "--timeout-keep-alive", "600", "--log-level", "error"])
        )
        url = f"http://127.0.0.1:{port}"
        wait_for(url)
        ways: dict[str, tuple[str, str, int | None]] = {"engine alone": (f"{url}/v1", "", None)}
        ways["gateway"] = stack.enter_context(gateway(url, folder))
        if given.litellm:
            ways["LiteLLM"] = stack.enter_context(litellm(given.litellm, url, folder))
        for place, key, process in ways.values():
            measure(place, key, process, 8, 2)  # first calls load what is loaded once
        print("| streams | way | CPU ms/call | p50 ms | p99 ms | failed |\n|---|---|---|---|---|---|")
        for concurrent in CONCURRENT:
            for _ in range(given.repeats):
                for name, (place, key, process) in ways.items():
                    cost = measure(place, key, process, max(given.calls, concurrent), concurrent)
                    cpu = f"{cost.cpu_ms:.2f}" if process else ""
                    row = f"{concurrent} | {name} | {cpu} | {cost.p50_ms:.0f} | {cost.p99_ms:.0f} | {cost.failed}"
                    print(f"| {row} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
