"""Our engine as JetStream's `Engine`: its orchestrator and its gRPC server drive it, in a process of their own.

    python -m harnessrl_jax.sampler.jetstream serve MODEL_FOLDER --port 9000
    echo '{"prompt_ids": [1, 5, 9], "max_tokens": 8}' | python -m harnessrl_jax.sampler.jetstream ask localhost:9000

Needs the extra `[jetstream]` (google-jetstream 0.2.2, which brings TensorFlow: seconds to import, hence only inside
functions). It serves tokens without log-probabilities and samples every request alike; training uses `LocalSampler`.

Two things are done to run the unchanged package:
- `jax.tree_map`, which JAX has removed and JetStream calls, is set again.
- One slot is held by a request that never ends. JetStream asserts that a slot is in use before every step, but its
  detokenizing thread may free the last one just before; the failed assertion kills the process.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32
from tokenizers import Tokenizer

from harnessrl_jax.errors import SamplerError
from harnessrl_jax.models import Params
from harnessrl_jax.sampler.batching import settings_of
from harnessrl_jax.sampler.engine import NO_TOKEN, DecodeState, Engine, Prefix
from harnessrl_jax.sampler.pages import SCRATCH
from harnessrl_jax.sampler.protocol import SampleRequest
from harnessrl_jax.weights import load_model

HOLD = -1  # the prompt of the request that holds a slot
BOS = -2  # JetStream puts it before token prompts; taken off again, because prompts are complete as they are
BEYOND = 2**30  # a length above every limit: JetStream ends the request
IDLE_S = 0.005  # pause between steps when nothing is sampled


class ReadPrompt(NamedTuple):
    """JetStream's Prefix."""

    prefix: Prefix
    length: int
    sampled: int  # BEYOND for a prompt that is refused
    held: bool


class Decoding(NamedTuple):
    """JetStream's DecodeState."""

    state: DecodeState
    sampled: Int32[Array, " slot"]
    held: Bool[Array, " slot"]


