"""CAPO on the neurons of a mixture of experts, through whole steps of a small Qwen3-MoE with planted neurons."""

import dataclasses
import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from harnessrl_jax.capo import default, expert_units
from harnessrl_jax.models import DecoderConfig, Experts, init_params
from harnessrl_jax.training import Policy, decoder_row_fn, init_state, make_step
from harnessrl_jax.trajectories import Role

EXPERTS, NEURONS, UNITS = 4, 4, 16
MODEL = DecoderConfig(
    vocab_size=12, hidden_size=8, layers=1, heads=2, kv_heads=1, head_dim=4, mlp_size=NEURONS, qk_norm=True,
    experts=Experts(count=EXPERTS, active=2, renormalise=True),
)  # fmt: skip
OPTIMIZER = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.2, momentum=0.9))
PLANTED = {Role.ACTION: [(0, 2), (1, 3)], Role.ARGS: [(1, 0), (2, 1)]}  # (expert, neuron)
CAPO = dataclasses.replace(
    default(expert_units(1, include_gate=True, bias=False)), top_fraction=2 / UNITS, min_tokens=8,
    warmup_rollouts=5, refresh_steps=None,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def params():
    """Tokens below 6 lie along axis 0 and are sent to experts 0 and 1, the others along axis 1, to experts 1 and 2.

    The planted neurons read one of the two axes; all others read both alike.
    """
    rng = np.random.default_rng(0)
    start = jax.eval_shape(lambda: init_params(MODEL, jax.random.key(0)))
    params = jax.tree.map(lambda x: rng.normal(scale=0.05, size=x.shape) + (x.ndim == 1), start)
    params["embed"]["embedding"][:6, 0] += 2
    params["embed"]["embedding"][6:, 1] += 2
    experts = params["layers_0"]["experts"]
    experts["router"]["kernel"][:] = 0
    experts["router"]["kernel"][0, :2], experts["router"]["kernel"][1, 1:3] = 2, 2
    for name in ("gate", "up"):
        experts[name]["kernel"][:, :2] += 0.2
        for axis, places in enumerate(PLANTED.values()):
            for expert, neuron in places:
                experts[name]["kernel"][expert, :2, neuron] = np.eye(2)[axis]
    return jax.tree.map(jnp.asarray, params)


@pytest.fixture(scope="module")
def batches(tree_batch):
    """What stands before an action is a token below 6, what stands before args is not."""

    def with_roles(batch, rows):
        before = np.take_along_axis(batch.token, batch.source, axis=1)
        role = np.where(before < 6, Role.ACTION, Role.ARGS)
        return batch._replace(role=np.where(batch.weight > 0, role, Role.NONE).astype(np.int8)), rows

    return [with_roles(*tree_batch(12, row_slots=24, row_targets=36, max_rows=4, seed=seed)) for seed in range(4)]


@pytest.fixture(scope="module")
def states(toy, params, batches):
    """routing -> the states before and after each step."""
    row_fn = decoder_row_fn(MODEL, temperature=1.0, implementation="dense", remat="full", collect="hidden")

    @cache
    def run(routing):
        capo = dataclasses.replace(CAPO, routing=routing)
        objective = Policy(clip_low=0.2, clip_high=0.28, capo=capo)
        step, found = toy.jit(make_step(row_fn, OPTIMIZER, objective, micro_rows=2)), []
        found.append(init_state(params, OPTIMIZER, objective))
        for batch in batches:
            state, metrics = step(found[-1], *batch)
            assert (metrics["applied"], metrics["capo/probe_dropped"]) == (1, 0)
            found.append(state)
        return found

    return run


def largest(got, want):
    return max(np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True))


def test_the_planted_neurons_are_found(states):
    """Four rollouts a step: the second ends the warm-up."""
    before, after = states("vjp")[1:3]
    assert (bool(before.capo.active), bool(after.capo.active)) == (False, True)
    for units, places in zip(after.capo.units[:, 0], PLANTED.values(), strict=True):
        assert [divmod(int(i), NEURONS) for i in np.flatnonzero(units)] == places


def test_an_expert_counts_the_targets_that_were_sent_to_it(states, batches):
    """Its neurons' tokens, per role: expert 1 sees both roles, 0 and 2 one each, 3 nothing."""
    count = [int((batches[0][0].role == role).sum()) for role in PLANTED]
    tokens = np.asarray(states("vjp")[1].capo.tokens)[:, 0].reshape(2, EXPERTS, NEURONS)
    wanted = np.array([[count[0], count[0], 0, 0], [0, count[1], count[1], 0]])
    np.testing.assert_array_equal(tokens, np.broadcast_to(wanted[:, :, None], tokens.shape))


def test_frozen_neurons_keep_their_bits_through_decay_and_momentum(states):
    """The warm-up gave every neuron that was ever asked a momentum."""
    found = states("vjp")
    trained = np.asarray(found[2].capo.units.any(axis=(0, 1))).reshape(EXPERTS, NEURONS)
    for before, after in itertools.pairwise(found[2:]):
        old, new = (state.params["layers_0"]["experts"] for state in (before, after))
        same = {name: np.asarray(old[name]["kernel"] == new[name]["kernel"]) for name in ("gate", "up", "down")}
        np.testing.assert_array_equal(same["gate"].all(axis=1), ~trained)
        np.testing.assert_array_equal(same["up"].all(axis=1), ~trained)
        np.testing.assert_array_equal(same["down"].all(axis=2), ~trained)
        assert not np.asarray(old["router"]["kernel"] == new["router"]["kernel"]).all()  # ungated


def test_the_fused_form_agrees(states):
    for got, want in zip(states("fused"), states("vjp"), strict=True):
        assert largest(got.params, want.params) < 1e-12
        np.testing.assert_array_equal(got.capo.units, want.capo.units)
