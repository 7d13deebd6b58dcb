"""A tiny model folder trained on the spot, a scripted sampler, and a whole gateway on a real port."""

import asyncio
import contextlib
import json
import pathlib
import shutil
import time

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from harnessrl_jax.gateway import (
    Gateway,
    Limits,
    Rollouts,
    SamplingPolicy,
    Server,
    Store,
    TextCodec,
    Traffic,
    create_app,
)
from harnessrl_jax.gateway.store import ANSWERED
from harnessrl_jax.sampler.protocol import Sample
from harnessrl_jax.trajectories.records import LogpKind

TEMPLATE = pathlib.Path(__file__).parents[1] / "data/chatml.jinja"
CONTROL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>", "<tools>", "</tools>"),
)
CORPUS = """The capital of Kenya is Nairobi, and its highest point is Mount Kenya at 5,199 metres.
Answer the question. {"name": "search", "arguments": {"query": "capital of Peru"}}
<|im_start|> <|im_end|> <tool_call> </tool_call> user assistant system tool response type function parameters
"""


def train_folder(folder: pathlib.Path, *, special: bool = True) -> pathlib.Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=list(CONTROL), initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS.splitlines(), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if not special:
        document = json.loads((folder / "tokenizer.json").read_text())
        for token in document["added_tokens"][3:]:
            token["special"] = False
        (folder / "tokenizer.json").write_text(json.dumps(document))
    shutil.copy(TEMPLATE, folder / "chat_template.jinja")
    return folder


@pytest.fixture(scope="session")
def train():
    return train_folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return train_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def codec(model_folder):
    return TextCodec(model_folder)


LOGP_KIND = LogpKind(mode="processed", temperature=1.0, top_p=1.0, top_k=0)


class Scripted:
    """A sampler that answers with the text a script gives for the prompt's text. Equal requests, equal samples."""

    def __init__(self, codec, script, *, delay_s=0.0):
        self.codec = codec
        self.script = script
        self.delay_s = delay_s
        self.version = 0
        self.hold = ""
        self.pace = None
        self.quiet = False
        self.requests = []
        self.running = False

    async def start(self):
        self.running = True

    async def complete(self, request):
        assert self.running
        self.requests.append(request)
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        prompt = self.codec.decode(request.prompt_ids)
        while self.hold and self.hold in prompt:
            await asyncio.sleep(0.01)
        answer = self.script(prompt)
        sample = answer if isinstance(answer, Sample) else self.sample(answer, request.max_new_tokens)
        if request.on_tokens is not None and not self.quiet:
            told = sample.logps if sample.raw_logps is None else sample.raw_logps
            for at, token in enumerate(sample.output_ids.tolist()):
                if request.on_logps is not None and told is not None:
                    request.on_logps([float(told[at])])
                request.on_tokens([token])
                if self.pace is not None:
                    await self.pace()
        return sample

    def sample(self, answer, max_new_tokens=10**6):
        """`answer` is text, in which control tokens count, or the ids themselves without the end of turn."""
        ids = self.codec.encode(answer, "") if isinstance(answer, str) else list(answer)
        ids = [*ids, self.codec.stop_ids[0]]
        finish = "stop" if len(ids) <= max_new_tokens else "length"
        ids = np.array(ids[:max_new_tokens], np.int32)
        logps = np.linspace(-2.0, -0.5, len(ids), dtype=np.float32)
        versions = np.full(len(ids), self.version, np.int32)
        return Sample(output_ids=ids, logps=logps, logp_kind=LOGP_KIND, versions=versions, finish=finish)

    def load_weights(self, params, version):
        self.version = version

    async def close(self):
        self.running = False


@pytest.fixture(scope="session")
def scripted(codec):
    """`scripted(script)` is a sampler that answers as its script says."""
    return lambda script: Scripted(codec, script)


