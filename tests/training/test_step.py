"""The whole step: what it leaves alone, what it freezes, that it resumes, and that it compiles once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from harnessrl_jax.capo import forget_moments, role_masks
from harnessrl_jax.checkpoints import Checkpoints
from harnessrl_jax.errors import PartitionError, ShardingError
from harnessrl_jax.training import Supervised, init_state, make_optimizer, make_step

ADAMW = make_optimizer(learning_rate=1e-2, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, clip_norm=1.0)


class Counted:
    """A row function that counts how often it is traced."""

    def __init__(self, row_fn):
        self.row_fn, self.traces = row_fn, 0

    def __call__(self, params, row):
        self.traces += 1
        return self.row_fn(params, row)


@pytest.fixture(scope="module")
def objective(toy):
    return toy.capo(ungated="frozen", refresh_steps=2, hysteresis=1.0, ema=0.0)


@pytest.fixture(scope="module")
def step(toy, objective):
    """The jitted CAPO step, donating its state; `.row_fn` counts traces."""
    row_fn = Counted(toy.row_fn)
    jitted = toy.jit(make_step(row_fn, ADAMW, objective, micro_rows=2), donate_argnums=0)

    def run(state, batch, rows):
        return jitted(jax.tree.map(jnp.array, state), batch, jnp.int32(rows))  # a copy is donated, the caller's stays

    run.row_fn = row_fn
    return run


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def run_steps(step, state, toy, numbers):
    states = []
    for i in numbers:
        state, metrics = step(state, toy.batch(rows=4 + i % 4, seed=i), 4 + i % 4)
        states.append((state, metrics))
    return states


def test_it_compiles_once(toy, objective, step):
    before = None
    for i, (_, metrics) in enumerate(run_steps(step, init_state(toy.params(), ADAMW, objective), toy, range(6))):
        assert metrics["rows"] == 4 + i % 4
        before = before or step.row_fn.traces
        assert step.row_fn.traces == before
    assert metrics["capo/refreshes"] >= 2  # warm-up, refresh and steady steps were all among them
    assert all(value.dtype == np.float32 for value in metrics.values())
    assert {value.shape for name, value in metrics.items() if name.endswith("_layer")} == {(2,)}
    assert {value.shape for name, value in metrics.items() if "_layer" not in name} == {()}


def test_outside_the_partition_not_a_bit_moves(toy, objective, step):
    state, moved_masks = init_state(toy.params(), ADAMW, objective), 0
    for _ in range(2):  # warm-up: moments everywhere
        state, _ = step(state, toy.batch(rows=8)._replace(success=np.zeros((8, 6), bool)), 8)
    assert not state.capo.active
    for i in range(7):
        masks = role_masks(state.capo, roles=2, ungated="frozen")
        trained = masks.trained(objective.capo.unit_map, state.params)
        after, metrics = step(state, toy.batch(rows=8, seed=i), 8)
        assert metrics["applied"] == 1
        for old, new, mask in zip(*map(jax.tree.leaves, (state.params, after.params, trained)), strict=True):
            same = np.asarray(old).view(np.uint32) == np.asarray(new).view(np.uint32)
            mask = np.broadcast_to(mask, same.shape)
            assert same[~mask].all()
            assert not mask.any() or not same[mask].all()
        moved_masks += int(
            after.capo.refreshes > state.capo.refreshes > 0 and (after.capo.units != state.capo.units).any()
        )
        state = after
    assert moved_masks >= 1


def test_moments_of_units_that_leave_are_0(toy, objective, step):
    states = run_steps(step, init_state(toy.params(), ADAMW, objective), toy, range(4))
    for state, _ in states:
        trained = role_masks(state.capo, roles=2, ungated="frozen").trained(objective.capo.unit_map, state.params)
        forgotten = forget_moments(ADAMW, state.opt_state, jax.tree.map(jnp.logical_not, trained))
        assert bits(forgotten) == bits(state.opt_state)
        assert any(np.asarray(leaf).any() for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim > 1)


def test_no_signal_changes_nothing(toy, objective, step):
    (state, _), *_ = run_steps(step, init_state(toy.params(), ADAMW, objective), toy, [0])
    flat = toy.batch(rows=8)
    flat = flat._replace(advantage=np.where(flat.weight > 0, 0, flat.advantage).astype(np.float32))
    nothing = toy.batch(rows=0)
    for batch, rows in ((flat, 8), (nothing, 0), (flat, 8)):
        after, metrics = step(state, batch, rows)
        assert metrics["applied"] == 0
        assert metrics["finite"] == 1
        assert bits((after.params, after.opt_state)) == bits((state.params, state.opt_state))
        assert bits(after.capo.units) == bits(state.capo.units)
        assert after.step == state.step + 1
        state = after
    assert metrics["capo/probed_rollouts"] > 0  # rollouts that all succeed still say which units are active


def test_a_number_that_is_not_finite_changes_nothing_and_is_told(toy, objective, step):
    state = init_state(toy.params(), ADAMW, objective)
    batch = toy.batch(rows=8)
    batch.advantage[0, 0] = np.inf
    after, metrics = step(state, batch, 8)
    assert metrics["finite"] == 0
    assert metrics["applied"] == 0
    assert bits((after.params, after.opt_state, after.capo)) == bits((state.params, state.opt_state, state.capo))


def test_it_resumes_from_disk_in_the_middle_of_the_schedule(toy, objective, step, tmp_path):
    straight = run_steps(step, init_state(toy.params(), ADAMW, objective), toy, range(6))
    stopped = run_steps(step, init_state(toy.params(), ADAMW, objective), toy, range(4))[-1][0]
    assert stopped.capo.active
    assert stopped.capo.age == 1  # neither fresh nor due
    with Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(4, stopped, {})
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), stopped)
    with Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
        restored, _ = checkpoints.restore(4, like)
    resumed = run_steps(step, restored, toy, range(4, 6))
    for (got, metrics), (want, wanted) in zip(resumed, straight[4:], strict=True):
        assert bits(got) == bits(want)
        assert bits(metrics) == bits(wanted)
    assert resumed[-1][0].capo.refreshes > restored.capo.refreshes


def test_padding_rows_are_never_computed(toy, plain_policy):
    computed = []

    def row_fn(params, row):
        jax.debug.callback(lambda: computed.append(1))
        return toy.row_fn(params, row)

    step = toy.jit(make_step(row_fn, optax.sgd(1.0), plain_policy, micro_rows=1))
    state = init_state(toy.params(), optax.sgd(1.0), plain_policy)
    for rows in (3, 8, 0):
        computed.clear()
        after, metrics = step(state, toy.batch(rows=rows), jnp.int32(rows))
        jax.effects_barrier()
        assert len(computed) == rows
        assert metrics["applied"] == (rows > 0)
    assert bits(after.params) == bits(state.params)


def test_bfloat16_parameters_train_with_float32_moments(toy):
    state = init_state(toy.params(jnp.bfloat16), ADAMW, Supervised())
    step = toy.jit(make_step(toy.row_fn, ADAMW, Supervised(), micro_rows=8), donate_argnums=0)
    batch, losses = toy.batch(rows=8), []
    for _ in range(12):
        state, metrics = step(state, batch, jnp.int32(8))
        losses.append(float(metrics["loss"]))
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.bfloat16)}
    assert {leaf.dtype for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim} == {np.dtype(np.float32)}
    assert losses[-1] < losses[0] - 0.2
    assert step._cache_size() == 1


def test_a_state_of_another_objective_is_refused(toy, objective):
    state = init_state(toy.params(), ADAMW, Supervised())
    with pytest.raises(PartitionError, match=r"holds no partition; make the state with init_state"):
        jax.eval_shape(make_step(toy.row_fn, ADAMW, objective, micro_rows=2), state, toy.batch(), jnp.int32(1))


def test_rows_that_do_not_divide_are_refused(toy):
    state = init_state(toy.params(), ADAMW, Supervised())
    with pytest.raises(
        ShardingError, match="8 rows cannot be cut into micro-batches of 3; pack with max_rows a multiple"
    ):
        jax.eval_shape(make_step(toy.row_fn, ADAMW, Supervised(), micro_rows=3), state, toy.batch(), jnp.int32(1))


@pytest.mark.parametrize("routing", ["vjp", "fused"])
def test_everything_for_both_roles_is_plain_training_step_after_step(toy, plain_policy, routing):
    everything = {"top_fraction": 1.0, "denominator": "shared", "other_role": "args", "refresh_steps": 1}
    objective = toy.capo(routing=routing, **everything)
    steps = [toy.jit(make_step(toy.row_fn, ADAMW, each, micro_rows=4)) for each in (objective, plain_policy)]
    states = [init_state(toy.params(), ADAMW, each) for each in (objective, plain_policy)]
    for i in range(3):
        states = [step(state, toy.batch(seed=i), jnp.int32(4))[0] for step, state in zip(steps, states, strict=True)]
    assert states[0].capo.active
    for got, want in zip(jax.tree.leaves(states[0].params), jax.tree.leaves(states[1].params), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)


def test_a_probing_warm_up_trains_nothing(toy):
    objective = toy.capo(warmup="probe", warmup_rollouts=3, refresh_steps=None, ungated="frozen", other_role="drop")
    step = toy.jit(make_step(toy.row_fn, ADAMW, objective, micro_rows=4))
    state, seen = init_state(toy.params(), ADAMW, objective), []
    for i in range(4):
        after, metrics = step(state, toy.batch(seed=i), jnp.int32(4))
        same = bits((after.params, after.opt_state)) == bits((state.params, state.opt_state))
        assert same == (metrics["applied"] == 0) == (not state.capo.active)
        seen.append(bool(after.capo.active))
        state = after
    assert seen == [False, True, True, True]
    assert state.capo.refreshes == 1
