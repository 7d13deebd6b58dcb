"""The three estimates of KL, over all samples of a small policy: which values and gradients they have in the mean."""

from functools import partial

import jax
import numpy as np
import pytest

from harnessrl_jax.losses import forward_kl, kl_k1, kl_k2, kl_k3, reverse_kl

LOGITS = np.array([0.5, -1.0, 0.2], np.float32)
REFERENCE = np.array([0.1, 0.4, -0.6], np.float32)
ESTIMATES = (kl_k1, kl_k2, kl_k3)


@pytest.fixture(scope="module")
def in_the_mean():
    """(value, gradient) of every estimate over all samples of the policy, and of both exact distances, by function."""
    probability = np.exp(LOGITS) / np.exp(LOGITS).sum()

    def estimate(loss, x):
        return loss(jax.nn.log_softmax(x), jax.nn.log_softmax(REFERENCE), probability).total

    def exact(loss, x):
        return loss(x[None], REFERENCE[None], np.ones(1, np.float32)).total

    of = {loss: estimate for loss in ESTIMATES} | {reverse_kl: exact, forward_kl: exact}
    every = jax.jit(lambda x: [jax.value_and_grad(partial(mean, loss))(x) for loss, mean in of.items()])
    return dict(zip(of, every(LOGITS), strict=True))


def test_worked_by_hand():
    logp, reference = np.log([0.5, 0.25]), np.log([0.25, 0.25])
    every = jax.jit(lambda *row: [loss(*row) for loss in ESTIMATES])(logp, reference, np.array([2.0, 3.0]))
    want = [(2 * np.log(2), 5), (np.log(2) ** 2, 5), (2 * (np.log(2) - 0.5), 5)]
    np.testing.assert_allclose(every, want, rtol=1e-5)


def test_k1_and_k3_have_the_value_of_the_kl(in_the_mean):
    for loss in (kl_k1, kl_k3):
        np.testing.assert_allclose(in_the_mean[loss][0], in_the_mean[reverse_kl][0], rtol=1e-5)


def test_k2_has_the_gradient_of_the_kl_and_k3_that_of_the_other_way_round(in_the_mean):
    np.testing.assert_allclose(in_the_mean[kl_k2][1], in_the_mean[reverse_kl][1], atol=1e-6)
    np.testing.assert_allclose(in_the_mean[kl_k3][1], in_the_mean[forward_kl][1], atol=1e-6)
    assert np.abs(in_the_mean[reverse_kl][1] - in_the_mean[forward_kl][1]).max() > 0.01


def test_k1_as_a_loss_teaches_nothing(in_the_mean):
    np.testing.assert_allclose(in_the_mean[kl_k1][1], 0, atol=1e-6)


def test_equal_policies_have_no_distance():
    every = jax.jit(lambda x: [loss(x, x, np.ones(3, np.float32)).total for loss in ESTIMATES])
    np.testing.assert_array_equal(every(LOGITS), 0)
