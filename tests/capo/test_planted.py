"""Planted neurons in a real decoder, found through its row function: the right ones, at the right position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harnessrl_jax.capo import FIRE, RELU, UP_RELU, partition, probe_row, probe_targets
from harnessrl_jax.models import DecoderConfig, init_params
from harnessrl_jax.training import decoder_row_fn
from harnessrl_jax.training.rows import Row

# Kinds of tokens, which the embedding tells apart: what precedes an action, an action, what precedes args, args.
BEFORE_ACTION, ACTION_TOKEN, BEFORE_ARGS, ARGS_TOKEN, OTHER = range(5)
UNITS, COMMON = 100, 30
PLANTED = {BEFORE_ACTION: range(50, 60), BEFORE_ARGS: range(60, 70), ACTION_TOKEN: range(70, 80)}
MODEL = DecoderConfig(vocab_size=10, hidden_size=8, layers=1, heads=2, kv_heads=1, head_dim=2, mlp_size=UNITS)
SLOTS, TURN = 20, (BEFORE_ACTION, ACTION_TOKEN, OTHER, BEFORE_ARGS, ARGS_TOKEN)


@pytest.fixture(scope="module")
def params():
    """A decoder with MLP units that fire for one kind of token each; the first 30 fire hard for every kind."""
    params = jax.tree.map(np.array, jax.jit(init_params, static_argnums=0)(MODEL, jax.random.key(0)))
    rng = np.random.default_rng(0)
    embedding = np.zeros((10, 8))
    embedding[np.arange(10), np.arange(10) // 2] = 1.0  # two tokens of each kind
    mlp, gate, up = params["layers_0"]["mlp"], np.full((8, UNITS), -0.5), np.zeros((8, UNITS))
    gate[:5, :COMMON] = 6.0 + 0.01 * rng.normal(size=(5, COMMON))
    up[:5, :COMMON] = np.linspace(4, 5, COMMON)
    for kind, units in PLANTED.items():
        gate[kind, units], up[kind, units] = 3.0, 1.0
    mlp["gate"]["kernel"], mlp["up"]["kernel"] = gate.astype(np.float32), up.astype(np.float32)
    params["embed"]["embedding"] = embedding.astype(np.float32)
    params["layers_0"]["attn"]["o"]["kernel"] *= 0
    return params


def row(rng):
    """Four turns of one path. Every action and args token is a target, predicted by the slot before it."""
    kinds = np.tile(TURN, 4)
    source = np.flatnonzero(np.isin(kinds, [BEFORE_ACTION, BEFORE_ARGS]))
    targets = len(source)
    none = np.zeros(targets, np.float32)
    return Row(
        token=jnp.asarray(2 * kinds + rng.integers(0, 2, SLOTS)),
        position=jnp.arange(SLOTS),
        subtree_end=jnp.full(SLOTS, SLOTS),
        source=jnp.asarray(source),
        target=jnp.asarray(2 * kinds[source + 1]),
        logp_behaviour=none,
        has_logp=none > 0,
        advantage=none,
        role=jnp.asarray(np.where(kinds[source] == BEFORE_ACTION, 0, 1)),
        weight=none + 1,
        success=none < 1,
        call=jnp.zeros(targets, int),
        rollout=jnp.zeros(targets, int),
    )


@pytest.fixture(scope="module")
def mean(params):
    """(statistic, row) -> mean statistic of the units."""

    def measure(statistic, row):
        row_fn = decoder_row_fn(MODEL, temperature=1.0, implementation="dense", remat="none", collect=statistic.reads)
        probed, _ = probe_targets(row.role[None], row.rollout[None], row.success[None])
        return probe_row(row_fn(params, row).units, row.role, probed[0], statistic=statistic).mean()

    return jax.jit(measure, static_argnums=0)


def members(mean, score, fraction):
    chosen = partition(
        mean,
        jnp.zeros(mean.shape, bool),
        jnp.ones(mean.shape, bool),
        score=score,
        top_fraction=fraction,
        hysteresis=1.0,
    )
    return [set(np.flatnonzero(role[0])) for role in np.asarray(chosen)]


@pytest.mark.parametrize("statistic", [RELU, UP_RELU, FIRE])
def test_contrast_finds_them(mean, statistic):
    found = members(mean(statistic, row(np.random.default_rng(1))), "contrast", 10 / UNITS)
    assert found == [set(PLANTED[BEFORE_ACTION]), set(PLANTED[BEFORE_ARGS])]


def test_raw_takes_the_common_block_for_both_roles(mean):
    found = members(mean(RELU, row(np.random.default_rng(1))), "raw", 10 / UNITS)
    assert found[0] == found[1] <= set(range(COMMON))


def test_units_that_fire_on_the_token_itself_are_not_taken(mean):
    # Units 70 to 79 fire on action tokens, one slot after the one that predicts them.
    own_slot = row(np.random.default_rng(1))
    found = members(mean(RELU, own_slot), "contrast", 20 / UNITS)
    assert not set(PLANTED[ACTION_TOKEN]) & (found[0] | found[1])
    wrong = own_slot._replace(source=own_slot.source + 1)
    assert members(mean(RELU, wrong), "contrast", 10 / UNITS)[0] == set(PLANTED[ACTION_TOKEN])


def test_failed_rollouts_are_not_read(mean):
    good = row(np.random.default_rng(1))
    half = good._replace(rollout=jnp.arange(8) // 4, success=jnp.arange(8) < 4)
    spoilt = half._replace(token=half.token.at[10:].set(8))  # what the failed half says, replaced
    np.testing.assert_array_equal(mean(RELU, half), mean(RELU, spoilt))
    read = spoilt._replace(success=half.success | True)
    assert (np.asarray(mean(RELU, read)) != mean(RELU, half)).any()
