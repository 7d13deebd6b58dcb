"""The forms of CAPO's routing on a real decoder and real trees, in float64: three are equal, one is not."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from harnessrl_jax.capo import decoder_units, default, head_norm, head_units
from harnessrl_jax.errors import PartitionError
from harnessrl_jax.models import DecoderConfig, init_params
from harnessrl_jax.training import (
    DECODER_RULES,
    Policy,
    decoder_row_fn,
    init_state,
    make_mesh,
    place_batch,
    place_state,
    state_shardings,
)
from harnessrl_jax.training.assignment import AssignedRows, assign
from harnessrl_jax.training.gradients import batch_gradient
from harnessrl_jax.training.one_pass import predicting_slots
from harnessrl_jax.training.rows import Row
from harnessrl_jax.training.state import routing_of
from harnessrl_jax.trajectories import PackedBatch, Role, trees

MODEL = DecoderConfig(
    vocab_size=24, hidden_size=16, layers=2, heads=4, kv_heads=2, head_dim=4, mlp_size=16, qkv_bias=True, sinks=True
)
ROWS, SLOTS, TARGETS = 4, 32, 24
NEURONS = decoder_units(2, include_gate=True)
HEADS = head_units(2, heads=4, kv_heads=2, head_dim=4, bias=True)


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def tree_row(rng):
    """One tree of three branches, and targets of every role at random slots; two of them from the same slot."""
    prefix = rng.integers(0, 24, 5)
    sequences = [np.concatenate([prefix, rng.integers(0, 24, rng.integers(3, 8))]) for _ in range(3)]
    tree, _ = trees.build(sequences)
    nodes = len(tree.token)
    grow = lambda x, fill: np.concatenate([x, fill]).astype(np.int32)
    source = np.concatenate([[2, 2], rng.integers(0, nodes, TARGETS - 2)]).astype(np.int32)
    used = np.arange(TARGETS) < TARGETS - 3
    role = np.where(used, rng.choice([Role.ACTION, Role.ARGS, Role.OTHER], TARGETS, p=[0.3, 0.5, 0.2]), Role.NONE)
    floats = lambda x: np.where(used, x, np.nan).astype(np.float32)
    return PackedBatch(
        token=grow(tree.token, np.zeros(SLOTS - nodes)),
        position=grow(tree.depth, np.zeros(SLOTS - nodes)),
        subtree_end=grow(tree.subtree_end, np.arange(nodes, SLOTS) + 1),
        source=source,
        target=rng.integers(0, 24, TARGETS).astype(np.int32),
        logp_behaviour=floats(rng.uniform(-3.6, -2.8, TARGETS)),
        has_logp=used,
        advantage=floats(rng.normal(size=TARGETS)),
        role=role.astype(np.int8),
        weight=np.where(used, rng.uniform(0.5, 1, TARGETS), 0).astype(np.float32),
        success=used,
        call=np.where(used, source // 4, -1).astype(np.int32),
        rollout=np.where(used, 0, -1).astype(np.int32),
    )


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    rows = [tree_row(rng) for _ in range(ROWS)]
    batch = jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
    number = np.arange(ROWS)[:, None]
    return batch._replace(
        call=np.where(batch.weight > 0, batch.call + 100 * number, -1),
        rollout=np.where(batch.weight > 0, number, -1).astype(np.int32),
    )


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(1)
    start = jax.eval_shape(lambda: init_params(MODEL, jax.random.key(0)))
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(scale=0.3, size=x.shape) + (x.ndim == 1)), start)


@pytest.fixture(scope="module")
def gradient(params, batch):
    """(routing, ...) -> the routed gradient, the losses and the probe; compiled once for each set of choices."""

    @cache
    def compiled(routing, remat="none", micro_rows=2, implementation="dense", family=NEURONS, mesh=None, **changes):
        capo = dataclasses.replace(default(family), routing=routing, **changes)
        objective = Policy(clip_low=0.2, clip_high=0.28, capo=capo)
        row_fn = decoder_row_fn(
            MODEL, temperature=0.7, implementation=implementation, remat=remat, collect=capo.statistic.reads
        )
        state = init_state(params, optax.identity(), objective)
        shardings = mesh and state_shardings(state, optax.identity(), mesh, DECODER_RULES)
        gradient_of = batch_gradient(row_fn, objective, micro_rows=micro_rows, shardings=shardings)

        def step(state, batch, rows):
            found = gradient_of(state.params, assign(objective, batch, rows), routing_of(objective, state.capo), rows)
            return found.gradient, found.losses, found.tally.probe

        placed = (place_state(state, shardings), place_batch(batch, mesh)) if mesh else (state, batch)
        return jax.jit(step, compiler_options={"xla_backend_optimization_level": 0}), *placed

    def run(routing, units="some", **choices):
        step, state, rows = compiled(routing, **choices)
        if units == "some":
            chosen = np.random.default_rng(2).random(state.capo.units.shape) < 0.4
            state = state._replace(capo=state.capo._replace(units=jnp.asarray(chosen), active=jnp.array(True)))
        return jax.tree.map(np.asarray, step(state, rows, jnp.int32(ROWS)))

    return run


def difference(got, want):
    return max(np.abs(a - b).max() for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))


EVERYTHING = {"other_role": "ungated", "denominator": "shared", "remat": "attention", "implementation": "blockwise"}
CASES = {
    "sum": {},
    "three roles, remat, blockwise": EVERYTHING,
    "frozen, ungated gate, row by row": {
        "ungated": "frozen",
        "other_role": "drop",
        "family": decoder_units(2, include_gate=False),
        "micro_rows": 1,
    },
    "heads": {"family": HEADS, "statistic": head_norm(2), "ungated": "frozen"},
}


@pytest.mark.parametrize("case", CASES)
def test_fused_equals_vjp(gradient, case):
    got, want = gradient("fused", **CASES[case]), gradient("vjp", **CASES[case])
    assert got[0]["embed"]["embedding"].dtype == np.float64
    assert difference(got, want) < 1e-12
    assert difference(got[0], jax.tree.map(np.zeros_like, got[0])) > 0.01


def test_reference_equals_vjp(gradient):
    assert difference(gradient("reference", **EVERYTHING), gradient("vjp", **EVERYTHING)) < 1e-12


@pytest.mark.parametrize("routing", ["fused", "vjp"])
def test_eight_devices_with_micro_batches_and_remat_equal_one_batch(gradient, routing):
    """Everything together: parameters and rows spread, two micro-batches, three roles, layers computed again."""
    mesh = make_mesh(data=1, fsdp=2, tensor=2, context=2)
    choices = EVERYTHING | {"implementation": "dense"}
    got = gradient(routing, mesh=mesh, **choices | {"micro_rows": 2})
    want = gradient("vjp", **choices | {"micro_rows": 4, "remat": "none"})
    assert difference(got[:2], want[:2]) < 1e-12
    np.testing.assert_allclose(got[2].total, want[2].total, rtol=1e-5)  # sums of float32


def test_position_local_is_plain_in_warm_up_and_no_capo_afterwards(gradient):
    assert difference(gradient("position_local", units=None)[0], gradient("vjp", units=None)[0]) < 1e-12
    near, exact = (gradient(routing)[0]["layers_0"]["mlp"]["up"]["kernel"] for routing in ("position_local", "vjp"))
    np.testing.assert_array_equal(exact[:, near.any(axis=0)].any(axis=0), True)  # no unit of no role
    assert (near * exact).sum() < 0.99 * np.sqrt((near * near).sum() * (exact * exact).sum())


def test_slots_stand_for_the_roles_that_they_predict(batch):
    row = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), Row(*batch))
    row = row._replace(source=jnp.array([4, 2, 2, 7] + [0] * (TARGETS - 4)))
    role = jnp.array([1, 0, 1, 0] + [-1] * (TARGETS - 4))
    found = predicting_slots(AssignedRows(row, role, role > 0), 2)
    np.testing.assert_array_equal(np.argwhere(found), [[0, 2], [0, 7], [1, 2], [1, 4]])


def test_a_statistic_of_other_units_is_refused(gradient):
    with pytest.raises(
        PartitionError, match=r"gives \[role, layer, unit\] = \[2, 2, 16\], the unit map .* \[2, 2, 2\]"
    ):
        gradient("vjp", family=HEADS)
