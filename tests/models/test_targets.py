import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harnessrl_jax.models import init_params, logits, target_logps

SLOTS, TARGETS = 12, 30


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(SLOTS, 16)), jnp.float32)
    source, target = (jnp.asarray(rng.integers(0, n, TARGETS)) for n in (SLOTS, 40))
    return hidden, source, target


@pytest.mark.parametrize("tied", [True, False])
def test_values_by_hand(config, problem, tied):
    config = dataclasses.replace(config, tie_embeddings=tied)
    params = jax.jit(lambda key: init_params(config, key))(jax.random.key(3))
    hidden, source, target = problem
    head = params["embed"]["embedding"].T if tied else params["lm_head"]["kernel"]
    scores = np.asarray(hidden, np.float64)[source] @ np.asarray(head, np.float64)
    np.testing.assert_allclose(jax.jit(lambda h: logits(config, params, h))(hidden)[source], scores, atol=1e-5)
    probability = np.exp(scores / 0.7)
    probability /= probability.sum(-1, keepdims=True)
    logp, entropy = jax.jit(lambda *x: target_logps(config, params, *x, temperature=0.7))(hidden, source, target)
    np.testing.assert_allclose(logp, np.log(probability[np.arange(TARGETS), target]), atol=1e-5)
    np.testing.assert_allclose(entropy, -(probability * np.log(probability)).sum(-1), atol=1e-5)


def test_chunks_change_neither_values_nor_gradients(config, params, problem):
    hidden, source, target = problem
    weight = jnp.linspace(-1.0, 1.0, TARGETS)

    def loss(params, hidden, chunk):
        logp, entropy = target_logps(config, params, hidden, source, target, temperature=1.3, chunk=chunk)
        return jnp.vdot(weight, logp) + jnp.vdot(weight**2, entropy)

    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), static_argnums=2)
    whole = gradient(params, hidden, TARGETS)
    for got, want in zip(jax.tree.leaves(gradient(params, hidden, 7)), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5, rtol=2e-5)


def test_nothing_of_the_size_of_all_targets_times_vocabulary_is_made(config, params, problem):
    hidden, source, target = problem

    def shapes(chunk):
        loss = lambda p, h: sum(x.sum() for x in target_logps(config, p, h, source, target, chunk=chunk))
        return str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(params, hidden))

    assert f"f32[{TARGETS},40]" in shapes(TARGETS)
    small = shapes(8)
    assert "f32[8,40]" in small
    assert "f32[4,8,40]" not in small
    assert f"f32[{TARGETS},40]" not in small


def test_large_scores_stay_finite(config, params, problem):
    hidden, source, target = problem
    loss = lambda h: sum(x.sum() for x in target_logps(config, params, 1e4 * h, source, target))
    value, gradient = jax.jit(jax.value_and_grad(loss))(hidden)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
