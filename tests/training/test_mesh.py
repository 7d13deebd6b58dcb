"""Eight devices agree with one, whatever the mesh, and compile once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from harnessrl_jax.training import (
    DECODER_RULES,
    init_state,
    make_mesh,
    make_optimizer,
    make_step,
    place_batch,
    place_state,
    state_shardings,
)

ADAMW = make_optimizer(learning_rate=1e-3, b1=0.9, b2=0.95, eps=1e-6, weight_decay=0.1, clip_norm=1.0)
STEPS = 3


@pytest.fixture(scope="module")
def one_device(toy):
    """The state and metrics after a few steps of one device, with smaller micro-batches."""
    objective = toy.capo(layers=1)
    step, state = (
        toy.jit(make_step(toy.row_fn, ADAMW, objective, micro_rows=2)),
        init_state(toy.params(layers=1), ADAMW, objective),
    )
    for i in range(STEPS):
        state, metrics = step(state, toy.batch(rows=8 - i, seed=i), jnp.int32(8 - i))
    return jax.tree.map(np.asarray, (state, metrics))


@pytest.mark.parametrize("sizes", [{"data": 8, "fsdp": 1, "tensor": 1}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_eight_devices_equal_one(toy, one_device, sizes):
    objective, traces = toy.capo(layers=1), []

    def row_fn(params, row):
        traces.append(1)
        return toy.row_fn(params, row)

    mesh = make_mesh(**sizes, context=1)
    state = init_state(toy.params(layers=1), ADAMW, objective)
    shardings = state_shardings(state, ADAMW, mesh, DECODER_RULES)
    state = place_state(state, shardings)
    step = toy.jit(
        make_step(row_fn, ADAMW, objective, micro_rows=8, shardings=shardings),
        donate_argnums=0,
        out_shardings=(shardings, None),
    )
    traced = []
    for i in range(STEPS):
        state, metrics = step(state, place_batch(toy.batch(rows=8 - i, seed=i), mesh), jnp.int32(8 - i))
        traced.append(len(traces))
    assert traced == traced[:1] * STEPS
    assert step._cache_size() == 1
    want, wanted = one_device
    assert wanted["capo/refreshes"] == 2
    np.testing.assert_array_equal(state.capo.units, want.capo.units)
    for got, expected in zip(jax.tree.leaves(state), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=2e-6)
    for name in wanted:
        np.testing.assert_allclose(metrics[name], wanted[name], rtol=1e-3, atol=1e-5, err_msg=name)
    gate = state.params["layers_0"]["mlp"]["gate"]["kernel"]
    assert gate.sharding.spec == PartitionSpec("fsdp", "tensor")
    assert gate.addressable_shards[0].data.shape == (8 // sizes["fsdp"], 8 // sizes["tensor"])
