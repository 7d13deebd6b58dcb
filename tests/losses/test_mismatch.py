"""What is reported about sampler and trainer: by hand, against NumPy, in parts, and at its limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harnessrl_jax.losses import (
    masked_log_ratio,
    probability_moments,
    ratio_moments,
    segment_log_ratio,
    segment_size,
)


def test_ratios_worked_by_hand():
    # ρ = 1, 2, 1/2 with weights 1, 1, 2: Σwρ = 4, Σwρ² = 5.5, Σw = 4.
    log_ratio, weight = jnp.log(jnp.array([1.0, 2.0, 0.5, jnp.nan])), jnp.array([1.0, 1.0, 2.0, 0.0])
    moments = ratio_moments(log_ratio, weight)
    np.testing.assert_allclose(moments.effective_share(), 16 / (4 * 5.5), rtol=1e-6)
    np.testing.assert_allclose(moments.chi2(), 5.5 / 4 - 1, rtol=1e-6)
    # ρ - 1 - log ρ: 0, 1 - log 2, log 2 - 1/2
    np.testing.assert_allclose(moments.kl(), (1 - np.log(2) + 2 * (np.log(2) - 0.5)) / 4, rtol=1e-6)


def test_exact_over_a_distribution():
    sampler, trainer = np.array([0.2, 0.5, 0.3]), np.array([0.3, 0.3, 0.4])
    moments = ratio_moments(jnp.asarray(np.log(trainer / sampler), jnp.float32), jnp.asarray(sampler, jnp.float32))
    np.testing.assert_allclose(moments.kl(), (sampler * np.log(sampler / trainer)).sum(), rtol=1e-5)
    np.testing.assert_allclose(moments.chi2(), (trainer**2 / sampler).sum() - 1, rtol=1e-5)
    np.testing.assert_allclose(moments.effective_share(), 1 / (1 + moments.chi2()), rtol=1e-5)


def test_each_sequence_counts_once():
    logp, other = jnp.array([0.0, 0.0, 0.0, -1.0]), jnp.array([-0.5, -0.5, -0.5, -1.0])
    segment, mask = jnp.array([0, 0, 0, 1]), jnp.ones(4, bool)
    product = segment_log_ratio(logp, other, segment, mask)
    moments = ratio_moments(product, 1 / segment_size(segment, mask))
    big = np.exp(1.5)
    np.testing.assert_allclose(moments.weight, 2, rtol=1e-6)
    np.testing.assert_allclose(moments.effective_share(), (big + 1) ** 2 / (2 * (big**2 + 1)), rtol=1e-6)


def probabilities(seed, spread, size=400):
    rng = np.random.default_rng(seed)
    logp = np.log(rng.uniform(1 - spread, 1, size))
    return logp, np.minimum(logp + 1e-3 * rng.normal(size=size), 0)


@pytest.mark.parametrize("spread", [0.9, 0.1, 0.02])
def test_the_correlation_is_that_of_numpy_also_where_it_is_close_to_1(spread):
    logp, sampler = (x.astype(np.float32) for x in probabilities(0, spread))
    want = np.corrcoef(np.exp(logp.astype(np.float64)), np.exp(sampler.astype(np.float64)))[0, 1]
    got, valid = probability_moments(jnp.asarray(logp), jnp.asarray(sampler), jnp.ones(400)).correlation()
    assert valid
    np.testing.assert_allclose(1 - got, 1 - want, rtol=0.02, atol=2e-7)


def test_parts_add_and_masked_values_are_never_read():
    logp, sampler = (jnp.asarray(x, jnp.float32) for x in probabilities(1, 0.9, size=40))
    weight = jnp.asarray(np.random.default_rng(2).integers(0, 3, 40), jnp.float32)
    spoiled = [jnp.where(weight > 0, x, jnp.nan) for x in (logp, sampler)]
    of = lambda x, y, w: (ratio_moments(masked_log_ratio(x, y, w > 0), w), probability_moments(x, y, w))
    whole = of(logp, sampler, weight)
    parts = jax.vmap(of)(*(x.reshape(4, 10) for x in (*spoiled, weight)))
    together = jax.tree.map(lambda leaf: leaf.sum(axis=0), parts)
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6), together, whole)
    np.testing.assert_allclose(together[1].correlation()[0], whole[1].correlation()[0], rtol=1e-6)
    assert parts[1].correlation()[1].shape == (4,)


def test_equal_policies_agree_fully():
    logp = jnp.log(jnp.array([0.9, 0.1, 0.5]))
    moments = ratio_moments(masked_log_ratio(logp, logp, jnp.ones(3, bool)), jnp.ones(3))
    assert (moments.effective_share(), moments.kl(), moments.chi2()) == (1, 0, 0)
    assert probability_moments(logp, logp, jnp.ones(3)).correlation() == (1, True)


@pytest.mark.parametrize(
    ("logp", "weight"),
    [
        (jnp.log(jnp.array([0.7, 0.7, 0.7])), jnp.ones(3)),
        (jnp.array([-1.0, -2.0, -3.0]), jnp.zeros(3)),
        (jnp.array([-1.0, -2.0, jnp.nan]), jnp.array([0.0, 1.0, 0.0])),
    ],
)
def test_a_correlation_that_is_not_defined_says_so(logp, weight):
    value, valid = probability_moments(logp, logp, weight).correlation()
    assert (value, valid) == (0, False)


def test_no_samples_are_no_mismatch():
    moments = ratio_moments(jnp.full(3, jnp.nan), jnp.zeros(3))
    assert (moments.effective_share(), moments.kl(), moments.chi2()) == (1, 0, 0)


def test_nothing_carries_a_gradient():
    def total(logp):
        every = (*ratio_moments(masked_log_ratio(logp, -jnp.ones(3), jnp.ones(3, bool)), jnp.ones(3)),)
        return sum(every) + sum(probability_moments(logp, -jnp.ones(3), jnp.ones(3)))

    np.testing.assert_array_equal(jax.grad(total)(jnp.array([-1.0, -2.0, -0.5])), 0)
