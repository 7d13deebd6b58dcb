"""Our engine as JetStream's `Engine`, and our tokenizer as its `Tokenizer`.

JetStream carries token ids alone: what a request asks for, log-probabilities and versions travel among them, see
`wire`. A prompt by itself is sampled as the command line says.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32
from tokenizers import Tokenizer

from harnessrl_jax.errors import SamplerError
from harnessrl_jax.models import Params
from harnessrl_jax.sampler.batching import check, settings_of
from harnessrl_jax.sampler.engine import NO_TOKEN, DecodeState, Engine, Prefix
from harnessrl_jax.sampler.jetstream.wire import COLUMNS, HEADER, MARK, SIGN, Asked, decode
from harnessrl_jax.sampler.pages import SCRATCH
from harnessrl_jax.sampler.protocol import SampleRequest
from harnessrl_jax.sampler.reading import Unread, read

HOLD = -1  # the prompt of the request that holds a slot, see `server`
BOS = -2  # JetStream puts it before token prompts; taken off again, because prompts are complete as they are
BEYOND = 2**30  # a length above every limit: JetStream ends the request
REMEMBERED = 4096  # requests to end that may come before their prompt, or too late
IDLE_S = 0.005  # pause between steps when nothing is sampled


class ReadPrompt(NamedTuple):
    """JetStream's Prefix."""

    prefix: Prefix
    version: int  # of the weights that read it
    asked: Asked
    sampled: int  # BEYOND for a prompt that is refused
    held: bool


class Decoding(NamedTuple):
    """JetStream's DecodeState."""

    state: DecodeState
    sampled: Int32[Array, " slot"]
    held: Bool[Array, " slot"]


class Weights(NamedTuple):
    """Parameters and their number."""

    params: Params
    version: int


