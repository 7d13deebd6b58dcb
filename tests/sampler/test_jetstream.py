"""The sampler process: JetStream's own server around our engine, in a process of its own, over real gRPC."""

import asyncio
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import harnessrl_jax
from harnessrl_jax.errors import SamplerError, WishError
from harnessrl_jax.sampler import Engine, LocalSampler, SampleRequest
from harnessrl_jax.sampler.batching import Batcher, Job, result_of
from harnessrl_jax.sampler.jetstream.client import JetStreamSampler
from harnessrl_jax.sampler.jetstream.engine import BOS, NOBODY, JetStreamEngine, Text
from harnessrl_jax.sampler.jetstream.wire import encode, rows
from harnessrl_jax.sampler.placement import on_device
from harnessrl_jax.weights import save_model

STOP = 5
SIZES = {"slots": 3, "length": 48, "chunk": 8}


@pytest.fixture(scope="module")
def same_sizes(engine):
    """The engine of the server, in this process."""
    return Engine(config=engine.config, steps=1, pages=0, **SIZES)


@pytest.fixture(scope="module")
def make_sampler(tmp_path_factory, engine, letters, vocabulary):
    """Samplers that share a folder of weights and a log."""
    folder = tmp_path_factory.mktemp("jetstream")

    def save(path, params):
        save_model(path, engine.config, params)
        letters.save(str(path / "tokenizer.json"))

    def make(address):
        options = [text for name, size in SIZES.items() for text in (f"--{name}", str(size))]
        return JetStreamSampler(
            address,
            folder=folder / "weights",
            save=save,
            vocabulary=vocabulary,
            options=[*options, "--stop-id", str(STOP)],
            log=folder / "logs/sampler.log",
            timeout_s=120.0,
        )

    make.folder = folder
    return make


@pytest.fixture(scope="module")
def address(make_sampler, params):
    """Of the process, which a sampler has started."""
    owner = make_sampler(None)
    owner.load_weights(params, 0)
    asyncio.run(owner.start())
    assert os.getsid(owner._process.pid) == owner._process.pid  # a Ctrl-C of the run does not reach it
    yield owner._address
    alive = owner._process.poll() is None
    asyncio.run(owner.close())
    assert alive  # JetStream's failures kill it
    assert owner._process.poll() == 0


@pytest.fixture
def served(make_sampler, address):
    """Runs a test with a sampler that knows of the process its address alone."""

    def run(test):
        async def whole():
            sampler = make_sampler(address)
            await sampler.start()
            try:
                return await test(sampler)
            finally:
                await sampler.close()

        return asyncio.run(whole())

    return run


def requests_of_every_kind(rng):
    return [
        SampleRequest(
            prompt_ids=tuple(rng.integers(0, 97, rng.integers(1, 33)).tolist()),
            max_new_tokens=int(rng.integers(1, 15)),
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            top_p=float(rng.choice([1.0, 0.8])),
            top_k=int(rng.choice([0, 7])),
            min_p=float(rng.choice([0.0, 0.02])),
            seed=int(rng.integers(2**63)) * 2 + 1,
            stop_ids=(STOP, 96),
            stop=("a", "xy"),
            request_id=f"number {number}",
        )
        for number in range(12)
    ]


def fields(sample):
    arrays = sample.output_ids, sample.versions, sample.logps, sample.raw_logps, sample.survival
    return [array.tolist() for array in arrays], sample.finish, sample.logp_kind


def test_it_samples_what_the_sampler_in_this_process_samples(served, engine, params, vocabulary):
    requests, told = requests_of_every_kind(np.random.default_rng(0)), {}
    heard = lambda request: told.setdefault(request.request_id, []).extend

    async def ask(sampler):
        asked = [dataclasses.replace(request, on_tokens=heard(request)) for request in requests]
        return await asyncio.gather(*map(sampler.complete, asked))

    async def here():
        sampler = LocalSampler(engine, vocabulary=vocabulary)
        sampler.load_weights(params, 0)
        await sampler.start()
        try:
            return await ask(sampler)
        finally:
            await sampler.close()

    samples = served(ask)
    assert told == {request.request_id: sample.output_ids.tolist() for request, sample in zip(requests, samples)}
    assert list(map(fields, samples)) == list(map(fields, asyncio.run(here())))
    assert {sample.finish for sample in samples} == {"stop", "length"}


