"""A sampler over a mesh of devices gives the tokens that one device gives, and compiles nothing anew."""

import asyncio
import dataclasses

import jax
import numpy as np
import pytest

from harnessrl_jax.models import DecoderConfig, init_params
from harnessrl_jax.sampler import Engine, LocalSampler, SampleRequest
from harnessrl_jax.sampler import engine as functions
from harnessrl_jax.sampler.placement import on_device, over_mesh
from harnessrl_jax.training import make_mesh

CONFIG = DecoderConfig(vocab_size=96, hidden_size=32, layers=1, heads=4, kv_heads=2, head_dim=8, mlp_size=32)
COMPILED = (functions.prefill, functions.restore, functions.begin, functions.restrict, functions.generate)


@pytest.fixture(scope="module")
def weights():
    return jax.tree.map(lambda x: 3.0 * x, init_params(CONFIG, jax.random.key(3)))


def requests():
    for seed in range(8):
        banned = (1, 2, 3) if seed % 2 else ()
        yield SampleRequest(prompt_ids=tuple(range(seed, seed + 11)), max_new_tokens=9, seed=seed, banned_ids=banned)


def sizes():
    return [function._cache_size() for function in COMPILED]


def ask(placement, weights):
    """What two rounds of requests get, and how many variants were compiled before and after the second."""

    async def run():
        engine = Engine(config=CONFIG, slots=3, length=32, chunk=8, steps=3, pages=6, rows=2)
        sampler = LocalSampler(engine, placement=placement)
        sampler.load_weights(weights, 0)
        await sampler.start()
        first = await asyncio.gather(*map(sampler.complete, requests()))
        before = sizes()
        sampler.load_weights(weights, 1)
        others = [dataclasses.replace(request, seed=request.seed + 100) for request in requests()]
        second = await asyncio.gather(*map(sampler.complete, others))
        sampler.load_weights(weights, 0)  # forgets the chunks
        for request, shared in zip(list(requests())[:3], first, strict=False):
            alone = await sampler.complete(request)
            assert (alone.logps.tobytes(), alone.survival.tobytes()) == (
                shared.logps.tobytes(),
                shared.survival.tobytes(),
            )
        await sampler.close()
        return [*first, *second], before, sizes()

    return asyncio.run(run())


def test_a_mesh_samples_what_one_device_samples(weights):
    one, *_ = ask(on_device(), weights)
    mesh = make_mesh(data=1, fsdp=4, tensor=2, context=1)
    before = np.array(sizes())
    spread, middle, after = ask(over_mesh(mesh), weights)
    for got, want in zip(spread, one, strict=True):
        assert got.output_ids.tolist() == want.output_ids.tolist()
        np.testing.assert_allclose(got.logps, want.logps, rtol=1e-3, atol=2e-5)
        np.testing.assert_allclose(got.survival, want.survival, rtol=1e-3, atol=2e-5)
    assert after == middle
    assert (np.array(after) - before).tolist() == [1] * len(COMPILED)


def test_weights_and_caches_are_split(weights):
    placement = over_mesh(make_mesh(data=1, fsdp=4, tensor=2, context=1))
    placed = jax.device_put(weights, placement.weights(weights))
    kernel = placed["layers_0"]["mlp"]["up"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // 8
    engine = Engine(config=CONFIG, slots=3, length=32, chunk=8, steps=3, pages=6)
    state = placement.settle(engine.init_state())
    assert state.cache.k[0].addressable_shards[0].data.shape == (3, 1, 32, 8)
    assert state.hidden.sharding.is_fully_replicated
    odd = over_mesh(make_mesh(data=1, fsdp=2, tensor=4, context=1))  # two heads over four parts: kept whole
    assert odd.settle(engine.init_state()).cache.k[0].sharding.is_fully_replicated
