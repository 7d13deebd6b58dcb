import dataclasses
import functools

import jax
import numpy as np
import pytest

from harnessrl_jax import models
from harnessrl_jax.errors import SamplerError
from harnessrl_jax.sampler import Engine, SampleRequest, reading
from harnessrl_jax.sampler import engine as functions
from harnessrl_jax.sampler.batching import settings_of
from harnessrl_jax.sampler.engine import NO_TOKEN, Prefix
from harnessrl_jax.sampler.reading import Unread


@pytest.fixture
def read(engine, params):
    """Reads a prompt into a prefix of one slot, and keeps its chunks on pages 1, 2, ..."""

    def run(prompt):
        pages = range(1, -(-len(prompt) // engine.chunk) + 1)
        unread = Unread(0, np.array(prompt, np.int32), pages)
        return reading.read(engine, params, engine.init_prefix(), engine.init_pages(), [unread])

    return run


def prompt_of(size):
    return tuple(np.random.default_rng(size).integers(0, 97, size).tolist())


@pytest.mark.parametrize("size", [1, 7, 8, 9, 16, 21])
def test_chunks_read_a_prompt_like_one_pass(params, read, one_pass, size):
    prefix, _ = read(prompt_of(size))
    np.testing.assert_allclose(prefix.hidden[0], one_pass(params, prompt_of(size))[-1], rtol=1e-4, atol=1e-5)


def test_restored_chunks_are_the_ones_that_were_read(engine, read):
    prefix, pages = read(prompt_of(16))
    page = np.array([1, 2, 7, 7, 7, 7], np.int32)
    again = engine.restore(engine.init_prefix(), pages, 0, page, 2)
    for got, want in zip(jax.tree.leaves(again), jax.tree.leaves(prefix), strict=True):
        np.testing.assert_array_equal(got, want)
    assert np.abs(again.cache.k[0]).sum() > 0
    first = engine.restore(engine.init_prefix(), pages, 0, page, 1)
    # Half of a full cache is empty, and nothing of the second chunk shows.
    for got, want in zip(jax.tree.leaves(first.cache), jax.tree.leaves(prefix.cache), strict=True):
        assert np.count_nonzero(got) == np.count_nonzero(want) // 2


@pytest.mark.parametrize("rows", [2, 4])
def test_what_a_slot_reads_depends_on_its_prompt_alone(engine, params, rows):
    wide = dataclasses.replace(engine, rows=rows)
    prompts = [np.array(prompt_of(size), np.int32) for size in (21, 1, 40)]
    numbers = [-(-len(prompt) // wide.chunk) for prompt in prompts]
    first = np.cumsum([1, *numbers])

    def unread(at, slot):
        return Unread(slot, prompts[at], range(first[at], first[at + 1]))

    def start():
        state = wide.init_state()
        dirty = jax.tree.map(lambda x: x + np.float32("nan"), Prefix(state.cache, state.hidden))
        return dirty, wide.init_pages()

    alone = [reading.read(wide, params, *start(), [unread(at, slot=0)]) for at in range(3)]
    together, pages = reading.read(wide, params, *start(), [unread(at, slot) for slot, at in enumerate((2, 0, 1))])
    for slot, at in enumerate((2, 0, 1)):
        mine, its_pages = alone[at]
        size = len(prompts[at])
        np.testing.assert_array_equal(together.hidden[slot], mine.hidden[0])
        for got, want in zip(jax.tree.leaves(together.cache), jax.tree.leaves(mine.cache), strict=True):
            np.testing.assert_array_equal(got[slot, :, :size], want[0, :, :size])
        kept = slice(first[at], first[at + 1])
        for got, want in zip(jax.tree.leaves(pages), jax.tree.leaves(its_pages), strict=True):
            np.testing.assert_array_equal(got[kept], want[kept])
    assert np.isfinite(together.hidden).all()


def test_calls_are_shared_and_padding_changes_nothing(engine, params, read):
    wide = dataclasses.replace(engine, rows=4)
    calls = []

    class Counting(Engine):
        def prefill(self, params, prefix, pages, chunks):
            calls.append(np.asarray(chunks.slot).tolist())
            return super().prefill(params, prefix, pages, chunks)

    counting = Counting(**{field.name: getattr(wide, field.name) for field in dataclasses.fields(wide)})
    state = wide.init_state()
    prompts = [Unread(slot, np.array(prompt_of(9), np.int32), [1, 2]) for slot in (2, 0, 1)]
    prefix, _ = reading.read(counting, params, Prefix(state.cache, state.hidden), wide.init_pages(), prompts)
    assert [[slot for slot in call if slot < 3] for call in calls] == [[2, 2, 0, 0], [1, 1]]
    for slot in range(3):
        np.testing.assert_allclose(prefix.hidden[slot], read(prompt_of(9))[0].hidden[0], rtol=1e-4, atol=1e-5)


def sample(engine, params, prefix, length, slot=0, **wishes):
    request = SampleRequest(prompt_ids=(0,), **wishes)
    state = engine.begin(engine.insert(prefix, engine.init_state(), slot), slot, length, settings_of(request))
    return engine.generate(params, state)


def test_a_slot_ends_at_its_limit(engine, params, read):
    state, block = sample(engine, params, read(prompt_of(9))[0], 9, slot=1, max_new_tokens=2)
    data = np.asarray(block.data)
    assert (data[:, 1, 0] != NO_TOKEN).tolist() == [True, True, False]
    assert (data[:, [0, 2]] == NO_TOKEN).all()
    assert state.active.tolist() == [False] * 3
    assert state.position[1] == 10  # of the last token, which is never read


def test_a_slot_ends_after_a_stop_id(engine, params, read):
    prefix, _ = read(prompt_of(9))
    first = int(sample(engine, params, prefix, 9, max_new_tokens=9, temperature=0.0)[1].data[0, 0, 0])
    state, block = sample(engine, params, prefix, 9, max_new_tokens=9, temperature=0.0, stop_ids=(95, first))
    assert np.asarray(block.data)[:, 0, 0].tolist() == [first, NO_TOKEN, NO_TOKEN]
    assert not state.active.any()


def test_a_token_that_nothing_follows_is_not_read(engine, params, read, monkeypatch):
    forward = []

    def counted(*given):
        jax.debug.callback(lambda: forward.append(None))
        return extend(*given)

    extend = models.extend
    monkeypatch.setattr(models, "extend", counted)
    generate = jax.jit(functools.partial(functions.generate.__wrapped__, engine.config, engine.steps))
    state = engine.init_state()
    prefix, _ = read(prompt_of(9))
    for limits in ((1,), (1, 1), (3,), (1, 2)):
        for slot, limit in enumerate(limits):
            request = SampleRequest(prompt_ids=(0,), max_new_tokens=limit)
            state = engine.begin(engine.insert(prefix, state, slot), slot, 9, settings_of(request))
        forward.clear()
        state, block = generate(params, state)
        jax.effects_barrier()
        assert (np.asarray(block.data)[:, :, 0] != NO_TOKEN).sum() == sum(limits)
        assert len(forward) == max(limits) - 1


def test_the_last_place_of_a_slot_is_used(engine, params, read, one_pass):
    prompt = prompt_of(engine.length - 1)
    state, block = sample(engine, params, read(prompt)[0], len(prompt), max_new_tokens=1, temperature=0.0)
    want = models.logits(engine.config, params, one_pass(params, prompt)[-1]).argmax()
    assert block.data[0, 0, 0] == want
    assert not state.active.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": 0}, r"^Engine: slots must be at least 1, got 0\."),
        ({"steps": 0}, r"steps must be at least 1"),
        ({"rows": 0}, r"rows must be at least 1, got 0"),
        ({"pages": -1}, r"pages must be at least 0, got -1"),
        ({"length": 50}, r"a slot of 50 tokens is not a whole number of prefill chunks of 8\. Take a length of 56"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(engine, change, message):
    sizes = {"config": engine.config, "slots": 3, "length": 48, "chunk": 8, "steps": 3, "pages": 0}
    Engine(**sizes)
    with pytest.raises(SamplerError, match=message):
        Engine(**sizes | change)