def test_weights_that_arrive_in_the_middle_of_streams(served, make_sampler, same_sizes, params, other_params):
    """Nothing is dropped, and each token is what the engine samples with the weights of its version."""
    begun = dataclasses.replace(NOBODY.request, prompt_ids=(3, 1, 4), max_new_tokens=40, temperature=1.0)

    async def test(trainer):
        await asyncio.to_thread(trainer.load_weights, params, 10)
        answers, over = [], asyncio.Event()

        async def keep_asking(client):
            for number in range(10_000):
                request = dataclasses.replace(begun, seed=number * 8 + client)
                answers.append((request, await trainer.complete(request)))
                if over.is_set():
                    return

        clients = [asyncio.create_task(keep_asking(client)) for client in range(6)]
        while len(answers) < 2:  # all of them are well under way
            await asyncio.sleep(0.01)
        await asyncio.to_thread(trainer.load_weights, other_params, 11)
        later = dataclasses.replace(begun, seed=7)
        answers.append((later, await trainer.complete(later)))
        over.set()
        await asyncio.gather(*clients)
        return answers

    answers = served(test)
    assert all(len(sample.output_ids) == 40 and (np.diff(sample.versions) >= 0).all() for _, sample in answers)
    old = [int((sample.versions == 10).sum()) for _, sample in answers]
    (after,) = [tokens for (request, _), tokens in zip(answers, old) if request.seed == 7]
    assert after == 0
    # Those that the swap met, whether sampled from or waiting, and some that it did not.
    met = [at for at, tokens in enumerate(old) if tokens < 40][:4]
    assert any(0 < old[at] < 40 for at in met)
    for at in [0, *met]:
        request, sample = answers[at]
        assert fields(sample) == fields(alone(same_sizes, request, params, other_params, old[at])), (at, old[at])
    assert not (make_sampler.folder / "weights/version-000010").exists()


def alone(engine, request, params, other_params, at):
    """The sample of a request by itself, with other weights from token `at` on."""
    batcher = Batcher(engine, lanes=1, turn_chunks=256, placement=on_device())
    batcher.load(params, 10)
    job = Job(request)
    batcher.submit(job)
    while not job.ended:
        if len(job.ids) == at:
            batcher.load(other_params, 11)
        batcher.turn()
    return result_of(job)


@pytest.mark.parametrize("why", ["cancelled", "a stop text"])
def test_the_server_goes_on_after_a_request_that_is_given_up(served, why):
    long = SampleRequest(prompt_ids=(1,), max_new_tokens=47, temperature=1.0, stop=tuple(map(chr, range(33, 127))))

    async def test(sampler):
        if why == "cancelled":
            begun = asyncio.Event()
            loop = asyncio.get_running_loop()
            tell = lambda _: loop.call_soon_threadsafe(begun.set)
            task = asyncio.create_task(sampler.complete(dataclasses.replace(long, stop=(), on_tokens=tell)))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            sample = await sampler.complete(long)
            assert sample.finish == "stop"
            assert len(sample.output_ids) < 10
        return await sampler.complete(dataclasses.replace(long, max_new_tokens=1, stop=()))

    assert len(served(test).output_ids) == 1


