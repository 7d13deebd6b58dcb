"""Training and serving with an engine in another process, as real processes.

The servers answer in the documented form of vLLM and of SGLang (see tests/sampler/test_remote.py for the sources), and
they sample with the model whose weights they were last given.
"""

import contextlib
import json
import re
import signal
import subprocess
import types
from pathlib import Path

import jax
import numpy as np
import openai
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from harnessrl_jax.gateway import Server, Store
from harnessrl_jax.models import DecoderConfig, init_params
from harnessrl_jax.monitor import read_metrics
from harnessrl_jax.sampler import Engine, LocalSampler, SampleRequest
from harnessrl_jax.weights import load_model

KEY = "a-key-of-the-server"


class EngineServer:
    """An engine behind both wires, and what was asked of it."""

    def __init__(self, folder):
        model = DecoderConfig.from_huggingface(json.loads((folder / "config.json").read_text()))
        self.sampler = LocalSampler(Engine(config=model, slots=8, length=128, chunk=64, steps=4, pages=8))
        self.sampler.load_weights(init_params(model, jax.random.key(99)), 0)  # not those of any run
        self.loaded, self.answers, self.keys, self.deaf = [], [], set(), False

    async def sample(self, prompt, sampling, seed, limit):
        wanted = {name: sampling[name] for name in ("temperature", "top_p", "min_p")}
        request = SampleRequest(
            prompt_ids=tuple(prompt),
            max_new_tokens=sampling[limit],
            stop_ids=tuple(sampling["stop_token_ids"]),
            top_k=max(0, sampling["top_k"]),
            seed=seed,
            **wanted,
        )
        self.answers.append((prompt, await self.sampler.complete(request)))
        return self.answers[-1][1]

    async def vllm_completions(self, request):
        self.keys.add(request.headers.get("authorization"))
        body = await request.json()
        assert (body["model"], body["return_token_ids"]) == ("tiny", True)
        sample = await self.sample(body["prompt"], body, body["seed"], "max_tokens")
        choice = {"index": 0, "finish_reason": sample.finish, "token_ids": sample.output_ids.tolist()}
        choice |= {"logprobs": {"token_logprobs": sample.logps.tolist()}}
        return JSONResponse({"choices": [choice], "usage": {"completion_tokens": len(sample.output_ids)}})

    async def vllm_rpc(self, request):
        body = await request.json()
        assert body["method"] == "reload_weights"
        return self.load(body["kwargs"]["weights_path"], {"results": [None]})

    async def sglang_generate(self, request):
        body = await request.json()
        sampling = body["sampling_params"]
        sample = await self.sample(body["input_ids"], sampling, sampling["sampling_seed"], "max_new_tokens")
        logps = [[logp, token, None] for logp, token in zip(sample.logps.tolist(), sample.output_ids.tolist())]
        meta = {"id": body["rid"], "finish_reason": {"type": sample.finish}, "output_token_logprobs": logps}
        meta["completion_tokens"] = len(logps)
        return JSONResponse({"output_ids": sample.output_ids.tolist(), "meta_info": meta})

    async def sglang_update(self, request):
        return self.load((await request.json())["model_path"], {"success": True, "message": "ok"})

    def load(self, folder, answer):
        _, params = load_model(folder)
        self.loaded.append(Path(folder).name)
        if not self.deaf:
            self.sampler.load_weights(params, len(self.loaded))
        return JSONResponse(answer)

    async def fine(self, request):
        return JSONResponse({})

    def app(self):
        @contextlib.asynccontextmanager
        async def lifespan(_):
            await self.sampler.start()
            yield
            await self.sampler.close()

        posts = {"/v1/completions": self.vllm_completions, "/collective_rpc": self.vllm_rpc}
        posts |= {"/reset_prefix_cache": self.fine, "/generate": self.sglang_generate}
        posts |= {"/update_weights_from_disk": self.sglang_update}
        routes = [Route(path, answer, methods=["POST"]) for path, answer in posts.items()]
        return Starlette(routes=[*routes, Route("/health", self.fine)], lifespan=lifespan)