class House:
    """A whole gateway on a real port, with one rollout open."""

    def __init__(
        self, path, codec, script, *, context_tokens=4096, max_new_tokens=256, limits=None, delay_s=0.0, sampler=None
    ):
        self.codec = codec
        self.sampler = sampler or Scripted(codec, script, delay_s=delay_s)
        self.store = Store(path)
        self.server = Server()
        self.rollouts = Rollouts(self.store, self.server.url)
        policy = SamplingPolicy(
            temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=max_new_tokens, context_tokens=context_tokens
        )
        self.gateway = Gateway(
            store=self.store, sampler=self.sampler, codec=codec, policy=policy, run_seed=7, clock=time.time
        )
        self.traffic = Traffic()
        self.app = create_app(self.gateway, self.rollouts, self.sampler, max_body_bytes=1 << 20, traffic=self.traffic)
        self.server.start(self.app, grace_s=1)
        self.limits = limits or Limits()
        self.endpoint = self.open()

    def open(self, rollout_id="r0", attempt=0):
        return self.rollouts.open(
            run_id="run",
            task_id="t0",
            group_id="g0",
            rollout_id=rollout_id,
            attempt=attempt,
            harness="test",
            trainable_agents={"central"},
            limits=self.limits,
        )

    def client(self, agent="central", session=None, endpoint=None, **options):
        to = endpoint or self.endpoint
        headers = {} if session is None else {"x-session-id": session}
        import openai

        return openai.OpenAI(
            base_url=f"{to.base_url}/{agent}/v1", api_key=to.api_key, default_headers=headers, **options
        )

    def anthropic(self, agent="central", endpoint=None, **options):
        to = endpoint or self.endpoint
        import anthropic

        return anthropic.Anthropic(base_url=f"{to.base_url}/{agent}", api_key=to.api_key, **options)

    def post(self, body, agent="central", path="/v1/chat/completions", **headers):
        """A request as no client library would send it."""
        headers = {"authorization": f"Bearer {self.endpoint.api_key}"} | headers
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = f"{self.endpoint.base_url}/{agent}{path}"
        with httpx.Client(trust_env=False) as client:
            return client.post(url, content=data, headers=headers)

    def calls(self, states=ANSWERED):
        self.store.flush()
        return self.store.calls("r0", 0, states)

    def close(self):
        self.server.stop()
        self.store.close()


@pytest.fixture
def house(tmp_path, codec):
    """Opens a gateway with `house(script, ...)`; closes it at the end of the test."""
    with contextlib.ExitStack() as stack:

        def open_house(script, store="calls.sqlite", **options):
            made = House(tmp_path / store, codec, script, **options)
            stack.callback(made.close)
            return made

        yield open_house


@pytest.fixture(scope="session")
def shared_house(tmp_path_factory, codec):
    """A gateway for tests that leave no trace in it."""
    made = House(tmp_path_factory.mktemp("shared") / "calls.sqlite", codec, lambda prompt: "Yes.")
    yield made
    made.close()


# Writes reasoning as some families do: empty where a turn has none, and only after the last question of the user.
REASONING = """{%- set seen = namespace(last=0) %}
{%- for message in messages %}{% if message.role == "user" %}{% set seen.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == "assistant" and loop.index0 > seen.last %}<think>
{{ message.reasoning_content or "" }}
</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(scope="session")
def thinking_codec(model_folder, tmp_path_factory):
    folder = shutil.copytree(model_folder, tmp_path_factory.mktemp("thinking") / "model")
    (folder / "chat_template.jinja").write_text(REASONING)
    return TextCodec(folder)


@pytest.fixture
def thinking_house(tmp_path, thinking_codec):
    """As `house`, for a model that reasons before it answers."""
    with contextlib.ExitStack() as stack:

        def open_house(script, **options):
            made = House(tmp_path / "thinking.sqlite", thinking_codec, script, **options)
            stack.callback(made.close)
            return made

        yield open_house
