"""Importance weights and rejection: by hand, at their limits, and blind where masked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harnessrl_jax import losses
from harnessrl_jax.errors import LossError
from harnessrl_jax.losses import clipped_surrogate, dual_clipped_surrogate, gspo, masked_log_ratio

truncated_importance = jax.jit(losses.truncated_importance, static_argnames="limit")
masked_importance = jax.jit(losses.masked_importance, static_argnames=("low", "high"))
within_band = jax.jit(losses.within_band, static_argnames=("low", "high"))
veto = jax.jit(losses.veto, static_argnames="floor")
segment_log_ratio, segment_mean_log_ratio = map(jax.jit, (losses.segment_log_ratio, losses.segment_mean_log_ratio))

MASK = np.array([True, True, True, True, False])
LOG_RATIO = np.log([0.5, 1.0, 3.0, 1e-5, np.nan]).astype(np.float32)
SEGMENT = np.array([4, 4, 9, 9, 4])


def test_weights_worked_by_hand():
    np.testing.assert_allclose(truncated_importance(LOG_RATIO, MASK, limit=2.0), [0.5, 1, 2, 1e-5, 0], rtol=1e-5)
    np.testing.assert_allclose(truncated_importance(LOG_RATIO, MASK, limit=np.inf), [0.5, 1, 3, 1e-5, 0], rtol=1e-5)
    np.testing.assert_allclose(masked_importance(LOG_RATIO, MASK, low=0.5, high=2.0), [0.5, 1, 0, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(masked_importance(LOG_RATIO, MASK, low=0.0, high=5.0), [0.5, 1, 3, 1e-5, 0], rtol=1e-5)


def test_sequence_weights_worked_by_hand():
    # Sequence 4: 1/2 · 1 (the last target is masked). Sequence 9: 3 · 1e-5.
    zeros = np.where(MASK, 0, np.nan).astype(np.float32)
    product = segment_log_ratio(LOG_RATIO, zeros, SEGMENT, MASK)
    np.testing.assert_allclose(truncated_importance(product, MASK, limit=0.25), [0.25, 0.25, 3e-5, 3e-5, 0], rtol=1e-5)
    geometric = segment_mean_log_ratio(LOG_RATIO, zeros, SEGMENT, MASK)
    np.testing.assert_array_equal(within_band(geometric, MASK, low=0.7, high=1.3), [1, 1, 0, 0, 0])


def test_a_narrow_band_keeps_its_borders_and_nothing_beyond():
    log_ratio = np.log([0.9989, 0.99905, 1.0, 1.00095, 1.0011]).astype(np.float32)
    kept = within_band(log_ratio, np.ones(5, bool), low=0.999, high=1.001)
    np.testing.assert_array_equal(kept, [0, 1, 1, 1, 0])
    on_policy = masked_log_ratio(LOG_RATIO, LOG_RATIO, MASK)
    np.testing.assert_array_equal(within_band(on_policy, MASK, low=1.0, high=1.0), MASK)


def test_veto_rejects_the_whole_sequence_of_an_impossible_token():
    np.testing.assert_array_equal(veto(LOG_RATIO, SEGMENT, MASK, floor=1e-4), [1, 1, 0, 0, 0])
    np.testing.assert_array_equal(veto(LOG_RATIO, SEGMENT, MASK, floor=1e-6), MASK)
    # A masked token vetoes nothing.
    np.testing.assert_array_equal(veto(LOG_RATIO, SEGMENT, MASK & (np.arange(5) != 3), floor=1e-4), [1, 1, 1, 0, 0])


def test_nothing_carries_a_gradient_and_a_masked_nan_stays_out_of_it():
    def total(logp):
        log_ratio = masked_log_ratio(logp, np.zeros(5, np.float32), MASK)
        weights = truncated_importance(log_ratio, MASK, limit=2.0) + masked_importance(
            segment_log_ratio(logp, np.zeros(5, np.float32), SEGMENT, MASK), MASK, low=0.0, high=9.0
        )
        return (weights * jnp.where(MASK, logp, 0)).sum(), weights

    gradient, weights = jax.jit(jax.grad(total, has_aux=True))(LOG_RATIO)
    assert np.isfinite(weights).all()
    np.testing.assert_allclose(gradient, weights, rtol=1e-6)


def test_on_policy_weights_are_1():
    log_ratio = masked_log_ratio(LOG_RATIO, LOG_RATIO, MASK)
    np.testing.assert_array_equal(truncated_importance(log_ratio, MASK, limit=2.0), MASK)
    np.testing.assert_array_equal(veto(log_ratio, SEGMENT, MASK, floor=1e-4), MASK)


def test_importance_weights_make_the_mean_unbiased():
    """E under the sampler of ρ f = E under the trainer of f, as long as nothing is truncated."""
    sampler, trainer = np.array([0.2, 0.5, 0.3], np.float32), np.array([0.3, 0.3, 0.4], np.float32)
    value = np.array([1.0, -2.0, 4.0])
    weight = truncated_importance(np.log(trainer / sampler), np.ones(3, bool), limit=10.0)
    np.testing.assert_allclose((sampler * np.asarray(weight) * value).sum(), (trainer * value).sum(), rtol=1e-6)


@pytest.mark.parametrize(
    "loss",
    [
        lambda advantage, weight, x, y: clipped_surrogate(x, y, advantage, weight, clip_low=0.2, clip_high=0.3),
        lambda advantage, weight, x, y: dual_clipped_surrogate(
            x, y, advantage, weight, clip_low=0.2, clip_high=0.3, dual_clip=1.5
        ),
        lambda advantage, weight, x, y: gspo(
            x, y, advantage, weight, np.array([0, 0, 1, 1]), clip_low=0.2, clip_high=0.3
        ),
    ],
)
def test_a_factor_on_the_advantage_is_the_same_factor_on_the_loss(loss):
    x, y = np.array([-1.0, -2.0, -0.5, -1.5], np.float32), np.array([-1.5, -1.0, -0.6, -3.0], np.float32)
    advantage, factor = np.array([1.0, -1, 2, -2], np.float32), np.array([2.0, 0.5, 1.0, 0.25], np.float32)
    each = jax.jit(lambda credit: jax.vmap(lambda weight: loss(credit, weight, x, y).total)(jnp.eye(4)))
    np.testing.assert_allclose(each(factor * advantage), factor * each(advantage), rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: truncated_importance(LOG_RATIO, MASK, limit=0.0), r"limit must be above 0, got 0\.0; 2 is usual"),
        (lambda: within_band(LOG_RATIO, MASK, low=2.0, high=1.0), r"wanted 0 <= low <= high, got low 2\.0 and high 1"),
        (lambda: veto(LOG_RATIO, SEGMENT, MASK, floor=0.0), r"floor must be above 0, got 0\.0; 1e-4 is usual"),
    ],
)
def test_settings_without_meaning_are_refused(call, message):
    with pytest.raises(LossError, match=message):
        call()
