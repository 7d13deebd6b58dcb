"""CAPO on the outer factors of low-rank adapters, through whole steps of the decoder on trees, in float64."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from harnessrl_jax.capo import default, fixed_partition, lora_units, partition
from harnessrl_jax.errors import PartitionError
from harnessrl_jax.models import DecoderConfig, init_adapters, init_params
from harnessrl_jax.training import Policy, adapter_row_fn, decoder_row_fn, init_state, make_step

MODEL = DecoderConfig(vocab_size=12, hidden_size=4, layers=1, heads=1, kv_heads=1, head_dim=4, mlp_size=8)
PLAIN = Policy(clip_low=0.2, clip_high=0.28, capo=None)
CAPO = dataclasses.replace(
    default(lora_units(1, include_gate=True)), warmup_rollouts=5, refresh_steps=None, denominator="shared"
)
OPTIMIZER = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.2, momentum=0.9))
GATE, UP, DOWN = (f"layers_0/mlp/{name}/kernel" for name in ("gate", "up", "down"))
SOME = np.array([[[1, 1, 0, 0, 0, 1, 0, 0]], [[0, 1, 1, 0, 0, 0, 0, 0]]], bool)


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def model():
    rng = np.random.default_rng(0)
    start = jax.eval_shape(lambda: init_params(MODEL, jax.random.key(0)))
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(scale=0.5, size=leaf.shape) + (leaf.ndim == 1)), start)


@pytest.fixture(scope="module")
def adapters(model):
    """Of the whole MLP and of one kernel that no unit owns, away from their initial 0."""
    rng = np.random.default_rng(1)
    start = init_adapters(model, jax.random.key(0), rank=2, where=lambda path: "/mlp/" in path or "/attn/v/" in path)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf + 0.3 * rng.normal(size=leaf.shape)), start)


@pytest.fixture(scope="module")
def batches(tree_batch):
    return [tree_batch(12, row_slots=24, row_targets=36, max_rows=4, seed=seed) for seed in range(4)]


@pytest.fixture(scope="module")
def step(toy, model):
    row_fn = decoder_row_fn(MODEL, temperature=0.7, implementation="dense", remat="none", collect="hidden")

    @cache
    def compiled(routing):
        objective = routing and dataclasses.replace(PLAIN, capo=dataclasses.replace(CAPO, routing=routing))
        return toy.jit(make_step(adapter_row_fn(row_fn, model, scale=0.5), OPTIMIZER, objective or PLAIN, micro_rows=2))

    return compiled


def start(adapters, units=None):
    state = init_state(adapters, OPTIMIZER, dataclasses.replace(PLAIN, capo=CAPO))
    return state if units is None else state._replace(capo=fixed_partition(jnp.asarray(units)))


def run(step, state, batches):
    for batch in batches:
        state, metrics = step(state, *batch)
        assert metrics["applied"] == 1
    return state


def largest(got, want):
    return max(np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True))


@pytest.mark.parametrize("routing", ["reference", "fused"])
def test_the_forms_agree_on_trees(step, adapters, batches, routing):
    got, want = (run(step(each), start(adapters, SOME), batches[:2]).params for each in (routing, "vjp"))
    assert largest(got, want) < 1e-12
    assert largest(want, adapters) > 1e-3


@pytest.mark.parametrize("routing", ["vjp", "fused"])
def test_all_units_for_both_roles_is_plain_training_of_the_adapters(step, adapters, batches, routing):
    got = run(step(routing), start(adapters, np.ones_like(SOME)), batches[:2]).params
    want = run(step(None), init_state(adapters, OPTIMIZER, PLAIN), batches[:2]).params
    assert largest(got, want) < 1e-12


def assert_only_moved(before, after, trained):
    """Of the factors that units own exactly the slices of `trained` changed; every other factor changed too."""
    for path in before:
        for name in "ab":
            old, new = (np.asarray(each[path][name]).view(np.int64) for each in (before, after))
            owned = {(GATE, "b"): trained[None], (UP, "b"): trained[None], (DOWN, "a"): trained[:, None]}
            moves = owned.get((path, name), np.ones((1, 1), bool))
            np.testing.assert_array_equal(old != new, np.broadcast_to(moves, old.shape), err_msg=f"{path} {name}")


@pytest.mark.parametrize("routing", ["vjp", "fused"])
def test_decay_and_momentum_leave_other_columns_as_they_are(step, adapters, batches, routing):
    """The first step, in warm-up, moves everything and gives everything a momentum."""
    warm = run(step(routing), start(adapters), batches[:1])
    assert not warm.capo.active
    assert_only_moved(adapters, warm.params, np.ones(8, bool))
    state = warm._replace(capo=fixed_partition(jnp.asarray(SOME)))
    for batch in batches[1:3]:
        after = run(step(routing), state, [batch])
        assert_only_moved(state.params, after.params, SOME.any(axis=(0, 1)))
        state = after


def test_the_schedule_partitions_the_neurons_of_the_adapted_model(step, adapters, batches):
    """Four rollouts a step: the second step ends the warm-up, and from the third on its partition holds."""
    states = [start(adapters)]
    for batch in batches[:3]:
        states.append(run(step("vjp"), states[-1], [batch]))
    assert [bool(state.capo.active) for state in states] == [False, False, True, True]
    made = states[2].capo
    mean = made.total / np.maximum(made.tokens, 1)
    units = partition(
        mean, jnp.zeros_like(made.units), made.tokens > 0, score="contrast", top_fraction=0.25, hysteresis=1.1
    )
    np.testing.assert_array_equal(made.units, units)
    np.testing.assert_array_equal(made.units.sum(axis=2), 2)
    assert_only_moved(states[2].params, states[3].params, np.asarray(units.any(axis=(0, 1))))


def test_position_local_is_refused_with_what_to_use(step, adapters, batches):
    with pytest.raises(
        PartitionError, match=r"kernel/[ab]', which is not a kernel or bias of an nn.Dense.*'fused' or 'vjp'"
    ):
        step("position_local").eval_shape(start(adapters, SOME), *batches[0])
