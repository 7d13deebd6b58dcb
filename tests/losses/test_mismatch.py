"""What is reported about sampler and trainer: by hand, against NumPy, in parts, and at its limits."""

import jax
import numpy as np
import pytest

from harnessrl_jax import losses
from harnessrl_jax.losses import masked_log_ratio


@jax.jit
def ratios(log_ratio, weight):
    """(effective share, KL, χ²)"""
    moments = losses.ratio_moments(log_ratio, weight)
    return moments.effective_share(), moments.kl(), moments.chi2()


@jax.jit
def correlation(logp, sampler, weight):
    return losses.probability_moments(logp, sampler, weight).correlation()


@jax.jit
def moments(logp, sampler, weight):
    log_ratio = masked_log_ratio(logp, sampler, weight > 0)
    return losses.ratio_moments(log_ratio, weight), losses.probability_moments(logp, sampler, weight)


def test_ratios_worked_by_hand():
    # ρ = 1, 2, 1/2 with weights 1, 1, 2: Σwρ = 4, Σwρ² = 5.5, Σw = 4; ρ - 1 - log ρ = 0, 1 - log 2, log 2 - 1/2
    log_ratio, weight = np.log([1.0, 2.0, 0.5, np.nan]), np.array([1.0, 1.0, 2.0, 0.0])
    kl = (1 - np.log(2) + 2 * (np.log(2) - 0.5)) / 4
    np.testing.assert_allclose(ratios(log_ratio, weight), (16 / (4 * 5.5), kl, 5.5 / 4 - 1), rtol=1e-5)


def test_exact_over_a_distribution():
    sampler, trainer = np.array([0.2, 0.5, 0.3]), np.array([0.3, 0.3, 0.4])
    share, kl, chi2 = ratios(np.log(trainer / sampler), sampler)
    np.testing.assert_allclose(kl, (sampler * np.log(sampler / trainer)).sum(), rtol=1e-5)
    np.testing.assert_allclose(chi2, (trainer**2 / sampler).sum() - 1, rtol=1e-5)
    np.testing.assert_allclose(share, 1 / (1 + chi2), rtol=1e-5)


def test_each_sequence_counts_once():
    logp, other = np.array([0.0, 0.0, 0.0, -1.0]), np.array([-0.5, -0.5, -0.5, -1.0])
    segment, mask = np.array([0, 0, 0, 1]), np.ones(4, bool)
    product = jax.jit(losses.segment_log_ratio)(logp, other, segment, mask)
    share, *_ = ratios(product, 1 / np.asarray(jax.jit(losses.segment_size)(segment, mask)))
    big = np.exp(1.5)
    np.testing.assert_allclose(share, (big + 1) ** 2 / (2 * (big**2 + 1)), rtol=1e-6)


def probabilities(seed, spread, size=400):
    rng = np.random.default_rng(seed)
    logp = np.log(rng.uniform(1 - spread, 1, size))
    return logp.astype(np.float32), np.minimum(logp + 1e-3 * rng.normal(size=size), 0).astype(np.float32)


@pytest.mark.parametrize("spread", [0.9, 0.1, 0.02])
def test_the_correlation_is_that_of_numpy_also_where_it_is_close_to_1(spread):
    logp, sampler = probabilities(0, spread)
    want = np.corrcoef(np.exp(logp.astype(np.float64)), np.exp(sampler.astype(np.float64)))[0, 1]
    got, valid = correlation(logp, sampler, np.ones(400, np.float32))
    assert valid
    np.testing.assert_allclose(1 - got, 1 - want, rtol=0.02, atol=2e-7)


def test_a_constant_difference_does_not_lower_the_correlation():
    ours = np.array([0.9, 0.3, 0.6])
    for theirs, want in ((ours - 0.2, 1), (0.5 * ours, 1), (1 - ours, -1)):
        value, valid = correlation(np.log(ours), np.log(theirs), np.ones(3))
        assert valid
        np.testing.assert_allclose(value, want, atol=1e-5)


def test_parts_add_and_masked_values_are_never_read():
    weight = np.random.default_rng(2).integers(0, 3, 40).astype(np.float32)
    row = probabilities(1, 0.9, size=40)
    spoiled = (np.where(weight > 0, x, np.float32(np.nan)) for x in row)
    parts = jax.jit(jax.vmap(moments))(*(x.reshape(4, 10) for x in (*spoiled, weight)))
    together = jax.tree.map(lambda leaf: np.asarray(leaf).sum(axis=0), parts)
    whole = moments(*row, weight)
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6), together, whole)
    assert parts[1].weight.shape == (4,)


def test_equal_policies_agree_fully():
    logp, one = np.log([0.9, 0.1, 0.5]), np.ones(3)
    np.testing.assert_array_equal(ratios(np.zeros(3), one), (1, 0, 0))
    np.testing.assert_array_equal(correlation(logp, logp, one), (1, True))


@pytest.mark.parametrize(
    ("logp", "weight"),
    [
        (np.log([0.7, 0.7, 0.7]), [1.0, 1.0, 1.0]),
        ([-1.0, -2.0, -3.0], [0.0, 0.0, 0.0]),
        ([-1.0, -2.0, np.nan], [0.0, 1.0, 0.0]),
    ],
)
def test_a_correlation_that_is_not_defined_says_so(logp, weight):
    logp = np.array(logp)
    np.testing.assert_array_equal(correlation(logp, logp, np.array(weight)), (0, False))


def test_no_samples_are_no_mismatch():
    np.testing.assert_array_equal(ratios(np.full(3, np.nan), np.zeros(3)), (1, 0, 0))


def test_nothing_carries_a_gradient():
    total = lambda logp, one: sum(sum(each) for each in moments(logp, -one, one))
    np.testing.assert_array_equal(jax.jit(jax.grad(total))(np.array([-1.0, -2.0, -0.5]), np.ones(3)), 0)