class JetStreamEngine:
    """Implements `jetstream.engine.engine_api.Engine`; `serve` registers it there.

    Args:
      engine: its `steps` must be 1, because JetStream hands out one token a step.
      params: the weights.
      text: what `build_tokenizer` returns.
      temperature: of every request; 0 is greedy.
      seed: of every request.

    Raises:
      SamplerError: an engine that JetStream cannot drive.
    """

    samples_per_slot = 1
    colocated_cpus = None

    def __init__(self, engine: Engine, params: Params, text: "Text", *, temperature: float, seed: int) -> None:
        if engine.steps != 1:
            raise SamplerError(f"JetStream takes one token a step, but the engine samples {engine.steps}: set steps=1.")
        if engine.length < BUCKETS[0]:
            raise SamplerError(
                f"JetStream pads prompts to at least {BUCKETS[0]} tokens; engine.length {engine.length}."
            )
        self._engine, self._params, self._text = engine, params, text
        self._temperature, self._seed = temperature, seed
        self._scratch = engine.init_pages()
        self._before: Array | None = None  # what the step before the last sampled
        self._holding = False

    @property
    def max_concurrent_decodes(self) -> int:
        """Slots, the held one included."""
        return self._engine.slots

    @property
    def max_prefill_length(self) -> int:
        """The longest padded prompt: JetStream's largest bucket that fits a slot."""
        return max(size for size in BUCKETS if size <= self._engine.length)

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The one device that is used."""
        return jax.make_mesh((1,), ("device",), axis_types=(jax.sharding.AxisType.Auto,))

    def load_params(self) -> Params:
        """The weights that were given."""
        return self._params

    def get_prefix_destination_sharding(self) -> None:
        """Prompts are read where they are decoded."""

    def get_tokenizer(self) -> None:
        """Not described in JetStream's terms: see `build_tokenizer`."""

    def build_tokenizer(self, metadata: None) -> "Text":
        """The tokenizer of the model folder."""
        return self._text

    def init_decode_state(self) -> Decoding:
        """A state in which every slot is free."""
        zeros = jnp.zeros(self._engine.slots, jnp.int32)
        return Decoding(self._engine.init_state(), sampled=zeros, held=zeros.astype(bool))

    def prefill(
        self, *, params: Params, padded_tokens: Any, true_length: int, existing_prefix: None = None
    ) -> ReadPrompt:
        """Reads a prompt, chunk by chunk.

        A prompt that cannot be used is answered with no tokens, because an exception would end the process.
        """
        whole = np.asarray(padded_tokens, np.int32)[:true_length]
        prompt = whole[1:] if whole[0] == BOS else whole
        held = not self._holding and prompt.tolist() == [HOLD]
        known = (prompt >= 0) & (prompt < self._engine.config.vocab_size)
        # JetStream cuts long prompts from the left, but reports their full length.
        usable = len(whole) == true_length and 0 < len(prompt) < self._engine.length and bool(known.all())
        if held:
            self._holding = True
        elif not usable:
            logging.error("A prompt of %d tokens is refused: empty, too long, or unknown ids.", true_length)
        prompt = prompt if usable else np.zeros(1, np.int32)
        return ReadPrompt(self._read(params, prompt), len(prompt), 0 if usable or held else BEYOND, held)

    def insert(self, prefix: ReadPrompt, decode_state: Decoding, slot: int) -> Decoding:
        """Puts a read prompt into a slot."""
        request = SampleRequest(
            prompt_ids=(0,),
            max_new_tokens=1 if prefix.held else self._engine.length - prefix.length,
            temperature=self._temperature,
            seed=self._seed,
        )
        state = self._engine.insert(prefix.prefix, decode_state.state, slot, prefix.length, settings_of(request))
        return Decoding(
            state,
            sampled=decode_state.sampled.at[slot].set(prefix.sampled),
            held=decode_state.held.at[slot].set(prefix.held),
        )

    def generate(self, params: Params, decode_state: Decoding) -> tuple[Decoding, Any]:
        """One token of every slot, as JetStream's ResultTokens."""
        from jetstream.engine import engine_api

        if self._before is not None and bool((np.asarray(self._before) == NO_TOKEN).all()):
            time.sleep(IDLE_S)
        state, block = self._engine.generate(params, decode_state.state)
        self._before = block.data
        sampled, data = _result(block.data[0, :, 0], decode_state.sampled, decode_state.held)
        result = engine_api.ResultTokens(
            data=data, tokens_idx=(0, 1), valid_idx=(1, 2), length_idx=(2, 3), samples_per_slot=1
        )
        return Decoding(state, sampled, decode_state.held), result

    def _read(self, params: Params, prompt: Int32[np.ndarray, " token"]) -> Prefix:
        size = self._engine.chunk
        prefix = self._engine.restore(self._scratch, np.zeros(self._engine.length // size, np.int32), 0)
        for start in range(0, len(prompt), size):
            part = prompt[start : start + size]
            token = np.pad(part, (0, size - len(part)))
            prefix, self._scratch = self._engine.prefill(
                params, prefix, self._scratch, token, start, len(part), SCRATCH
            )
        return prefix


BUCKETS = tuple(2**power for power in range(4, 16))  # lengths to which JetStream pads prompts


@jax.jit
def _result(
    token: Int32[Array, " slot"], sampled: Int32[Array, " slot"], held: Bool[Array, " slot"]
) -> tuple[Int32[Array, " slot"], Int32[Array, "slot 3"]]:
    """Tokens sampled so far, and JetStream's columns: token, valid, length. A held slot never ends."""
    valid = (token != NO_TOKEN) | held
    sampled = sampled + valid
    return sampled, jnp.stack([token, valid.astype(jnp.int32), jnp.where(held, 0, sampled)], axis=1)


class Text:
    """JetStream's Tokenizer over the model folder's own.

    Args:
      tokenizer: from `tokenizer.json`.
      stop_ids: tokens that end a request.
    """

    pad_id = 0
    bos_id = BOS

    def __init__(self, tokenizer: Tokenizer, stop_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.stop_tokens = set(stop_ids)

    def encode(self, text: str, *, is_bos: bool, max_prefill_length: int, jax_padding: bool) -> tuple[Any, int]:
        """Padded token ids of a text prompt, and their number."""
        from jetstream.engine import token_utils

        ids = np.asarray(self._tokenizer.encode(text).ids, np.int32)
        return token_utils.pad_tokens(
            ids, BOS, 0, is_bos=False, max_prefill_length=max_prefill_length, jax_padding=jax_padding
        )

    def decode(self, token_ids: list[int]) -> str:
        """The text of some tokens."""
        return self._tokenizer.decode(token_ids)


class _Nobody:
    """The return channel of the request that holds a slot."""

    def add_result(self, result: object) -> None:
        """Forgets it."""

    def close(self) -> None:
        """Nothing to close."""


@contextlib.contextmanager
def _same_logging() -> Iterator[None]:
    """Undoes what importing JetStream's orchestrator does to the root logger: DEBUG, to standard output."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


def serve(adapter: JetStreamEngine, port: int) -> Any:
    """Starts JetStream's orchestrator and gRPC server, for clients on this machine; returns its JetStreamServer.

    Raises:
      SamplerError: the installed JetStream asks for more than the adapter has.
    """
    import grpc

    jax.__dict__["tree_map"] = jax.tree.map
    with _same_logging():
        from jetstream.core import orchestrator, server_lib
        from jetstream.engine import engine_api

    missing = engine_api.Engine.__abstractmethods__ - set(dir(JetStreamEngine))
    if missing:
        raise SamplerError(
            f"JetStream's Engine has {', '.join(sorted(missing))}, which this adapter does not know. "
            "It is written for google-jetstream 0.2.2: install that version."
        )
    engine_api.Engine.register(JetStreamEngine)
    engines: list[Any] = [adapter]
    params = [adapter.load_params()]
    driver = orchestrator.Driver(engines, engines, params, params, interleaved_mode=True, jax_padding=False)
    channel: Any = _Nobody()
    driver.place_request_on_prefill_queue(
        orchestrator.ActiveRequest(
            max_tokens=BEYOND,
            return_channel=channel,
            prefill_content=[HOLD],
            is_client_side_tokenization=True,
        )
    )
    threads = max(64, adapter.max_concurrent_decodes)
    server = server_lib.JetStreamServer(driver, threads, port, grpc.local_server_credentials())
    server.start()
    return server


async def ask(address: str, questions: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Sends `{"prompt_ids", "max_tokens"}` to a JetStream server, all at once; the sampled ids, without stop ids."""
    import grpc
    from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

    messages: Any = jetstream_pb2  # its classes are made at import, unseen by type checkers

    async def one(stub: Any, question: dict[str, Any]) -> list[int]:
        content = messages.DecodeRequest.TokenContent(token_ids=question["prompt_ids"])
        request = messages.DecodeRequest(token_content=content, max_tokens=question["max_tokens"])
        replies = [reply.stream_content.samples[0].token_ids async for reply in stub.Decode(request)]
        return [int(token) for reply in replies for token in reply]

    async with grpc.aio.secure_channel(address, grpc.local_channel_credentials()) as channel:
        stub = jetstream_pb2_grpc.OrchestratorStub(channel)
        return await asyncio.gather(*[one(stub, question) for question in questions])


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line: `serve` or `ask`."""
    parser = argparse.ArgumentParser(prog="python -m harnessrl_jax.sampler.jetstream", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    server = commands.add_parser("serve", help="serve a model folder; prints a line when ready")
    server.add_argument("folder", type=Path, help="config.json, model.safetensors and tokenizer.json")
    server.add_argument("--port", type=int, default=9000)
    server.add_argument("--slots", type=int, default=16, help="one of them is always held")
    server.add_argument("--length", type=int, default=512, help="tokens of prompt and output together")
    server.add_argument("--chunk", type=int, default=32, help="prompt tokens read at once")
    server.add_argument("--stop-id", type=int, action="append", default=[], help="may be repeated")
    server.add_argument("--temperature", type=float, default=0.0)
    server.add_argument("--seed", type=int, default=0)
    client = commands.add_parser("ask", help="requests as JSON lines on standard input, ids as JSON lines back")
    client.add_argument("address", help="as in localhost:9000")
    options = parser.parse_args(arguments)
    if options.command == "ask":
        questions = [json.loads(line) for line in sys.stdin if line.strip()]
        for output in asyncio.run(ask(options.address, questions)):
            print(json.dumps(output))
        return
    config, params = load_model(options.folder)
    engine = Engine(config=config, slots=options.slots, length=options.length, chunk=options.chunk, steps=1, pages=0)
    text = Text(Tokenizer.from_file(str(options.folder / "tokenizer.json")), options.stop_id)
    adapter = JetStreamEngine(engine, jax.device_put(params), text, temperature=options.temperature, seed=options.seed)
    running = serve(adapter, options.port)
    print(f"serving on localhost:{options.port}", flush=True)
    running.wait_for_termination()


if __name__ == "__main__":
    main()
