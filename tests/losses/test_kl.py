"""The three estimates of KL, over all samples of a small policy: which values and gradients they have in the mean."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harnessrl_jax.losses import forward_kl, kl_k1, kl_k2, kl_k3, reverse_kl

LOGITS = jnp.array([0.5, -1.0, 0.2])
REFERENCE = jnp.array([0.1, 0.4, -0.6])


def in_the_mean(loss):
    """(value, gradient) of a loss over all samples of the policy."""
    probability, reference = jax.nn.softmax(LOGITS), jax.nn.log_softmax(REFERENCE)
    return jax.value_and_grad(lambda x: loss(jax.nn.log_softmax(x), reference, probability).total)(LOGITS)


def exact(loss):
    return jax.value_and_grad(lambda x: loss(x[None], REFERENCE[None], jnp.ones(1)).total)(LOGITS)


def test_worked_by_hand():
    logp, reference = jnp.log(jnp.array([0.5, 0.25])), jnp.log(jnp.array([0.25, 0.25]))
    weight = jnp.array([2.0, 3.0])
    np.testing.assert_allclose(kl_k1(logp, reference, weight), (2 * np.log(2), 5), rtol=1e-6)
    np.testing.assert_allclose(kl_k2(logp, reference, weight), (np.log(2) ** 2, 5), rtol=1e-6)
    np.testing.assert_allclose(kl_k3(logp, reference, weight), (2 * (np.log(2) - 0.5), 5), rtol=1e-5)


@pytest.mark.parametrize("loss", [kl_k1, kl_k3])
def test_k1_and_k3_have_the_value_of_the_kl(loss):
    np.testing.assert_allclose(in_the_mean(loss)[0], exact(reverse_kl)[0], rtol=1e-5)


def test_k2_has_the_gradient_of_the_kl_and_k3_that_of_the_other_way_round():
    np.testing.assert_allclose(in_the_mean(kl_k2)[1], exact(reverse_kl)[1], atol=1e-6)
    np.testing.assert_allclose(in_the_mean(kl_k3)[1], exact(forward_kl)[1], atol=1e-6)
    assert np.abs(exact(reverse_kl)[1] - exact(forward_kl)[1]).max() > 0.01


def test_k1_as_a_loss_teaches_nothing():
    np.testing.assert_allclose(in_the_mean(kl_k1)[1], 0, atol=1e-6)


@pytest.mark.parametrize("loss", [kl_k1, kl_k2, kl_k3])
def test_equal_policies_have_no_distance(loss):
    assert loss(LOGITS, LOGITS, jnp.ones(3)).total == 0
