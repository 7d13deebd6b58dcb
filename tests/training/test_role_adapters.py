"""Two low-rank adapters, one a role, and one for all, as parameters of the step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from harnessrl_jax.models import adapted
from harnessrl_jax.training import (
    Policy,
    adapter_row_fn,
    init_role_adapters,
    init_state,
    make_step,
    one_adapter_a_role,
    role_adapters_row_fn,
    role_adapters_state,
)
from harnessrl_jax.training.assignment import assign
from harnessrl_jax.training.gradients import batch_gradient
from harnessrl_jax.trajectories import Role

SCALE, ROWS = 0.5, 4
SGD, ADAM = optax.sgd(1.0), optax.adam(1e-2)


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def base(toy):
    return toy.params(np.float64, layers=1)


@pytest.fixture(scope="module")
def adapters(base):
    """Away from their initial 0."""
    start = init_role_adapters(base, jax.random.key(0), rank=2, where=lambda path: "/mlp/" in path)
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf + 0.3 * rng.normal(size=leaf.shape)), start)


@pytest.fixture(scope="module")
def objective(adapters):
    return Policy(clip_low=0.2, clip_high=0.28, capo=one_adapter_a_role(adapters, other_role="args"))


@pytest.fixture(scope="module")
def step(toy, base, objective):
    """(optimizer, micro_rows) -> the compiled step of the two adapters."""
    row_fn = role_adapters_row_fn(toy.row_fn, base, scale=SCALE)
    made = {}

    def of(optimizer, micro_rows):
        return made.setdefault(
            (optimizer, micro_rows), toy.jit(make_step(row_fn, optimizer, objective, micro_rows=micro_rows))
        )

    return of


def only(batch, role):
    return batch._replace(role=np.where(batch.weight > 0, role, 0).astype(np.int8))


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def leaves(*trees):
    return map(jax.tree.leaves, trees)


def largest(got, want):
    return max(np.abs(a - b).max() for a, b in zip(*leaves(got, want), strict=True))


def test_each_role_moves_its_own_factors_as_the_chain_rule_says(toy, base, adapters, objective, step):
    """W = W0 + s (A_a B_a + A_g B_g), so of the loss of a role ∂A = s G Bᵀ and ∂B = s Aᵀ G with its own G = ∂L/∂W."""
    batch = toy.batch(rows=ROWS)
    state = role_adapters_state(adapters, SGD, objective)
    after, _ = step(SGD, 2)(state, batch, jnp.int32(ROWS))
    whole = adapted(base, adapters["action"], adapters["args"], scale=SCALE)
    plain = Policy(clip_low=0.2, clip_high=0.28, capo=None)
    gradient_of = batch_gradient(toy.row_fn, plain, micro_rows=2, shardings=None)
    kernel_gradient = toy.jit(
        lambda batch: gradient_of(whole, assign(plain, batch, jnp.int32(ROWS)), None, jnp.int32(ROWS)).gradient
    )
    for name, roles in (("action", [Role.ACTION]), ("args", [Role.ARGS, Role.OTHER])):
        kept = np.where(np.isin(batch.role, roles), batch.weight, 0)
        mlp = kernel_gradient(batch._replace(weight=kept))["layers_0"]["mlp"]
        for kernel, factors in adapters[name].items():
            g = mlp[kernel.split("/")[2]]["kernel"]
            moved = jax.tree.map(lambda new, old: old - new, after.params[name][kernel], factors)
            np.testing.assert_allclose(moved["a"], SCALE * g @ factors["b"].T, rtol=0, atol=1e-12)
            np.testing.assert_allclose(moved["b"], SCALE * factors["a"].T @ g, rtol=0, atol=1e-12)
            assert np.abs(moved["b"]).max() > 1e-4


@pytest.mark.parametrize(
    ("role", "trained", "untouched"), [(Role.ACTION, "action", "args"), (Role.ARGS, "args", "action")]
)
def test_a_batch_of_one_role_leaves_the_other_adapter_as_it_is(
    toy, adapters, objective, step, role, trained, untouched
):
    state, batch = role_adapters_state(adapters, ADAM, objective), only(toy.batch(rows=ROWS), role)
    for _ in range(2):
        after, metrics = step(ADAM, 2)(state, batch, jnp.int32(ROWS))
        assert metrics["applied"] == 1
        assert all((new != old).all() for new, old in zip(*leaves(after.params[trained], state.params[trained])))
        assert bits(after.params[untouched]) == bits(state.params[untouched])
        state = after


def test_where_all_targets_have_one_role_it_is_a_single_adapter(toy, base, objective, step):
    """From the start, when the other adapter adds 0; OTHER tokens belong to the args."""
    start = init_role_adapters(base, jax.random.key(0), rank=2, where=lambda path: "/mlp/" in path)
    plain = Policy(clip_low=0.2, clip_high=0.28, capo=None)
    single = toy.jit(make_step(adapter_row_fn(toy.row_fn, base, scale=SCALE), ADAM, plain, micro_rows=2))
    both, alone = role_adapters_state(start, ADAM, objective), init_state(start["args"], ADAM, plain)
    for i in range(3):
        batch = only(toy.batch(rows=ROWS, seed=i), Role.OTHER if i else Role.ARGS)
        both, _ = step(ADAM, 2)(both, batch, jnp.int32(ROWS))
        alone, _ = single(alone, batch, jnp.int32(ROWS))
    assert largest(both.params["args"], alone.params) < 1e-12
    assert largest(alone.params, start["args"]) > 1e-2
    assert bits(both.params["action"]) == bits(start["action"])


def test_micro_batches_add_up_and_the_roles_stay_apart_for_good(toy, adapters, objective, step):
    states = [role_adapters_state(adapters, ADAM, objective) for _ in range(2)]
    for i in range(3):
        batch = toy.batch(rows=ROWS, seed=i)
        states = [
            step(ADAM, rows)(state, batch, jnp.int32(ROWS))[0] for rows, state in zip((2, 8), states, strict=True)
        ]
    assert largest(states[0].params, states[1].params) < 1e-9
    np.testing.assert_array_equal(states[0].capo.units, [[[True, False]], [[False, True]]])
    assert states[0].capo.refreshes == 0
