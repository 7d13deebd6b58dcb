"""The command line of the sampler process; see the package."""

import argparse
import asyncio
import dataclasses
import json
import os
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from tokenizers import Tokenizer

from harnessrl_jax.sampler.engine import Engine
from harnessrl_jax.sampler.jetstream.engine import NOBODY, JetStreamEngine, Text
from harnessrl_jax.sampler.jetstream.server import loader, result_type, serve
from harnessrl_jax.sampler.jetstream.wire import COLUMNS
from harnessrl_jax.weights import load_model


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line: `serve` or `ask`."""
    parser = argparse.ArgumentParser(prog="python -m harnessrl_jax.sampler.jetstream", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    server = commands.add_parser("serve", help="serve a model folder; prints a line when ready")
    server.add_argument("folder", type=Path, help="config.json, model.safetensors and tokenizer.json")
    server.add_argument("--version", type=int, default=0, help="number of its weights")
    server.add_argument("--port", type=int, default=9000, help="0 takes any")
    server.add_argument("--slots", type=int, default=16, help="one of them is always held")
    server.add_argument("--length", type=int, default=512, help="tokens of prompt and output together")
    server.add_argument("--chunk", type=int, default=32, help="prompt tokens read and kept together")
    server.add_argument("--rows", type=int, default=1, help="chunks of a prompt that one call reads")
    plain = server.add_argument_group("prompts by themselves")
    plain.add_argument("--stop-id", type=int, action="append", default=[], help="may be repeated")
    plain.add_argument("--temperature", type=float, default=0.0)
    plain.add_argument("--seed", type=int, default=0)
    server.add_argument("--with-stdin", action="store_true", help="end when standard input does")
    client = commands.add_parser("ask", help="requests as JSON lines on standard input, ids as JSON lines back")
    client.add_argument("address", help="as in localhost:9000")
    options = parser.parse_args(arguments)
    if options.command == "ask":
        questions = [json.loads(line) for line in sys.stdin if line.strip()]
        for output in asyncio.run(ask(options.address, questions)):
            print(json.dumps(output))
        return
    _serve(options)


def _serve(options: argparse.Namespace) -> None:
    if options.with_stdin:
        threading.Thread(target=_end_with_stdin, name="end with standard input", daemon=True).start()
    config, params = load_model(options.folder)
    sizes = {"slots": options.slots, "length": options.length, "chunk": options.chunk, "rows": options.rows}
    engine = Engine(config=config, **sizes, steps=1, pages=0)
    text = Text(Tokenizer.from_file(str(options.folder / "tokenizer.json")))
    plain = dataclasses.replace(
        NOBODY.request, temperature=options.temperature, seed=options.seed, stop_ids=tuple(options.stop_id)
    )
    adapter = JetStreamEngine(
        engine, jax.device_put(params), options.version, text=text, plain=plain, make_result=result_type()
    )
    port = options.port or _free_port()
    running = serve(adapter, port, loader(adapter, config))
    print(f"serving on localhost:{port}", flush=True)
    running.wait_for_termination()


def _end_with_stdin() -> None:
    """So that no sampler outlives whoever started it, however that one ends."""
    sys.stdin.read()
    os._exit(0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


async def ask(address: str, questions: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Sends `{"prompt_ids", "max_tokens"}` to a JetStream server, all at once; the sampled ids."""
    import grpc
    from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

    messages: Any = jetstream_pb2  # its classes are made at import, unseen by type checkers

    async def one(stub: Any, question: dict[str, Any]) -> list[int]:
        content = messages.DecodeRequest.TokenContent(token_ids=question["prompt_ids"])
        request = messages.DecodeRequest(token_content=content, max_tokens=question["max_tokens"])
        replies = [reply.stream_content.samples[0].token_ids async for reply in stub.Decode(request)]
        return [int(token) for reply in replies for token in reply[::COLUMNS]]

    async with grpc.aio.secure_channel(address, grpc.local_channel_credentials()) as channel:
        stub = jetstream_pb2_grpc.OrchestratorStub(channel)
        return await asyncio.gather(*[one(stub, question) for question in questions])


if __name__ == "__main__":
    main()