def test_a_process_that_died_fails_the_run_at_once(make_sampler, params):
    """Without it, a step would wait for the weights to be taken until the time for that is over."""
    sampler = make_sampler("localhost:9")
    command = [sys.executable, "-I", "-S", "-c", "raise SystemExit(3)"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sampler._process:
        sampler._process.wait()
        with pytest.raises(SamplerError, match=r"The sampler process ended with status 3; .*sampler\.log says why"):
            sampler.load_weights(params, 4)

    async def ask():
        async with asyncio.timeout(20):
            await sampler.complete(SampleRequest(prompt_ids=(1,), max_new_tokens=2, request_id="r"))

    with pytest.raises(SamplerError, match=r"Request 'r': localhost:9: UNAVAILABLE: .*Is the server still running"):
        asyncio.run(ask())
    asyncio.run(sampler.close())


def test_what_it_cannot_do_is_refused_and_the_rest_goes_on(served, make_sampler, tmp_path):
    request = SampleRequest(prompt_ids=(1,), max_new_tokens=2, request_id="r")

    async def test(sampler):
        with pytest.raises(WishError, match=r"Request 'r': this sampler has no banned_ids"):
            await sampler.complete(dataclasses.replace(request, banned_ids=(1,)))
        for wrong in ({"max_new_tokens": 48}, {"prompt_ids": (97,)}):
            with pytest.raises(SamplerError, match=r"Request 'r': localhost:\d+ gave it up after 0 tokens: its prompt"):
                await sampler.complete(dataclasses.replace(request, **wrong))
        with pytest.raises(SamplerError, match=r"weights of version 5: INVALID_ARGUMENT: WeightsError: .*config\.json"):
            await asyncio.to_thread(sampler._swap, tmp_path, 5)
        return await sampler.complete(request)

    assert len(served(test).output_ids) == 2
    assert (
        "A request is refused: Request 'r': a prompt of 1 tokens"
        in (make_sampler.folder / "logs/sampler.log").read_text()
    )


def test_prompts_by_themselves_are_sampled_as_the_command_line_says(served, address):
    alike = SampleRequest(prompt_ids=(9, 8), max_new_tokens=6, temperature=0.0, stop_ids=(STOP,))
    lines = [json.dumps({"prompt_ids": ids, "max_tokens": 6}) for ids in ([9, 8], [1, 97], [-1])]
    command = [sys.executable, "-m", "harnessrl_jax.sampler.jetstream", "ask", address]
    reply = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=False)
    assert reply.returncode == 0, reply.stderr
    served_ids = served(lambda sampler: sampler.complete(alike)).output_ids.tolist()
    assert [json.loads(line) for line in reply.stdout.splitlines()] == [served_ids, [], []]


def test_a_process_that_cannot_start_says_where_to_look(make_sampler, tmp_path, params):
    sampler = make_sampler(None)
    with pytest.raises(SamplerError, match=r"no weights\. Call load_weights\(params, version\) first"):
        asyncio.run(sampler.start())
    sampler._latest = tmp_path / "nothing", 0
    with pytest.raises(SamplerError, match=r"The sampler process ended with status 1; .*sampler\.log says why"):
        asyncio.run(sampler.start())
    asyncio.run(sampler.close())


@pytest.mark.parametrize("how", ["returns", "aborts", "dies"])
def test_a_stream_that_ends_early_is_no_sample(make_sampler, how):
    """What came before the end is told, and nothing takes it for a whole turn."""
    grpc = pytest.importorskip("grpc")
    from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

    heard = []

    class Orchestrator(jetstream_pb2_grpc.OrchestratorServicer):
        async def Decode(self, request, context):
            content = jetstream_pb2.DecodeResponse.StreamContent
            for token in (7, 8):
                sample = content.Sample(token_ids=[token, *np.array([-1, -1, 1], np.float32).view(np.int32), -4])
                yield jetstream_pb2.DecodeResponse(stream_content=content(samples=[sample]))
            while len(heard) < 2:
                await asyncio.sleep(0.01)
            if how == "aborts":
                await context.abort(grpc.StatusCode.INTERNAL, "no memory")
            if how == "dies":
                asyncio.get_running_loop().create_task(self.server.stop(0))
                await asyncio.sleep(60)

    async def run():
        orchestrator = Orchestrator()
        orchestrator.server = server = grpc.aio.server()
        jetstream_pb2_grpc.add_OrchestratorServicer_to_server(orchestrator, server)
        port = server.add_secure_port("localhost:0", grpc.local_server_credentials())
        await server.start()
        sampler = make_sampler(f"localhost:{port}")
        await sampler.start()
        request = SampleRequest(prompt_ids=(1,), max_new_tokens=4, request_id="r", on_tokens=heard.extend)
        words = r"gave it up after 2 tokens" if how == "returns" else r"Is the server still running\?"
        try:
            with pytest.raises(SamplerError, match=rf"^Request 'r': localhost:{port}.*{words}"):
                await asyncio.wait_for(sampler.complete(request), 30)
        finally:
            await sampler.close()
            await server.stop(0)

    asyncio.run(run())
    assert heard == [7, 8]


