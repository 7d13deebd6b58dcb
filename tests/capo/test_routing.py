"""Routing: the hand example, finite differences of the masked objective, two equal forms, known limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harnessrl_jax.capo import (
    RoleMasks,
    UnitMap,
    UnitSlice,
    decoder_units,
    everything,
    init_capo,
    reference_gradient,
    role_gradients,
    role_masks,
    route,
)

ROUTE = jax.jit(route, static_argnums=0)


def gradients_of(losses, params):
    return jax.jit(lambda params: role_gradients(losses, params))(params)


@pytest.fixture(scope="module")
def apart(toy):
    """Gradients with a role axis, float64."""
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, gradients_of(toy.losses, toy.params)[0])


def masks_of(toy, rest):
    return RoleMasks(jnp.asarray(toy.units), jnp.array([rest, rest]))


def assert_close(got, want, tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance), got, want)


def test_the_hand_example():
    unit_map = UnitMap(1, (UnitSlice("w", 0),))
    gradients = {"w": jnp.array([[1.0, 2, 3, 4], [10, 20, 30, 40]])}
    units = jnp.array([[[True, True, False, False]], [[False, True, True, False]]])
    routed = ROUTE(unit_map, gradients, RoleMasks(units, jnp.zeros(2, bool)))
    np.testing.assert_array_equal(routed["w"], [1, 22, 30, 0])


@pytest.mark.parametrize("rest", [False, True])
def test_vjp_equals_the_reference(toy, apart, rest):
    with jax.enable_x64(True):
        masks = masks_of(toy, rest)
        reference = jax.jit(lambda params: reference_gradient(toy.losses, params, toy.unit_map, masks))
        by_definition, losses, _ = reference(toy.params)
        assert apart["mix"].dtype == np.float64
        assert_close(ROUTE(toy.unit_map, apart, masks), by_definition, 1e-12)
        assert_close(losses, toy.losses(toy.params)[0], 1e-12)


def test_one_role_needs_no_role_axis(toy, apart):
    with jax.enable_x64(True):
        gradients, losses, beside = gradients_of(lambda params: (toy.losses(params)[0][:1], 7), toy.params)
        assert beside == 7
        assert losses.shape == (1,)
        assert_close(gradients, jax.tree.map(lambda leaf: leaf[:1], apart), 1e-12)


def test_finite_differences_of_the_masked_objective(toy, apart):
    # Each role's loss may move only its own weights: for a coordinate of unit j, the masked objective is the sum of the
    # losses of the roles that hold j. A unit of no role must get exactly 0.
    with jax.enable_x64(True):
        routed = jax.tree.map(np.asarray, ROUTE(toy.unit_map, apart, masks_of(toy, False)))
        step, loss = 1e-6, jax.jit(lambda params: toy.losses(params)[0])
        for name, place in (("gate", lambda j: (1, j)), ("up", lambda j: (2, j)), ("down", lambda j: (j, 3))):
            for layer, unit in np.ndindex(2, 8):
                key = f"layers_{layer}"

                def moved(by, key=key, name=name, unit=unit, place=place):
                    params = jax.tree.map(np.array, toy.params)
                    params[key]["mlp"][name]["kernel"][place(unit)] += by
                    return np.asarray(loss(params))

                each_role = (moved(step) - moved(-step)) / (2 * step)
                got = routed[key]["mlp"][name]["kernel"][place(unit)]
                np.testing.assert_allclose(got, each_role @ toy.units[:, layer, unit], rtol=0, atol=1e-8)
                assert toy.units[:, layer, unit].any() or got == 0
        np.testing.assert_array_equal(routed["mix"], 0)


def test_full_masks_give_the_plain_gradient(toy, apart):
    with jax.enable_x64(True):
        plain = jax.jit(jax.grad(lambda params: toy.losses(params)[0].sum()))(toy.params)
        assert_close(ROUTE(toy.unit_map, apart, everything(2, 2, 8)), plain, 1e-12)


def test_exchanging_the_roles_changes_nothing(toy, apart):
    with jax.enable_x64(True):
        swapped, _, _ = gradients_of(lambda params: (toy.losses(params)[0][::-1], None), toy.params)
        assert_close(jax.tree.map(lambda leaf: leaf[::-1], swapped), apart, 1e-12)
        other_masks = RoleMasks(jnp.asarray(toy.units[::-1]), jnp.zeros(2, bool))
        routed = ROUTE(toy.unit_map, apart, masks_of(toy, False))
        assert_close(ROUTE(toy.unit_map, swapped, other_masks), routed, 1e-12)
        not_exchanged = ROUTE(toy.unit_map, swapped, masks_of(toy, False))
        assert (
            np.abs(not_exchanged["layers_0"]["mlp"]["up"]["kernel"] - routed["layers_0"]["mlp"]["up"]["kernel"]).max()
            > 0.01
        )


def test_permuting_the_units_permutes_the_gradient(toy, apart):
    order = np.random.default_rng(1).permutation(8)

    def permute(tree):
        axis = {"gate": 1, "up": 1, "down": 0}
        return {
            name: {
                "mlp": {k: {"kernel": np.take(np.asarray(v["kernel"]), order, axis[k])} for k, v in part["mlp"].items()}
            }
            if name != "mix"
            else part
            for name, part in tree.items()
        }

    with jax.enable_x64(True):
        want = permute(ROUTE(toy.unit_map, apart, masks_of(toy, False)))
        permuted, _, _ = gradients_of(toy.losses, permute(toy.params))
        masks = RoleMasks(jnp.asarray(toy.units[..., order]), jnp.zeros(2, bool))
        assert_close(ROUTE(toy.unit_map, permuted, masks), want, 1e-12)


def test_what_a_mask_hides_is_not_read():
    unit_map = UnitMap(1, (UnitSlice("w", 0),))
    gradients = {"w": jnp.array([[1.0, np.nan], [np.inf, 2]]), "other": jnp.array([np.nan, 1])}
    units = jnp.array([[[True, False]], [[False, True]]])
    routed = ROUTE(unit_map, gradients, RoleMasks(units, jnp.array([False, True])))
    np.testing.assert_array_equal(routed["w"], [1, 2])
    np.testing.assert_array_equal(routed["other"], 1)


def test_without_the_gate_it_is_ungated(toy):
    gradients = jax.tree.map(lambda leaf: jnp.ones((2, *leaf.shape)), toy.params)
    routed = ROUTE(decoder_units(2, include_gate=False), gradients, masks_of(toy, True))
    np.testing.assert_array_equal(routed["layers_0"]["mlp"]["gate"]["kernel"], 2)
    np.testing.assert_array_equal(routed["layers_0"]["mlp"]["up"]["kernel"], np.tile([1, 1, 2, 1, 1, 0, 0, 0], (4, 1)))
    np.testing.assert_array_equal(
        routed["layers_0"]["mlp"]["down"]["kernel"].T, np.tile([1, 1, 2, 1, 1, 0, 0, 0], (4, 1))
    )


@pytest.mark.parametrize(
    ("ungated", "roles", "rest"), [("frozen", 2, [0, 0]), ("sum", 2, [1, 1]), ("sum", 3, [1, 1, 1])]
)
def test_masks_of_warm_up_and_after(ungated, roles, rest):
    state = init_capo(1, 3)
    warm = role_masks(state, roles=roles, ungated=ungated)
    assert warm.units.shape == (roles, 1, 3)
    assert warm.units.all()
    assert warm.rest.all()
    units = jnp.array([[[True, False, False]], [[False, True, False]]])
    masks = role_masks(state._replace(units=units, active=jnp.array(True)), roles=roles, ungated=ungated)
    np.testing.assert_array_equal(masks.units[:2], units)
    assert not masks.units[2:].any()  # other tokens train no unit
    np.testing.assert_array_equal(masks.rest, rest)
