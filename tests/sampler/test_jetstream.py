import asyncio
import json
import re
import socket
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import harnessrl_jax.sampler.jetstream as adapter
from harnessrl_jax.errors import SamplerError
from harnessrl_jax.sampler import Engine, LocalSampler, SampleRequest
from harnessrl_jax.weights import save_model

MODULE = [sys.executable, "-m", "harnessrl_jax.sampler.jetstream"]
STOP = 5


@pytest.fixture
def folder(tmp_path, engine, params):
    save_model(tmp_path, engine.config, params)
    Tokenizer(WordLevel({str(i): i for i in range(97)}, unk_token="0")).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def address(folder, engine):
    """JetStream's gRPC server with our engine, in a process of its own."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    sizes = ["--slots", engine.slots, "--length", engine.length, "--chunk", engine.chunk]
    command = [*MODULE, "serve", folder, "--port", port, "--stop-id", STOP, *sizes]
    server = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        assert server.stdout.readline() == f"serving on localhost:{port}\n"
        yield f"localhost:{port}"
        assert server.poll() is None  # its failures kill it
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def test_jetstream_samples_what_we_sample(engine, params, address):
    rng = np.random.default_rng(0)
    asked = [
        {"prompt_ids": rng.integers(0, 97, size).tolist(), "max_tokens": limit}
        for size, limit in [(1, 9), (7, 1), (8, 12), (17, 4), (30, 10), (30, 3), (12, 11)]
    ]
    refused = [{"prompt_ids": [1, 97], "max_tokens": 3}, {"prompt_ids": [-1], "max_tokens": 3}]
    lines = "\n".join(map(json.dumps, asked + refused))
    reply = subprocess.run([*MODULE, "ask", address], input=lines, capture_output=True, text=True, check=True)
    answers = [json.loads(line) for line in reply.stdout.splitlines()]

    async def ours():
        sampler = LocalSampler(engine)
        sampler.load_weights(params, 0)
        await sampler.start()
        wanted = [
            SampleRequest(
                prompt_ids=tuple(one["prompt_ids"]), max_new_tokens=one["max_tokens"], temperature=0.0, stop_ids=(STOP,)
            )
            for one in asked
        ]
        samples = await asyncio.gather(*map(sampler.complete, wanted))
        await sampler.close()
        return [[token for token in sample.output_ids.tolist() if token != STOP] for sample in samples]

    assert answers == [*asyncio.run(ours()), [], []]


def test_an_engine_of_several_steps_is_refused(engine, params):
    text = adapter.Text(Tokenizer(WordLevel({"0": 0}, unk_token="0")), [STOP])
    with pytest.raises(SamplerError, match=r"one token a step, but the engine samples 3: set steps=1"):
        adapter.JetStreamEngine(engine, params, text, temperature=0.0, seed=0)
    short = Engine(config=engine.config, slots=1, length=8, chunk=8, steps=1, pages=0)
    with pytest.raises(SamplerError, match=r"at least 16 tokens; engine\.length 8"):
        adapter.JetStreamEngine(short, params, text, temperature=0.0, seed=0)


def test_its_name_stands_in_one_file():
    package = adapter.__file__.rpartition("/sampler/")[0]
    found = subprocess.run(["grep", "-rilE", "jetstream", "--include=*.py", package], capture_output=True, text=True)
    assert [re.sub(".*/", "", path) for path in found.stdout.split()] == ["jetstream.py"]
