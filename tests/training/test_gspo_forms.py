"""GSPO's ratios know the whole batch: eight devices and micro-batches give the gradient of one, in float64."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from harnessrl_jax.capo import decoder_units, default, fixed_partition
from harnessrl_jax.models import DecoderConfig, init_params
from harnessrl_jax.training import (
    DECODER_RULES,
    Gspo,
    Policy,
    decoder_row_fn,
    init_state,
    make_mesh,
    place_batch,
    place_state,
    state_shardings,
)
from harnessrl_jax.training.assignment import assign
from harnessrl_jax.training.gradients import batch_gradient
from harnessrl_jax.training.state import routing_of

MODEL = DecoderConfig(vocab_size=16, hidden_size=8, layers=1, heads=2, kv_heads=1, head_dim=4, mlp_size=8)
ROWS = 14
"""Of 16, in micro-batches of 8 on eight devices and in one batch on one device."""


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def batch(toy):
    """Calls of two rows and rollouts of three, spread over the batch; log-probs of which some are missing."""
    batch = toy.batch(rows=ROWS, max_rows=16, missing=0.2)
    row = np.arange(16)[:, None]
    owner = lambda number: np.where(batch.weight > 0, number, -1).astype(np.int32)
    return batch._replace(call=owner(row % 7), rollout=owner(row % 5))


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(1)
    start = jax.eval_shape(lambda: init_params(MODEL, jax.random.key(0)))
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(scale=0.4, size=x.shape) + (x.ndim == 1)), start)


@pytest.fixture(scope="module")
def gradient(params, toy):
    """(routing, sequence, on a mesh, batch) -> the gradient and the losses."""
    row_fn = decoder_row_fn(MODEL, temperature=0.7, implementation="dense", remat="none", collect="hidden")
    chosen = jnp.asarray(np.random.default_rng(2).random((2, 1, 8)) < 0.4)

    @cache
    def compiled(routing, sequence, spread):
        capo = dataclasses.replace(default(decoder_units(1, include_gate=True)), routing=routing) if routing else None
        objective = Policy(clip_low=0.1, clip_high=0.1, capo=capo, loss=Gspo(sequence=sequence))
        state = init_state(params, optax.identity(), objective)
        if routing:
            state = state._replace(capo=fixed_partition(chosen))
        mesh = make_mesh(data=2, fsdp=4, tensor=1, context=1) if spread else None
        shardings = mesh and state_shardings(state, optax.identity(), mesh, DECODER_RULES)
        gradient_of = batch_gradient(row_fn, objective, micro_rows=8 if mesh else 16, shardings=shardings)

        def run(state, batch, rows):
            found = gradient_of(state.params, assign(objective, batch, rows), routing_of(objective, state.capo), rows)
            return found.gradient, found.losses

        placed = place_state(state, shardings) if mesh else state
        return toy.jit(run), placed, lambda batch: place_batch(batch, mesh) if mesh else batch

    def run(routing, sequence, spread, batch):
        step, state, place = compiled(routing, sequence, spread)
        return jax.tree.map(np.asarray, step(state, place(batch), jnp.int32(ROWS)))

    return run


def difference(got, want):
    return max(np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True))


@pytest.mark.parametrize("sequence", ["call", "row", "rollout"])
def test_eight_devices_and_micro_batches_equal_one_batch(gradient, batch, sequence):
    assert difference(gradient(None, sequence, True, batch), gradient(None, sequence, False, batch)) < 1e-12


@pytest.mark.parametrize("form", ["vjp", "fused", "position_local"])
def test_routed_they_equal_one_batch(gradient, batch, form):
    """Also the approximation: behind the MLP of a single layer, no attention takes a loss to another role's slots."""
    got, want = gradient(form, "rollout", True, batch), gradient("vjp", "rollout", False, batch)
    assert difference(got, want) < 1e-12
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(want[0])) > 0.01


def test_ratios_of_what_a_micro_batch_holds_would_differ(gradient, batch):
    """The same rollouts cut where the micro-batches are."""
    cut = batch._replace(rollout=batch.rollout + 10 * (np.arange(16) >= 8)[:, None].astype(np.int32))
    want = gradient("vjp", "rollout", False, batch)
    assert difference(gradient("vjp", "rollout", False, cut)[0], want[0]) > 1e-4