def test_an_engine_of_several_steps_is_refused(engine, params, letters):
    with pytest.raises(SamplerError, match=r"one token a step, but the engine samples 3: set steps=1"):
        JetStreamEngine(engine, params, 0, text=Text(letters), plain=NOBODY.request, make_result=dict)


@pytest.fixture
def adapter(same_sizes, params, letters):
    return JetStreamEngine(same_sizes, params, 10, text=Text(letters), plain=NOBODY.request, make_result=dict)


def read(adapter, request, number):
    numbers = np.array([BOS, *encode(request, number)])
    return adapter.prefill(params=None, padded_tokens=numbers, true_length=len(numbers))


def step(adapter, state, slot):
    """A step, and what it says of a slot: the token, its version and JetStream's length."""
    state, result = adapter.generate(None, state)
    row = np.asarray(result["data"])[slot]
    ((drawn, version),) = rows(row[: result["tokens_idx"][1]])
    return state, (drawn[0, 0], drawn[0, 1:3].view(np.float32).tolist(), version, int(row[-1]))


ONE = SampleRequest(prompt_ids=(3, 1, 4), max_new_tokens=9, temperature=1.0, seed=5)


def test_a_prompt_that_waited_for_new_weights_is_read_again(adapter, same_sizes, params, other_params):
    prompt, state = read(adapter, ONE, 1), adapter.init_decode_state()
    loading = threading.Thread(target=adapter.load, args=(other_params, 11))
    loading.start()
    while adapter._latest.version == 10:
        time.sleep(0.001)
    state, (token, logps, version, _) = step(adapter, adapter.insert(prompt, state, slot=2), 2)
    loading.join()
    want = alone(same_sizes, ONE, params, other_params, 0)
    assert (token, logps, version) == (want.output_ids[0], [want.logps[0], want.raw_logps[0]], 11)


def test_weights_do_not_change_between_a_prompt_and_its_first_token(adapter, same_sizes, params, other_params):
    state = adapter.insert(read(adapter, ONE, 1), adapter.init_decode_state(), slot=0)
    loading = threading.Thread(target=adapter.load, args=(other_params, 11))
    loading.start()
    while adapter._latest.version == 10:
        time.sleep(0.001)
    state, first = step(adapter, state, 0)
    assert loading.is_alive()  # it returns once the new weights are used
    state, second = step(adapter, state, 0)
    loading.join()
    want = alone(same_sizes, ONE, params, other_params, 1)
    assert [said[0] for said in (first, second)] == want.output_ids[:2].tolist()
    assert [said[2] for said in (first, second)] == [10, 11]


def test_a_request_that_is_given_up_frees_its_slot(adapter):
    """JetStream ends a request whose length is beyond every limit."""
    state = adapter.init_decode_state()
    for slot, number in enumerate((1, 2)):
        state = adapter.insert(read(adapter, ONE, number), state, slot=slot)
    adapter.end(2)
    adapter.end(3)
    state, kept = step(adapter, state, 0)
    assert kept[3] == 1
    state, ended = step(adapter, state, 1)
    assert ended[3] > 2**30
    # One that is given up before its turn comes never gets one; its slot is free for others.
    state = adapter.insert(read(adapter, ONE, 3), state, slot=1)
    state, (*_, length) = step(adapter, state, 1)
    assert length > 2**30
    state = adapter.insert(read(adapter, ONE, 4), state, slot=1)
    state, (*_, length) = step(adapter, state, 1)
    assert length == 1


def test_its_package_is_imported_in_one_folder_only():
    package = pathlib.Path(harnessrl_jax.__file__).parent
    pattern = re.compile(r"^\s*(import|from) jetstream\b", re.MULTILINE)
    found = {path.parent.name for path in package.rglob("*.py") if pattern.search(path.read_text())}
    assert found == {"jetstream"}
