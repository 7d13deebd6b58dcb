"""Prompt chunks -> keys and values -> a slot -> sampled tokens: pure jitted functions over the decoder's cache.

The contract is that of serving engines with slots: prefill, insert, generate. Everything a request asks for is an array
in the state, so nothing recompiles. All functions donate what they replace.

To the bit, a token depends only on the weights, the tokens before it and the request: a chunk starts at a multiple of
the chunk length and is always computed by the one `prefill`, with as many others in a call as ever, padding if there
are none; a slot is always decoded by the one `generate`, and the random number of a token belongs to its seed and its
absolute position.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Int32, UInt8, UInt32

from harnessrl_jax import models
from harnessrl_jax.errors import SamplerError
from harnessrl_jax.models import DecoderConfig, KVCache, Params
from harnessrl_jax.sampler.sampling import WORD, Cut, Drawn, Mask, draw, uniforms

NO_TOKEN = -1  # in a result: the slot sampled nothing in that step; in stop ids: no stop id
STOP_IDS = 8  # stop ids one request can have


class Settings(NamedTuple):
    """What a request asks for, of every slot or of one; see `SampleRequest`."""

    temperature: Float[Array, "*slot"]
    top_p: Float[Array, "*slot"]
    top_k: Int32[Array, "*slot"]
    min_p: Float[Array, "*slot"]
    masked: Bool[Array, "*slot"]  # whether it samples only what `DecodeState.words` allow
    guided: Bool[Array, "*slot"]  # whether its words change with each token: one token a generate call
    seed: UInt32[Array, "*slot 2"]  # high and low word
    stop_ids: Int32[Array, "*slot stop"]  # NO_TOKEN where there are fewer
    remaining: Int32[Array, "*slot"]  # tokens still to sample


class Prefix(NamedTuple):
    """What slots have read: their cache, and the hidden state of the last token that counts."""

    cache: KVCache
    hidden: Float[Array, "slot hidden"]


class Chunks(NamedTuple):
    """Parts of prompts that one prefill call reads, one a row; of different prompts, or one behind the other."""

    token: Int32[ArrayLike, "row chunk"]  # padded after the first `length`
    slot: Int32[ArrayLike, " row"]  # that reads it; beyond the slots in the rows that pad the call, which are the last
    start: Int32[ArrayLike, " row"]  # absolute position, a multiple of the chunk's length
    length: Int32[ArrayLike, " row"]  # tokens that are not padding, at least 1
    page: Int32[ArrayLike, " row"]  # number of the page that is overwritten with it


class Pages(NamedTuple):
    """Chunks kept for later prompts: `cache` has a page as its slot and a chunk as its length."""

    cache: KVCache
    hidden: Float[Array, "page hidden"]  # of the chunk's last token that counts


class DecodeState(NamedTuple):
    """Everything a decoding step transforms."""

    cache: KVCache
    hidden: Float[Array, "slot hidden"]  # of the token before `position`
    position: Int32[Array, " slot"]  # absolute position of the token to be sampled next
    active: Bool[Array, " slot"]
    settings: Settings
    words: UInt32[Array, "slot word"]  # tokens that a masked slot may sample, see `sampling.Mask`


class Block(NamedTuple):
    """What one `generate` call sampled, packed so that one transfer brings it to the host.

    `data[step, slot]` is the token (NO_TOKEN where the slot had ended) and the bits of its log-probability, its raw
    log-probability and the survival of `sampling.Drawn`.
    """

    data: Int32[Array, "step slot 4"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine:
    """The sizes that every call of one sampler shares. Stateless: parameters and states go in and come out.

    Raises:
      SamplerError: sizes that do not fit each other.
    """

    config: DecoderConfig
    slots: int
    """Sequences decoded together."""
    length: int
    """Tokens of one slot, prompt and output."""
    chunk: int
    """Prompt tokens that are read and kept together; divides `length`."""
    steps: int
    """Tokens of every slot that one generate call samples."""
    pages: int
    """Prompt chunks kept for reuse."""
    rows: int = 1
    """Chunks that one prefill call reads, of any prompts. It costs the same when fewer wait."""

    def __post_init__(self) -> None:
        for name, least in (("slots", 1), ("length", 1), ("chunk", 1), ("steps", 1), ("pages", 0), ("rows", 1)):
            if getattr(self, name) < least:
                raise SamplerError(f"Engine: {name} must be at least {least}, got {getattr(self, name)}.")
        if self.length % self.chunk:
            raise SamplerError(
                f"Engine: a slot of {self.length} tokens is not a whole number of prefill chunks of {self.chunk}. "
                f"Take a length of {-(-self.length // self.chunk) * self.chunk}, or a chunk that divides it."
            )

    @property
    def words(self) -> int:
        """Words of a mask over the vocabulary."""
        return -(-self.config.vocab_size // WORD)

    def init_state(self) -> DecodeState:
        """A state in which every slot is free."""
        zeros = functools.partial(jnp.zeros, self.slots)
        settings = Settings(
            temperature=zeros(jnp.float32),
            top_p=jnp.ones(self.slots, jnp.float32),
            top_k=zeros(jnp.int32),
            min_p=zeros(jnp.float32),
            masked=zeros(bool),
            guided=zeros(bool),
            seed=jnp.zeros((self.slots, 2), jnp.uint32),
            stop_ids=jnp.full((self.slots, STOP_IDS), NO_TOKEN, jnp.int32),
            remaining=zeros(jnp.int32),
        )
        cache = models.init_cache(self.config, self.slots, self.length)
        hidden = jnp.zeros((self.slots, self.config.hidden_size))
        words = jnp.zeros((self.slots, self.words), jnp.uint32)
        return DecodeState(cache, hidden, zeros(jnp.int32), zeros(bool), settings, words)

    def init_pages(self) -> Pages:
        """Empty pages, and before them one that keeps nothing: number `pages.SCRATCH`."""
        hidden = jnp.zeros((self.pages + 1, self.config.hidden_size))
        return Pages(models.init_cache(self.config, self.pages + 1, self.chunk), hidden)

    def init_prefix(self) -> Prefix:
        """One slot that has read nothing."""
        return Prefix(models.init_cache(self.config, 1, self.length), jnp.zeros((1, self.config.hidden_size)))

    def restore(self, prefix: Prefix, pages: Pages, slot: int, page: Int[ArrayLike, " chunk"], count: int) -> Prefix:
        """Lets a slot begin with the first `count` of `page`, which has length / chunk entries."""
        return restore(self.config, prefix, pages, slot, page, count)

    def prefill(self, params: Params, prefix: Prefix, pages: Pages, chunks: Chunks) -> tuple[Prefix, Pages]:
        """Reads chunks of prompts into their slots, and keeps them as pages; see the function `prefill`."""
        return prefill(self.config, params, prefix, pages, chunks)

    def insert(self, prefix: Prefix, state: DecodeState, slot: int) -> DecodeState:
        """Overwrites what a slot has read with what the one slot of a prefix has."""
        return insert(prefix, state, slot)

    def begin(self, state: DecodeState, slot: int, position: int, settings: Settings) -> DecodeState:
        """Makes a slot ready that has read `position` tokens; it is sampled from in the next generate call."""
        return begin(state, slot, position, settings)

    def restrict(
        self, state: DecodeState, changed: Bool[ArrayLike, " slot"], words: UInt32[ArrayLike, "slot word"]
    ) -> DecodeState:
        """Gives the slots that changed new words of their masks."""
        return restrict(state, changed, words)

    def generate(self, params: Params, state: DecodeState) -> tuple[DecodeState, Block]:
        """Samples up to `steps` tokens of every active slot; one of a guided slot."""
        return generate(self.config, self.steps, params, state)

    def experts(self, state: DecodeState, slot: int) -> UInt8[Array, "length layer active"]:
        """The experts that the tokens of a slot went to; of a mixture."""
        return experts(state, slot)


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("prefix",))
def restore(
    config: DecoderConfig,
    prefix: Prefix,
    pages: Pages,
    slot: Int[ArrayLike, ""],
    page: Int[ArrayLike, " chunk"],
    count: Int[ArrayLike, ""],
) -> Prefix:
    """Pages of consecutive chunks -> the start of one slot; of none, nothing but its hidden state changes."""
    page = jnp.asarray(page)

    def lay(i: Array, cache: KVCache) -> KVCache:
        def put(slots: Array, pool: Array, axis: int) -> Array:
            kept = jax.lax.dynamic_slice_in_dim(pool, page[i], 1, 0)
            return jax.lax.dynamic_update_slice(slots, kept, _corner(slots, axis, slot, i * pool.shape[axis]))

        return jax.tree.map(put, cache, pages.cache, _length_axis(config))

    cache = jax.lax.fori_loop(0, count, lay, prefix.cache)
    last = pages.hidden[page[count - 1]]
    return Prefix(cache, jax.lax.dynamic_update_slice_in_dim(prefix.hidden, last[None], slot, 0))


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("prefix", "pages"))
def prefill(
    config: DecoderConfig, params: Params, prefix: Prefix, pages: Pages, chunks: Chunks
) -> tuple[Prefix, Pages]:
    """Reads chunks of prompts and keeps them.

    Args:
      config: sizes.
      params: the weights.
      prefix: of every slot, everything before the first chunk that it reads now.
      pages: kept chunks.
      chunks: what to read; those of one slot in their order.

    Returns:
      The prefix with the chunks, and the pages. Of two chunks for one page the later is kept.
    """
    token, slot, start, length, page = map(jnp.asarray, chunks)
    hidden, cache = models.extend(config, params, token, start, prefix.cache, slot)
    last = jnp.take_along_axis(hidden, length[:, None, None] - 1, axis=1).astype(jnp.float32)

    def keep(row: Array, kept: tuple[Array, Pages]) -> tuple[Array, Pages]:
        read, (pool, ends) = kept

        def copy(pool: Array, slots: Array, axis: int) -> Array:
            shape = (1, *pool.shape[1:])
            written = jax.lax.dynamic_slice(slots, _corner(slots, axis, slot[row], start[row]), shape)
            return jax.lax.dynamic_update_slice_in_dim(pool, written, page[row], 0)

        put = lambda old, at: jax.lax.dynamic_update_slice_in_dim(old, last[row], at, 0)
        pool = jax.tree.map(copy, pool, cache, _length_axis(config))
        return put(read, slot[row]), Pages(pool, put(ends, page[row]))

    used = (slot < prefix.hidden.shape[0]).sum()
    read, pages = jax.lax.fori_loop(0, used, keep, (prefix.hidden, pages))
    return Prefix(cache, read), pages


@functools.partial(jax.jit, donate_argnames=("state",))
def insert(prefix: Prefix, state: DecodeState, slot: Int[ArrayLike, ""]) -> DecodeState:
    """Overwrites what one slot has read."""
    put = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, slot, 0)
    cache, hidden = jax.tree.map(put, Prefix(state.cache, state.hidden), prefix)
    return state._replace(cache=cache, hidden=hidden)


@functools.partial(jax.jit, donate_argnames=("state",))
def begin(
    state: DecodeState, slot: Int[ArrayLike, ""], position: Int[ArrayLike, ""], settings: Settings
) -> DecodeState:
    """Overwrites all of one slot but what it has read; `position` is the number of those tokens."""

    def put(old: Array, new: ArrayLike) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(old, jnp.asarray(new, old.dtype)[None], slot, 0)

    return state._replace(
        position=put(state.position, position),
        active=put(state.active, True),
        settings=jax.tree.map(put, state.settings, settings),
    )


@functools.partial(jax.jit, donate_argnames=("state",))
def restrict(
    state: DecodeState, changed: Bool[ArrayLike, " slot"], words: UInt32[ArrayLike, "slot word"]
) -> DecodeState:
    """Replaces the words of the slots that changed."""
    return state._replace(words=jnp.where(jnp.asarray(changed)[:, None], words, state.words))


@functools.partial(jax.jit, static_argnames=("config", "steps"), donate_argnames=("state",))
def generate(config: DecoderConfig, steps: int, params: Params, state: DecodeState) -> tuple[DecodeState, Block]:
    """Samples and reads up to `steps` tokens of every active slot; stops early when there is nothing to sample.

    A guided slot waits after its first token, for the words of the next.
    """

    def running(step: Array, state: DecodeState) -> Array:
        return state.active & ((step == 0) | ~state.settings.guided)

    def more(carry: tuple[Array, DecodeState, Array]) -> Array:
        step, state, _ = carry
        return (step < steps) & running(step, state).any()

    def advance(carry: tuple[Array, DecodeState, Array]) -> tuple[Array, DecodeState, Array]:
        step, state, data = carry
        state, row = _step(config, params, state, running(step, state))
        return step + 1, state, jax.lax.dynamic_update_slice_in_dim(data, row[None], step, 0)

    data = jnp.full((steps, *state.position.shape, 4), NO_TOKEN, jnp.int32)
    _, state, data = jax.lax.while_loop(more, advance, (jnp.int32(0), state, data))
    return state, Block(data)


@jax.jit
def experts(state: DecodeState, slot: Int[ArrayLike, ""]) -> UInt8[Array, "length layer active"]:
    """What every layer's cache holds of one slot's choices; anything beyond the tokens it has read."""
    return jnp.stack([layer[slot] for layer in state.cache.experts], axis=1)


def _step(
    config: DecoderConfig, params: Params, state: DecodeState, running: Bool[Array, " slot"]
) -> tuple[DecodeState, Int32[Array, "slot 4"]]:
    """One token of every running slot, and its entry of a Block."""
    asked = state.settings
    scores = models.logits(config, params, state.hidden)
    uniform = uniforms(asked.seed, state.position)
    cut, mask = Cut(asked.top_p, asked.top_k, asked.min_p), Mask(asked.masked, state.words)
    drawn = draw(scores, uniform, asked.temperature, cut, mask)
    remaining = asked.remaining - running
    stopped = (drawn.token[:, None] == asked.stop_ids).any(-1)
    active = state.active & ~(running & (stopped | (remaining <= 0)))
    # What nothing follows is not read. The others are read with the rest at no cost; they write one place of their own
    # cache, which is overwritten before it is read.
    read = lambda cache: models.extend(config, params, drawn.token[:, None], state.position, cache)
    skip = lambda cache: (state.hidden[:, None].astype(dtype), cache)
    dtype = jax.eval_shape(read, state.cache)[0].dtype
    hidden, cache = jax.lax.cond((running & active).any(), read, skip, state.cache)
    hidden = jnp.where(running[:, None], hidden[:, 0].astype(jnp.float32), state.hidden)
    position = state.position + (running & active)
    after = DecodeState(cache, hidden, position, active, asked._replace(remaining=remaining), state.words)
    return after, _packed(drawn, running)


def _packed(drawn: Drawn, running: Bool[Array, " slot"]) -> Int32[Array, "slot 4"]:
    bits = [jax.lax.bitcast_convert_type(x, jnp.int32) for x in (drawn.logp, drawn.raw_logp, drawn.survival)]
    return jnp.where(running[:, None], jnp.stack([drawn.token, *bits], axis=-1), NO_TOKEN)


def _corner(slots: Array, axis: int, slot: ArrayLike, place: ArrayLike) -> list[ArrayLike]:
    """Where a place of a slot begins in an array of a cache."""
    return [slot if i == 0 else place if i == axis else 0 for i in range(slots.ndim)]


@functools.cache
def _length_axis(config: DecoderConfig) -> KVCache:
    """For each array of a cache, the axis that grows with the length. Axis 0 is always the slot."""
    short, long = (jax.eval_shape(lambda n=n: models.init_cache(config, 1, n)) for n in (1, 2))
    grows = lambda a, b: next(axis for axis, (m, n) in enumerate(zip(a.shape, b.shape)) if m != n)
    return jax.tree.map(grows, short, long)
