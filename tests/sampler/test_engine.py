import functools

import jax
import numpy as np
import pytest

from harnessrl_jax import models
from harnessrl_jax.errors import SamplerError
from harnessrl_jax.sampler import Engine, SampleRequest
from harnessrl_jax.sampler import engine as functions
from harnessrl_jax.sampler.batching import settings_of
from harnessrl_jax.sampler.engine import NO_TOKEN


@pytest.fixture
def read(engine, params):
    """Reads a prompt into a prefix, chunk by chunk, keeping the chunks on pages 1, 2, ..."""

    def run(prompt):
        pages = engine.init_pages()
        prefix = engine.restore(pages, np.zeros(engine.length // engine.chunk, np.int32), 0)
        for page, start in enumerate(range(0, len(prompt), engine.chunk), start=1):
            part = np.array(prompt[start : start + engine.chunk], np.int32)
            token = np.pad(part, (0, engine.chunk - len(part)))
            prefix, pages = engine.prefill(params, prefix, pages, token, start, len(part), page)
        return prefix, pages

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
    again = engine.restore(pages, page, 2)
    for got, want in zip(jax.tree.leaves(again), jax.tree.leaves(prefix), strict=True):
        np.testing.assert_array_equal(got, want)
    assert np.abs(again.cache.k[0]).sum() > 0
    first = engine.restore(pages, page, 1)
    # Half of a full cache is empty, and nothing of the second chunk shows.
    for got, want in zip(jax.tree.leaves(first.cache), jax.tree.leaves(prefix.cache), strict=True):
        assert np.count_nonzero(got) == np.count_nonzero(want) // 2


def sample(engine, params, prefix, length, slot=0, **wishes):
    request = SampleRequest(prompt_ids=(0,), **wishes)
    state = engine.insert(prefix, engine.init_state(), slot, length, settings_of(request))
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
            state = engine.insert(prefix, state, slot, 9, settings_of(request))
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
        ({"pages": -1}, r"pages must be at least 0, got -1"),
        ({"length": 50}, r"a slot of 50 tokens is not a whole number of prefill chunks of 8\. Take a length of 56"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(engine, change, message):
    sizes = {"config": engine.config, "slots": 3, "length": 48, "chunk": 8, "steps": 3, "pages": 0}
    Engine(**sizes)
    with pytest.raises(SamplerError, match=message):
        Engine(**sizes | change)
