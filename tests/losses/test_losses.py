"""The clipped loss, cross-entropy and sums, worked by hand and at known limits."""

import jax
import numpy as np

from harnessrl_jax import losses
from harnessrl_jax.losses import Sum

clipped_surrogate, ratio_terms = (
    jax.jit(each, static_argnames=("clip_low", "clip_high")) for each in (losses.clipped_surrogate, losses.ratio_terms)
)
cross_entropy, kl_k3, masked_log_ratio = map(jax.jit, (losses.cross_entropy, losses.kl_k3, losses.masked_log_ratio))

CLIP = {"clip_low": 0.2, "clip_high": 0.3}
WEIGHT = np.array([1.0, 0.5, 0.0, 2.0, 1.0, 0.0], np.float32)


def row(seed):
    rng = np.random.default_rng(seed)
    behaviour = rng.uniform(-3, -1, 6)
    # |log ρ| far from the clip's corners, where no derivative exists.
    logp = behaviour + rng.choice([-0.6, -0.05, 0.05, 0.6], 6)
    return tuple(x.astype(np.float32) for x in (logp, behaviour, rng.normal(size=6)))


def test_clipped_worked_by_hand():
    # The four corners of the clip, then a target of weight 0 that must not count:
    #   ρ       2     2    1/2   1/2   nan
    #   A       1    -1     1    -1    nan
    #   gain    1.3  -2     0.5  -0.8   -
    #   weight  1     1     2     0.5   0      Σ weight·gain = 1.3 - 2 + 1 - 0.4 = -0.1
    out = clipped_surrogate(
        logp=np.log(np.array([0.8, 0.8, 0.2, 0.2, np.nan])),
        logp_behaviour=np.log(np.array([0.4, 0.4, 0.4, 0.4, np.nan])),
        advantage=np.array([1.0, -1.0, 1.0, -1.0, np.nan]),
        weight=np.array([1.0, 1.0, 2.0, 0.5, 0.0]),
        **CLIP,
    )
    np.testing.assert_allclose(out, (0.1, 4.5), rtol=1e-5)


def test_ratio_terms_worked_by_hand():
    # Corners as above: the first and the last are cut.
    out = ratio_terms(
        logp=np.log(np.array([0.8, 0.8, 0.2, 0.2, np.nan])),
        logp_behaviour=np.log(np.array([0.4, 0.4, 0.4, 0.4, np.nan])),
        advantage=np.array([1.0, -1.0, 1.0, -1.0, np.nan]),
        weight=np.array([1.0, 1.0, 2.0, 0.5, 0.0]),
        **CLIP,
    )
    np.testing.assert_array_equal(out.cut, [1, 0, 0, 1, 0])
    np.testing.assert_allclose(out.ratio, [2, 2, 0.5, 0.5, 0], rtol=1e-6)
    np.testing.assert_allclose(out.difference, np.log([2, 2, 2, 2, 1]), rtol=1e-6)
    np.testing.assert_allclose(out.kl, [1 - np.log(2)] * 2 + [np.log(2) - 0.5] * 2 + [0], rtol=1e-5)


def test_cross_entropy_and_kl_worked_by_hand():
    logp, reference = np.log(np.array([0.5, 0.25])), np.log(np.array([0.25, 0.25]))
    weight = np.array([1.0, 3.0])
    np.testing.assert_allclose(cross_entropy(logp, weight), (np.log(2) + 3 * np.log(4), 4), rtol=1e-6)
    np.testing.assert_allclose(kl_k3(logp, reference, weight), (0.5 - 1 + np.log(2), 4), rtol=1e-5)


def test_on_policy_gradient_is_reinforce():
    logp, _, advantage = row(0)
    loss = lambda x: clipped_surrogate(x, logp, advantage, WEIGHT, **CLIP).total
    np.testing.assert_allclose(jax.grad(loss)(logp), -WEIGHT * advantage, rtol=1e-6)


def test_log_ratio_is_cut_before_exp():
    logp, other = np.array([0.0, -300.0, -1.0]), np.array([-300.0, 0.0, -1.0])
    np.testing.assert_array_equal(masked_log_ratio(logp, other, np.ones(3, bool)), [20, -20, 0])
    loss = lambda x: clipped_surrogate(x, other, -np.ones(3), np.ones(3), **CLIP).total
    value, gradient = jax.value_and_grad(loss)(logp)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


def test_mean_of_nothing_is_0():
    assert float(Sum(np.zeros(()), np.zeros(())).mean()) == 0
    assert float(Sum(np.array(1.0), np.array(0.25)).mean()) == 4  # weights below 1 are weights too
