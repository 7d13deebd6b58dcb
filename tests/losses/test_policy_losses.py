"""Dual clip, CISPO and REINFORCE: by hand, and where each is one of the others."""

import jax
import numpy as np
import pytest

from harnessrl_jax.errors import LossError
from harnessrl_jax.losses import cispo, clipped_surrogate, dual_clipped_surrogate, reinforce, truncated_importance

CLIP = {"clip_low": 0.2, "clip_high": 0.3}
LOGP = np.log([0.8, 0.8, 0.2, 0.2, np.nan]).astype(np.float32)
BEHAVIOUR = np.log([0.2, 0.2, 0.4, 0.4, np.nan]).astype(np.float32)
ADVANTAGE = np.array([1.0, -1.0, 1.0, -1.0, np.nan])
WEIGHT = np.array([1.0, 1.0, 2.0, 0.5, 0.0])


def gradient(loss, *arguments, **settings):
    return jax.jit(jax.grad(lambda logp: loss(logp, *arguments, **settings).total))(LOGP)


def test_dual_clip_worked_by_hand():
    #   ρ       4     4    1/2   1/2
    #   A       1    -1     1    -1
    #   plain   1.3  -4     0.5  -0.8
    #   dual    1.3  -3     0.5  -0.8      Σ weight·gain = 1.3 - 3 + 1 - 0.4 = -1.1
    out = dual_clipped_surrogate(LOGP, BEHAVIOUR, ADVANTAGE, WEIGHT, dual_clip=3.0, **CLIP)
    np.testing.assert_allclose(out, (1.1, 4.5), rtol=1e-5)
    got = gradient(dual_clipped_surrogate, BEHAVIOUR, ADVANTAGE, WEIGHT, dual_clip=3.0, **CLIP)
    np.testing.assert_allclose(got, [0, 0, -1, 0, 0], rtol=1e-5)
    plain = gradient(clipped_surrogate, BEHAVIOUR, ADVANTAGE, WEIGHT, **CLIP)
    np.testing.assert_allclose(plain, [0, 4, -1, 0, 0], rtol=1e-5)


def test_dual_clip_out_of_reach_is_the_plain_clip():
    out = dual_clipped_surrogate(LOGP, BEHAVIOUR, ADVANTAGE, WEIGHT, dual_clip=1e9, **CLIP)
    np.testing.assert_array_equal(out, clipped_surrogate(LOGP, BEHAVIOUR, ADVANTAGE, WEIGHT, **CLIP))


def test_dual_clip_that_would_stop_on_policy_learning_is_refused():
    with pytest.raises(LossError, match=r"dual_clip must be above 1, got 1\.0; the usual value is 3"):
        dual_clipped_surrogate(LOGP, BEHAVIOUR, ADVANTAGE, WEIGHT, dual_clip=1.0, **CLIP)


def test_cispo_worked_by_hand():
    # clip(ρ) = 1.3, 1.3, 0.8, 0.8: every token keeps a gradient, -w clip(ρ) A.
    got = gradient(cispo, BEHAVIOUR, ADVANTAGE, WEIGHT, **CLIP)
    np.testing.assert_allclose(got, [-1.3, 1.3, -1.6, 0.4, 0], rtol=1e-5)
    open_below = gradient(cispo, BEHAVIOUR, ADVANTAGE, WEIGHT, clip_low=1.0, clip_high=0.3)
    np.testing.assert_allclose(open_below, [-1.3, 1.3, -1.0, 0.25, 0], rtol=1e-5)


def test_cispo_without_a_lower_bound_is_truncated_importance_times_reinforce():
    counted = WEIGHT > 0
    weight = truncated_importance(LOGP - BEHAVIOUR, counted, limit=1.3)
    want = gradient(reinforce, weight * ADVANTAGE, WEIGHT)
    np.testing.assert_allclose(
        gradient(cispo, BEHAVIOUR, ADVANTAGE, WEIGHT, clip_low=1.0, clip_high=0.3), want, rtol=1e-6
    )


@pytest.mark.parametrize("loss", [cispo, clipped_surrogate])
def test_on_policy_every_ratio_loss_is_reinforce(loss):
    want = gradient(reinforce, ADVANTAGE, WEIGHT)
    np.testing.assert_allclose(gradient(loss, LOGP, ADVANTAGE, WEIGHT, **CLIP), want, rtol=1e-6)
    np.testing.assert_allclose(want, [-1, 1, -2, 0.5, 0], rtol=1e-6)


def test_reinforce_is_the_policy_gradient():
    """Over all samples of a softmax policy, the mean gradient is that of the expected reward."""
    logits, reward = np.array([0.3, -0.2, 1.0]), np.array([1.0, -2.0, 0.5])
    probability = np.exp(logits) / np.exp(logits).sum()
    loss = lambda x: reinforce(jax.nn.log_softmax(x), reward, probability).total
    expected = lambda x: -(jax.nn.softmax(x) * reward).sum()
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(logits), jax.jit(jax.grad(expected))(logits), rtol=1e-5)
