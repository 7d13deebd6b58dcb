"""Two low-rank adapters, one a role, and one for all, as parameters of the step."""

from functools import cache

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
from harnessrl_jax.training.objectives import row_loss
from harnessrl_jax.training.rows import Row
from harnessrl_jax.trajectories import Role

SCALE, ROWS = 0.5, 4
SGD = optax.sgd(0.5, momentum=0.9)
PLAIN = Policy(clip_low=0.2, clip_high=0.28, capo=None)


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
    """micro_rows -> the compiled step of the two adapters."""
    row_fn = role_adapters_row_fn(toy.row_fn, base, scale=SCALE)
    return cache(lambda micro_rows: toy.jit(make_step(row_fn, SGD, objective, micro_rows=micro_rows)))


def only(batch, role):
    return batch._replace(role=np.where(batch.weight > 0, role, 0).astype(np.int8))


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def leaves(*trees):
    return map(jax.tree.leaves, trees)


def largest(got, want):
    return max(np.abs(a - b).max() for a, b in zip(*leaves(got, want), strict=True))


@pytest.fixture(scope="module")
def kernel_gradients(toy, base, adapters):
    """(batch, weight) -> the gradient of the mean loss under `weight` with respect to the kernels as adapted."""

    def loss(params, batch, weight):
        def one(row, weight):
            return row_loss(PLAIN, toy.row_fn(params, row), row, weight)

        return jax.vmap(one)(Row(*batch), weight).total.sum() / weight.sum()

    whole = adapted(base, adapters["action"], adapters["args"], scale=SCALE)
    gradient = toy.jit(jax.grad(loss))
    return lambda batch, weight: gradient(whole, jax.tree.map(jnp.asarray, batch), weight)["layers_0"]["mlp"]


@pytest.mark.parametrize("micro_rows", [2, 8])
def test_a_role_moves_its_own_factors_as_the_chain_rule_says(
    toy, adapters, objective, step, kernel_gradients, micro_rows
):
    """W = W0 + s (A_a B_a + A_g B_g), so of the loss of a role ∂A = s G Bᵀ and ∂B = s Aᵀ G with its own G = ∂L/∂W."""
    batch = toy.batch(rows=ROWS)
    after, _ = step(micro_rows)(role_adapters_state(adapters, SGD, objective), batch, jnp.int32(ROWS))
    for name, roles in (("action", [Role.ACTION]), ("args", [Role.ARGS, Role.OTHER])):
        gradients = kernel_gradients(batch, np.where(np.isin(batch.role, roles), batch.weight, 0))
        for path, factors in adapters[name].items():
            g = gradients[path.split("/")[2]]["kernel"]
            a, b = (2 * (factors[each] - after.params[name][path][each]) for each in "ab")
            np.testing.assert_allclose(a, SCALE * g @ factors["b"].T, rtol=0, atol=1e-12)
            np.testing.assert_allclose(b, SCALE * factors["a"].T @ g, rtol=0, atol=1e-12)
            assert np.abs(b).max() > 1e-4


@pytest.mark.parametrize(
    ("role", "trained", "untouched"), [(Role.ACTION, "action", "args"), (Role.ARGS, "args", "action")]
)
def test_a_batch_of_one_role_leaves_the_other_adapter_as_it_is(
    toy, adapters, objective, step, role, trained, untouched
):
    state, batch = role_adapters_state(adapters, SGD, objective), only(toy.batch(rows=ROWS), role)
    for _ in range(2):
        after, metrics = step(2)(state, batch, jnp.int32(ROWS))
        assert metrics["applied"] == 1
        assert all((new != old).all() for new, old in zip(*leaves(after.params[trained], state.params[trained])))
        assert bits(after.params[untouched]) == bits(state.params[untouched])
        state = after


def test_where_all_targets_have_one_role_it_is_a_single_adapter(toy, base, objective, step):
    """From the start, when the other adapter adds 0; OTHER tokens belong to the args."""
    start = init_role_adapters(base, jax.random.key(0), rank=2, where=lambda path: "/mlp/" in path)
    single = toy.jit(make_step(adapter_row_fn(toy.row_fn, base, scale=SCALE), SGD, PLAIN, micro_rows=2))
    both, alone = role_adapters_state(start, SGD, objective), init_state(start["args"], SGD, PLAIN)
    for i in range(3):
        batch = only(toy.batch(rows=ROWS, seed=i), Role.OTHER if i else Role.ARGS)
        both, _ = step(2)(both, batch, jnp.int32(ROWS))
        alone, _ = single(alone, batch, jnp.int32(ROWS))
    assert largest(both.params["args"], alone.params) < 1e-12
    assert largest(alone.params, start["args"]) > 1e-3
    assert bits(both.params["action"]) == bits(start["action"])
    np.testing.assert_array_equal(both.capo.units, [[[True, False]], [[False, True]]])
    assert both.capo.refreshes == 0
