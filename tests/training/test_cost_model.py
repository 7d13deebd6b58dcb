"""FLOPs and memory of the forecast against what XLA counts in the compiled step."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from harnessrl_jax.capo import decoder_units, default
from harnessrl_jax.models import DecoderConfig, Experts, init_params
from harnessrl_jax.training import (
    DECODER_RULES,
    Policy,
    decoder_row_fn,
    init_state,
    make_mesh,
    make_optimizer,
    make_step,
    state_shardings,
    step_compiler_options,
)
from harnessrl_jax.training.chips import CHIPS
from harnessrl_jax.training.cost_model import Work, device_bytes, sampler_memory, step_flops, step_memory, step_seconds
from harnessrl_jax.trajectories.rows import empty_batch

MODEL = DecoderConfig(
    vocab_size=1024, hidden_size=128, layers=3, heads=4, kv_heads=2, head_dim=32, mlp_size=512, qkv_bias=True
)
ADAMW = make_optimizer(learning_rate=1e-2, b1=0.9, b2=0.95, eps=1e-6, weight_decay=0.1, clip_norm=1.0)
# Dense attention and one micro-batch: XLA counts the body of a loop once, however often it runs.
PLAIN = Work(
    rows=2, micro_rows=2, slots=256, targets=128, pairs=256**2, roles=1, cotangents=1, extra_forwards=0,
    implementation="dense", remat="none",
)  # fmt: skip
LONG = dataclasses.replace(PLAIN, slots=512, pairs=512**2)
FORECASTS = {
    "nothing computed again, short rows": PLAIN,
    "products kept, long rows": dataclasses.replace(LONG, remat="dots"),
    "attention kept, long rows, routed": dataclasses.replace(LONG, remat="attention", roles=2, cotangents=2),
}


def compiled(work):
    """The compiled step of one device, the shapes of its state, and where they lie."""
    capo = default(decoder_units(MODEL.layers, include_gate=True)) if work.roles > 1 else None
    goal = Policy(clip_low=0.2, clip_high=0.2, capo=capo)
    reads = capo.statistic.reads if capo else None
    how = {"implementation": work.implementation, "remat": work.remat, "collect": reads}
    mesh = make_mesh(data=1, fsdp=1, tensor=1, context=1, devices=jax.devices()[:1])
    state = jax.eval_shape(lambda: init_state(init_params(MODEL, jax.random.key(0)), ADAMW, goal))
    places = state_shardings(state, ADAMW, mesh, DECODER_RULES)
    placed = jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state, places)
    row_fn = decoder_row_fn(MODEL, temperature=1.0, **how)
    step = make_step(row_fn, ADAMW, goal, micro_rows=work.micro_rows, shardings=places)
    quick = {"xla_backend_optimization_level": 0} | step_compiler_options()
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(places, None), compiler_options=quick)
    batch = empty_batch(work.slots, work.targets, work.rows)
    return jitted.lower(placed, batch, jnp.int32(work.rows)).compile(), state, places


@pytest.mark.parametrize("work", FORECASTS.values(), ids=FORECASTS)
def test_the_forecast_agrees_with_the_compiler(work):
    step, state, places = compiled(work)
    assert step_flops(MODEL, state.params, work).total == pytest.approx(step.cost_analysis()["flops"], rel=0.05)
    found, held = step.memory_analysis(), step_memory(MODEL, state, places, work)
    arguments = device_bytes(state.params, places.params) + device_bytes(state.opt_state, places.opt_state)
    assert held.parameters + held.optimiser == arguments
    used = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    assert held.total == pytest.approx(used + found.temp_size_in_bytes, rel=0.2)


def test_the_sampler_of_a_mixture_keeps_its_experts_too():
    """By hand: 3 layers, keys and values of 2 heads of 32 numbers of 4 bytes, and a byte for each of 2 experts."""
    model = dataclasses.replace(MODEL, experts=Experts(count=4, active=2, renormalise=True))
    for config, token in ((MODEL, 3 * 2 * 2 * 32 * 4), (model, 3 * (2 * 2 * 32 * 4 + 2))):
        assert sampler_memory(config, {}, 100).cache == 100 * token


def test_seconds_by_hand():
    params = jax.eval_shape(lambda: init_params(MODEL, jax.random.key(0)))
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    sizes = lambda **axes: {"data": 1, "fsdp": 1, "tensor": 1, "context": 1} | axes
    seconds = lambda **axes: step_seconds(MODEL, params, PLAIN, sizes(**axes), CHIPS["h100"])
    flops, one_way = step_flops(MODEL, params, PLAIN).total, CHIPS["h100"].link / 2
    assert seconds() == (pytest.approx(flops / CHIPS["h100"].float32), 0)
    assert seconds(data=2).compute == pytest.approx(seconds().compute / 2)
    assert seconds(data=2).communication == pytest.approx(4 * size / one_way)  # an all-reduce moves 2 (n - 1) / n
    assert seconds(fsdp=2).communication == pytest.approx(3 * 4 * size / 2 / one_way)  # two gathers, one scatter
    narrow = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), params)
    fast = step_seconds(MODEL, narrow, PLAIN, sizes(), CHIPS["h100"])
    assert fast.compute == pytest.approx(flops / CHIPS["h100"].bfloat16)


def test_flops_by_hand():
    params = jax.eval_shape(lambda: init_params(MODEL, jax.random.key(0)))
    matrices = 3 * (128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 512)
    found = step_flops(MODEL, params, PLAIN)
    assert found.layers == 2 * 256 * 6 * matrices
    assert found.attention == 2 * 256**2 * 12 * 128 * 3
    assert found.head == 2 * 128 * 6 * 1024 * 128
    routed = step_flops(MODEL, params, dataclasses.replace(PLAIN, roles=2, cotangents=2))
    assert routed.layers == found.layers * 10 / 6
    fused = step_flops(MODEL, params, dataclasses.replace(PLAIN, cotangents=2))
    assert fused.layers == found.layers * 8 / 6
