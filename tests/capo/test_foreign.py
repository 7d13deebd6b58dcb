"""A scalar loss with a routed gradient, and an optimiser that keeps its own factors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from harnessrl_jax.capo import (
    RoleMasks,
    UnitFactors,
    UnitMap,
    UnitSlice,
    everything,
    role_gradients,
    route,
    routed_loss,
    routed_updates,
    stored_factors,
    trained_units,
)
from harnessrl_jax.errors import PartitionError


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def routed(toy):
    masks = RoleMasks(jnp.asarray(toy.units), jnp.array([True, False]))
    losses = lambda params: (toy.losses(params)[0], {"count": jnp.arange(3)})
    return masks, losses, routed_loss(losses, toy.unit_map, masks)


def assert_close(got, want, atol=1e-12):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), got, want)


def test_its_plain_gradient_is_the_routed_one_times_what_comes_from_behind(toy, routed):
    masks, losses, loss = routed
    scaled = lambda params: (3.0 * loss(params)[0], loss(params)[1])
    (total, (values, aux)), gradient = jax.jit(jax.value_and_grad(scaled, has_aux=True))(toy.params)
    apart, wanted, _ = jax.jit(lambda p: role_gradients(losses, p))(toy.params)
    assert_close(gradient, jax.tree.map(lambda leaf: 3.0 * leaf, route(toy.unit_map, apart, masks)))
    assert_close((total, values), (3.0 * wanted.sum(), wanted))
    np.testing.assert_array_equal(aux["count"], [0, 1, 2])


def test_without_differentiation_it_takes_no_gradient(toy, routed):
    _, losses, loss = routed
    products = lambda f: str(jax.make_jaxpr(f)(toy.params)).count("dot_general")
    assert products(loss) == products(losses)


def test_with_full_masks_it_is_the_sum_of_the_losses(toy):
    loss = routed_loss(toy.losses, toy.unit_map, everything(2, 2, 8))
    plain = jax.jit(jax.grad(lambda params: toy.losses(params)[0].sum()))(toy.params)
    assert_close(jax.jit(jax.grad(lambda params: loss(params)[0]))(toy.params), plain)


UNIT_MAP = UnitMap(1, (UnitSlice("w", 1),))
PARAMS = {"w": np.arange(1.0, 7).reshape(2, 3), "rest": np.ones(2)}
GRADIENT = jax.tree.map(np.ones_like, PARAMS)
START = UnitFactors(np.array([[True, False, True]]), np.array(True))
LATER = UnitFactors(np.array([[False, True, True]]), np.array(False))


def test_stored_factors_give_the_updates_of_factors_that_are_passed():
    optimizer = optax.adamw(0.1, weight_decay=0.1)
    stored, passed = stored_factors(optimizer, UNIT_MAP, START), routed_updates(optimizer, UNIT_MAP)
    state, other = stored.init(PARAMS), passed.init(PARAMS)
    for factors in (START, LATER, START):
        state = state._replace(factors=factors)
        updates, state = stored.update(GRADIENT, state, PARAMS)
        wanted, other = passed.update(GRADIENT, other, PARAMS, factors=factors)
        assert_close((updates, state.inner), (wanted, other), atol=0)


def test_stored_factors_live_inside_other_transformations():
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.MultiSteps(stored_factors(optax.sgd(1.0), UNIT_MAP, START), 2)
    )
    state = optax.tree_utils.tree_set(optimizer.init(PARAMS), factors=LATER)
    _, state = optimizer.update(GRADIENT, state, PARAMS)
    updates, state = optimizer.update(GRADIENT, state, PARAMS)
    np.testing.assert_array_equal(updates["w"] != 0, [[False, True, True]] * 2)
    np.testing.assert_array_equal(updates["rest"], [0, 0])


def test_its_state_shares_no_buffer_with_the_factors_it_started_from():
    start = jax.tree.map(jnp.asarray, START)
    held = stored_factors(optax.sgd(1.0), UNIT_MAP, start).init(PARAMS).factors
    assert held.units.unsafe_buffer_pointer() != start.units.unsafe_buffer_pointer()


def test_a_map_that_does_not_fit_is_refused_at_init():
    with pytest.raises(PartitionError, match="'w', but the parameters have no such path"):
        stored_factors(optax.sgd(1.0), UNIT_MAP, START).init({"v": PARAMS["w"]})


def test_the_optimiser_may_change_what_any_role_may_change(toy):
    masks = RoleMasks(jnp.asarray(toy.units), jnp.array([False, True]))
    factors = trained_units(masks)
    np.testing.assert_array_equal(factors.units, toy.units[0] | toy.units[1])
    assert factors.rest
