"""Shared units: known vectors, the definitions of PCGrad and CAGrad, nothing undefined."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harnessrl_jax.capo import UnitMap, UnitSlice, scaled, shared_factors

MAP = UnitMap(1, (UnitSlice("w", 0),))
UNITS = np.array([[[1, 1, 1, 1, 0]], [[1, 1, 1, 0, 1]]], bool)  # three shared, one of each role alone
FACTORS = jax.jit(shared_factors, static_argnums=0, static_argnames=("how",))
number = st.floats(-3, 3, width=32).map(lambda x: round(x, 2))
vectors = st.lists(st.lists(number, min_size=3, max_size=3), min_size=2, max_size=2)


def combined(action, args, how, cagrad=0.5, units=UNITS):
    """What the three shared units receive, and the factors."""
    gradients = {"w": np.array([[*action, 7, 7], [*args, 7, 7]], np.float32)}
    factors = np.asarray(FACTORS(MAP, gradients, units, how=how, cagrad=cagrad))
    return np.asarray(scaled(MAP, gradients, factors)["w"].sum(axis=0))[:3], factors


@pytest.mark.parametrize("how", ["sum", "pcgrad", "cagrad", "drop_smaller"])
def test_only_shared_units_are_touched_and_none_in_warm_up(how):
    _, factors = combined([1, 0, 0], [-1, 1, 0], how)
    np.testing.assert_array_equal(factors[:, 0, 3:], 1)
    assert (factors[:, 0, :3] != 1).any() == (how != "sum")
    np.testing.assert_array_equal(combined([1, 0, 0], [-1, 1, 0], how, units=np.zeros_like(UNITS))[1], 1)


def test_pcgrad_by_hand():
    # g_a loses its part along g_g, (-1/2)(-1, 1, 0); g_g loses its part along g_a, (-1)(1, 0, 0).
    got, _ = combined([1, 0, 0], [-1, 1, 0], "pcgrad")
    np.testing.assert_allclose(got, [0.5, 1.5, 0], atol=1e-6)


def test_drop_smaller_by_hand():
    np.testing.assert_array_equal(combined([1, 0, 0], [-1, 1, 0], "drop_smaller")[0], [-1, 1, 0])
    np.testing.assert_array_equal(combined([2, 0, 0], [-1, 1, 0], "drop_smaller")[0], [2, 0, 0])
    np.testing.assert_array_equal(combined([2, 0, 0], [1, 1, 0], "drop_smaller")[0], [3, 1, 0])


@given(vectors)
def test_pcgrad_opposes_neither_role_and_changes_nothing_without_conflict(pair):
    action, args = np.array(pair, np.float32)
    got, factors = combined(action, args, "pcgrad")
    scale = max(np.abs(action).max(), np.abs(args).max()) ** 2 + 1e-6
    assert action @ got >= -1e-4 * scale
    assert args @ got >= -1e-4 * scale
    if action @ args >= 0:
        np.testing.assert_array_equal(factors, 1)


@settings(max_examples=25)
@given(vectors, st.sampled_from([0.2, 0.5, 0.9]))
def test_cagrad_is_the_best_worst_case_within_its_ball(pair, c):
    action, args = np.array(pair, np.float64)
    mean = (action + args) / 2
    got = combined(action, args, "cagrad", c)[0] / 2
    radius = c * np.linalg.norm(mean)
    assert np.linalg.norm(got - mean) <= radius * (1 + 1e-4) + 1e-6
    around = np.random.default_rng(0).normal(size=(4000, 3))
    others = mean + radius * around / np.linalg.norm(around, axis=1, keepdims=True)
    worst = np.minimum(others @ action, others @ args).max()
    assert min(got @ action, got @ args) >= worst - 2e-3 * (1 + np.abs(worst))


def test_cagrad_without_room_is_the_sum():
    np.testing.assert_allclose(combined([1, 2, 0], [-3, 1, 1], "cagrad", 0.0)[0], [-2, 3, 1], atol=1e-6)


@pytest.mark.parametrize("how", ["pcgrad", "cagrad", "drop_smaller"])
@pytest.mark.parametrize("pair", [([0, 0, 0], [0, 0, 0]), ([0, 0, 0], [1, 0, 0]), ([1, 0, 0], [-1, 0, 0])])
def test_gradients_of_0_and_opposite_ones_stay_finite(how, pair):
    assert np.isfinite(combined(*pair, how)[0]).all()


def test_roles_beyond_the_two_keep_their_gradient():
    gradients = {"w": jnp.ones((3, 5)), "other": jnp.ones((3, 2))}
    got = scaled(MAP, gradients, jnp.full((2, 1, 5), 0.5))
    np.testing.assert_array_equal(got["w"][:, 0], [0.5, 0.5, 1])
    np.testing.assert_array_equal(got["other"], 1)