@pytest.fixture(scope="module")
def setup(tmp_path_factory, make_game):
    """A game, and a server that samples for it."""
    game = make_game(tmp_path_factory.mktemp("game"), steps=2)
    engine = EngineServer(game.folder / "model")
    with Server() as server:
        server.start(engine.app())
        yield types.SimpleNamespace(game=game, engine=engine, url=server.url)


def versions_of(run, label):
    with Store(run / "calls.sqlite") as store:
        rollouts = [rollout for rollout in store.rollouts() if rollout.rollout_id.startswith(label)]
        calls = [kept.call for rollout in rollouts for kept in store.calls(rollout.rollout_id, rollout.attempt)]
    return {version for call in calls for version in np.unique([call.version_start, call.version_end]).tolist()}


def test_training_with_vllm_hands_over_every_version(setup, monkeypatch):
    monkeypatch.setenv("OUR_VLLM_KEY", KEY)
    engine, run = setup.engine, setup.game.folder / "with-vllm"
    engine.loaded.clear()
    options = ["--sampler", "vllm", "--sampler.url", setup.url, "--sampler.model", "tiny"]
    setup.game.finish(run, *options, "--sampler.api_key_env", "OUR_VLLM_KEY")
    assert engine.loaded == ["version-000000", "version-000001", "version-000002"]
    assert engine.keys == {f"Bearer {KEY}"}
    assert KEY not in (run / "config.toml").read_text()
    assert [versions_of(run, label) for label in ("before", "00000-", "00001-", "after")] == [{0}, {0}, {1}, {2}]
    # The server samples with the very weights that are trained, at every step.
    records = read_metrics(run)
    assert len(records) == 2
    assert max(record["mismatch_max"] for record in records) < 1e-4
    assert [path.name for path in (run / "weights").iterdir()] == ["version-000002"]
    files = {path.name for path in (run / "weights/version-000002").iterdir()}
    assert files == {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}


def test_training_with_a_sampler_process_of_its_own(setup):
    run = setup.game.folder / "with-process"
    setup.game.finish(run, "--sampler", "jetstream")
    assert [versions_of(run, label) for label in ("before", "00000-", "00001-", "after")] == [{0}, {0}, {1}, {2}]
    assert max(record["mismatch_max"] for record in read_metrics(run)) < 1e-4
    assert [path.name for path in (run / "weights").iterdir()] == ["version-000002"]
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(run / "weights") not in processes  # it ended with the run


def test_a_server_that_keeps_its_own_weights_is_found_out_at_the_first_step(setup, monkeypatch):
    monkeypatch.setattr(setup.engine, "deaf", True)
    run = setup.game.folder / "deaf"
    options = ["--sampler", "sglang", "--sampler.url", setup.url, "--evaluation.questions", "0"]
    process = setup.game.start(run, *options)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 2, said
    assert "They do not compute the same model" in said


def test_serving_with_sglang(setup):
    engine, run = setup.engine, setup.game.folder / "served"
    engine.loaded.clear()
    weights = setup.game.folder / "handed over"
    options = ["--sampler", "sglang", "--sampler.url", setup.url, "--sampler.weights_dir", str(weights), "--port", "0"]
    command = setup.game.command(run, *options)
    command.insert(3, "serve")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=setup.game.environment)
    said = ""
    for line in process.stdout:
        said += line
        if "inspect" in line:
            break
    values = dict(re.findall(r"OPENAI_(BASE_URL|API_KEY)=(\S+)", said))
    with openai.OpenAI(base_url=values["BASE_URL"], api_key=values["API_KEY"]) as client:
        ask = {"model": "policy", "messages": [{"role": "user", "content": "Say one"}], "max_tokens": 5}
        client.chat.completions.create(**ask)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert engine.loaded == [path.name for path in weights.iterdir()] == ["version-000000"]
    with Store(run / "calls.sqlite") as store:
        (kept,) = store.calls("served", 0)
    call, (prompt, sample) = kept.call, engine.answers[-1]
    assert (call.prompt_ids.tolist(), call.output_ids.tolist()) == (prompt, sample.output_ids.tolist())
    np.testing.assert_array_equal(call.logps, sample.logps)
    assert (call.version_start, call.version_end) == (0, 0)
