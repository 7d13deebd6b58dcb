"""Offline rollouts: weighted regression, the baseline and the sampling probabilities."""

import jax
import numpy as np
import pytest

from harnessrl_jax import losses
from harnessrl_jax.errors import LossError

advantage_weighted_regression = jax.jit(losses.advantage_weighted_regression, static_argnames=("temperature", "limit"))
return_probabilities = jax.jit(losses.return_probabilities, static_argnames="temperature")
linear_baseline = jax.jit(losses.linear_baseline)


def test_regression_worked_by_hand():
    logp, weight = np.array([-1.0, -2.0, -3.0, np.nan]), np.array([1.0, 1.0, 2.0, 0.0])
    advantage = np.array([np.log(2) / 2, 100.0, -np.log(4) / 2, np.inf])
    # Factors 2, 20 (the limit) and 1/4: 2 · 1 + 20 · 2 + ¼ · 2 · 3
    out = advantage_weighted_regression(logp, advantage, weight, temperature=0.5, limit=20.0)
    np.testing.assert_allclose(out, (43.5, 4), rtol=1e-5)


def test_regression_without_preferences_is_cross_entropy():
    logp, weight = np.array([-1.0, -2.0, -3.0]), np.array([1.0, 1.0, 2.0])
    plain = jax.jit(losses.cross_entropy)(logp, weight)
    same = advantage_weighted_regression(logp, np.zeros(3), weight, temperature=1.0, limit=20.0)
    np.testing.assert_array_equal(same, plain)
    hot = advantage_weighted_regression(logp, np.array([1.0, -2, 3]), weight, temperature=1e7, limit=20.0)
    np.testing.assert_allclose(hot, plain, rtol=1e-6)


def test_the_baseline_is_least_squares_with_a_constant():
    rng = np.random.default_rng(0)
    feature, returns = rng.normal(size=(30, 2)), rng.normal(size=30)
    counted = rng.random(30) < 0.7
    design = np.c_[feature, np.ones(30)]
    want = design @ np.linalg.lstsq(design[counted], returns[counted], rcond=None)[0] * counted
    spoiled = np.where(counted[:, None], feature, np.nan), np.where(counted, returns, np.inf)
    got = linear_baseline(*spoiled, counted)
    np.testing.assert_allclose(got, want, atol=1e-5)
    residual = np.where(counted, returns, 0) - got
    np.testing.assert_allclose(design[counted].T @ residual[counted], 0, atol=1e-4)


def test_the_baseline_of_a_linear_return_is_the_return_also_with_redundant_features():
    kind = np.array([0.0, 1.0, 1.0, 0.0])
    returns = 2 * kind - 0.5
    redundant = np.stack([kind, 1 - kind, 2 * kind], axis=1)
    np.testing.assert_allclose(linear_baseline(redundant, returns, np.ones(4, bool)), returns, atol=1e-5)


def test_probabilities_worked_by_hand():
    # Normalised 0, 1, 1/2 over temperature 1/2: weights 1, e^2, e
    out = return_probabilities(np.array([-1.0, 3.0, np.nan, 1.0]), np.array([True, True, False, True]), temperature=0.5)
    np.testing.assert_allclose(out, np.array([1, np.e**2, 0, np.e]) / (1 + np.e**2 + np.e), rtol=1e-5)


@pytest.mark.parametrize("temperature", [1e-3, 0.1, 1e3])
def test_probabilities_do_not_depend_on_the_scale_of_the_returns(temperature):
    returns, counted = np.array([0.0, 0.25, 1.0]), np.ones(3, bool)
    out = return_probabilities(returns, counted, temperature=temperature)
    np.testing.assert_allclose(out.sum(), 1, rtol=1e-6)
    np.testing.assert_allclose(return_probabilities(4 * returns - 1, counted, temperature=temperature), out, rtol=1e-6)
    if temperature == 1e3:
        np.testing.assert_allclose(out, 1 / 3, rtol=1e-3)
    if temperature == 1e-3:
        np.testing.assert_array_equal(out, [0, 0, 1])


@pytest.mark.parametrize("temperature", [1e-4, 0.1])
def test_equal_returns_are_drawn_evenly_and_nothing_is_drawn_from_nothing(temperature):
    counted = np.array([True, False, True])
    out = return_probabilities(np.array([0.7, np.nan, 0.7]), counted, temperature=temperature)
    np.testing.assert_array_equal(out, [0.5, 0, 0.5])
    none = return_probabilities(np.full(3, np.nan), np.zeros(3, bool), temperature=temperature)
    np.testing.assert_array_equal(none, 0)


def test_drawn_as_documented():
    probability = return_probabilities(np.array([0.0, 1.0]), np.ones(2, bool), temperature=0.5)
    drawn = jax.random.choice(jax.random.key(0), 2, (4000,), p=probability)
    np.testing.assert_allclose(drawn.mean(), probability[1], atol=0.03)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x: advantage_weighted_regression(x, x, x, temperature=0.0, limit=1.0),
            r"advantage_weighted_regression: temperature must be above 0, got 0\.0",
        ),
        (
            lambda x: advantage_weighted_regression(x, x, x, temperature=1.0, limit=0.0),
            r"advantage_weighted_regression: limit must be above 0, got 0\.0",
        ),
        (
            lambda x: return_probabilities(x, x > 0, temperature=-1.0),
            r"return_probabilities: temperature must be above 0, got -1\.0",
        ),
    ],
)
def test_settings_without_meaning_are_refused(call, message):
    with pytest.raises(LossError, match=message):
        call(np.ones(2))