class JetStreamEngine:
    """Implements `jetstream.engine.engine_api.Engine`; `serve` registers it there.

    Args:
      engine: its `steps` must be 1, because JetStream hands out one token a step.
      params: the weights.
      version: their number.
      text: what `build_tokenizer` returns.
      plain: how prompts by themselves are sampled; its prompt and its limit do not count.
      make_result: JetStream's ResultTokens.

    Raises:
      SamplerError: an engine that JetStream cannot drive.
    """

    samples_per_slot = 1
    colocated_cpus = None

    def __init__(
        self,
        engine: Engine,
        params: Params,
        version: int,
        *,
        text: "Text",
        plain: SampleRequest,
        make_result: Callable[..., Any],
    ) -> None:
        if engine.steps != 1:
            raise SamplerError(f"JetStream takes one token a step, but the engine samples {engine.steps}: set steps=1.")
        self._engine, self._text, self._plain, self._make_result = engine, text, plain, make_result
        self._latest = Weights(params, version)  # replaced as one value: several threads read it
        self._current = self._latest  # of the thread that inserts and generates
        self._inserted = False  # whether a prompt was inserted since the last step
        self._taken_up = threading.Condition()
        self._reading = threading.Lock()  # guards the next one, which reading a prompt donates
        self._scratch = engine.init_pages()
        self._init_prefix = jax.jit(engine.init_prefix)  # one call a prompt, not one for each array of the cache
        self._before: Array | None = None  # what the step before the last sampled
        self._holding = False
        self._numbers: dict[int, int | None] = {}  # of the latest request of each slot
        self._ending = threading.Lock()  # guards the next one
        self._unwanted: dict[int | None, None] = {}  # numbers of requests to end, in the order of arrival

    @property
    def max_concurrent_decodes(self) -> int:
        """Slots, the held one included."""
        return self._engine.slots

    @property
    def max_prefill_length(self) -> int:
        """The longest padded request: JetStream's smallest bucket that holds a full slot and what is asked for."""
        return min((size for size in BUCKETS if size >= self._engine.length + HEADER + 1), default=BUCKETS[-1])

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The one device that is used."""
        return jax.make_mesh((1,), ("device",), axis_types=(jax.sharding.AxisType.Auto,))

    def load_params(self) -> None:
        """No weights: JetStream would keep the first ones for ever and hand them to every call."""

    def load(self, params: Params, version: int) -> None:
        """Goes on with these weights; returns when the next step is theirs. May be called from any other thread."""
        new = Weights(params, version)
        self._latest = new
        with self._taken_up:
            self._taken_up.wait_for(lambda: self._current is new or self._latest is not new)

    def end(self, number: int) -> None:
        """Ends the request of that number at the next step, if it is not over. May be called from any thread."""
        with self._ending:
            self._unwanted[number] = None
            if len(self._unwanted) > REMEMBERED:
                del self._unwanted[next(iter(self._unwanted))]

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
        self, *, params: None, padded_tokens: Any, true_length: int, existing_prefix: None = None
    ) -> ReadPrompt:
        """Reads a prompt, chunk by chunk.

        A prompt that cannot be used is answered with no tokens, because an exception would end the process.
        """
        latest = self._latest
        whole = np.asarray(padded_tokens, np.int32)[:true_length].tolist()
        numbers = whole[1:] if whole[:1] == [BOS] else whole
        if not self._holding and numbers == [HOLD]:
            self._holding = True
            return self._prompt(NOBODY, 0, held=True, weights=latest)
        try:
            # JetStream cuts long requests from the left, but reports their full length.
            if len(whole) < true_length:
                raise SamplerError(f"{true_length} numbers are more than {self.max_prefill_length}.")
            asked = self._asked(numbers)
            check(asked.request, self._engine)
        except SamplerError as error:
            logging.error("A request is refused: %s", error)
            return self._prompt(NOBODY, BEYOND, held=False, weights=latest)
        if asked.number in self._unwanted:
            return self._prompt(NOBODY, BEYOND, held=False, weights=latest)
        return self._prompt(asked, 0, held=False, weights=latest)

    def insert(self, prefix: ReadPrompt, decode_state: Decoding, slot: int) -> Decoding:
        """Puts a read prompt into a slot."""
        self._take_up()
        self._inserted = True
        if prefix.version != self._current.version:  # it has waited while new weights came
            prefix = self._prompt(prefix.asked, prefix.sampled, held=prefix.held, weights=self._current)
        request = prefix.asked.request
        self._numbers[slot] = prefix.asked.number
        state = self._engine.insert(prefix.prefix, decode_state.state, slot)
        state = self._engine.begin(state, slot, len(request.prompt_ids), settings_of(request))
        return Decoding(
            state,
            sampled=decode_state.sampled.at[slot].set(prefix.sampled),
            held=decode_state.held.at[slot].set(prefix.held),
        )

    def generate(self, params: None, decode_state: Decoding) -> tuple[Decoding, Any]:
        """One token of every slot, as JetStream's ResultTokens."""
        if self._before is not None and bool((np.asarray(self._before) == NO_TOKEN).all()):
            time.sleep(IDLE_S)
        self._take_up()
        self._inserted = False
        state, block = self._engine.generate(self._current.params, decode_state.state)
        self._before = block.data[0, :, 0]
        before = self._without_unwanted(decode_state.sampled)
        sampled, data = _result(block.data[0], before, decode_state.held, np.int32(self._current.version))
        size = COLUMNS
        result = self._make_result(
            data=data,
            tokens_idx=(0, size),
            valid_idx=(size, 2 * size),
            length_idx=(2 * size, 2 * size + 1),
            samples_per_slot=1,
        )
        return Decoding(state, sampled, decode_state.held), result

    def _take_up(self) -> None:
        """The latest weights from now on, but never between reading a prompt and its first token."""
        if not self._inserted and self._current is not self._latest:
            with self._taken_up:
                self._current = self._latest
                self._taken_up.notify_all()

    def _without_unwanted(self, sampled: Int32[Array, " slot"]) -> Int32[Array, " slot"]:
        """Makes JetStream take those requests for over."""
        with self._ending:
            over = [slot for slot, number in self._numbers.items() if number in self._unwanted]
            for slot in over:
                del self._unwanted[self._numbers.pop(slot)]
        for slot in over:
            sampled = sampled.at[slot].set(BEYOND)
        return sampled

    def _asked(self, numbers: list[int]) -> Asked:
        if numbers[:1] == [MARK]:
            return decode(numbers)
        room = self._engine.length - len(numbers)
        if room < 1:
            raise SamplerError(f"a prompt of {len(numbers)} tokens leaves no room in {self._engine.length}.")
        return Asked(dataclasses.replace(self._plain, prompt_ids=tuple(numbers), max_new_tokens=room), None)

    def _prompt(self, asked: Asked, sampled: int, *, held: bool, weights: Weights) -> ReadPrompt:
        prompt = np.asarray(asked.request.prompt_ids, np.int32)
        unread = Unread(0, prompt, [SCRATCH] * -(-len(prompt) // self._engine.chunk))
        with self._reading:
            fresh = self._init_prefix()
            prefix, self._scratch = read(self._engine, weights.params, fresh, self._scratch, [unread])
        return ReadPrompt(prefix, weights.version, asked, sampled, held)


NOBODY = Asked(SampleRequest(prompt_ids=(0,), max_new_tokens=1), None)
BUCKETS = tuple(2**power for power in range(4, 16))  # lengths to which JetStream pads prompts


@jax.jit
def _result(
    drawn: Int32[Array, "slot 4"], sampled: Int32[Array, " slot"], held: Bool[Array, " slot"], version: Int32[Array, ""]
) -> tuple[Int32[Array, " slot"], Int32[Array, "slot 11"]]:
    """Tokens sampled so far, and JetStream's columns: numbers, as many valid flags, length. A held slot never ends."""
    valid = (drawn[:, 0] != NO_TOKEN) | held
    sampled = sampled + valid
    # No log-probability is above 0; with the sign set even that of 0.0 cannot be taken for an id.
    numbers = [drawn[:, :1], drawn[:, 1:3] | SIGN, drawn[:, 3:], jnp.full_like(sampled, -1 - version)[:, None]]
    flags = jnp.repeat(valid.astype(jnp.int32)[:, None], COLUMNS, axis=1)
    return sampled, jnp.concatenate([*numbers, flags, jnp.where(held, 0, sampled)[:, None]], axis=1)


class Text:
    """JetStream's Tokenizer over the model folder's own.

    Args:
      tokenizer: from `tokenizer.json`.
    """

    pad_id = 0
    bos_id = BOS
    stop_tokens = frozenset[int]()  # the engine itself ends requests, so that the stop id is part of the output

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._size = tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, is_bos: bool, max_prefill_length: int, jax_padding: bool) -> tuple[Any, int]:
        """Padded token ids of a text prompt, and their number."""
        from jetstream.engine import token_utils

        ids = np.asarray(self._tokenizer.encode(text).ids, np.int32)
        return token_utils.pad_tokens(
            ids, BOS, 0, is_bos=False, max_prefill_length=max_prefill_length, jax_padding=jax_padding
        )

    def decode(self, token_ids: list[int]) -> str:
        """The text of those numbers that are tokens."""
        return self._tokenizer.decode([token for token in token_ids if 0 <= token < self._size])
