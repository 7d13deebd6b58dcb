"""The decoder as an nnx module, nnx modules as pure functions, and the value head."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from harnessrl_jax.models import DecoderConfig, init_params, init_value_head, logits, row_hidden, values
from harnessrl_jax.models.nnx import DecoderModule, pure

CONFIG = DecoderConfig(vocab_size=11, hidden_size=8, layers=1, heads=2, kv_heads=1, head_dim=4, mlp_size=6)
ROW = (jnp.arange(4), jnp.arange(4), jnp.full(4, 4))


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda: init_params(CONFIG, jax.random.key(0)))()


def test_the_module_is_the_decoder(params):
    module = DecoderModule(CONFIG, params)
    want = jax.jit(lambda p: logits(CONFIG, p, row_hidden(CONFIG, p, *ROW)[0]))
    np.testing.assert_allclose(nnx.jit(lambda m: m(*ROW))(module), want(params), atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, module.params(), params)
    gradient = nnx.jit(nnx.grad(lambda m: m(*ROW)[0, 3]))(module)
    pure_gradient = jax.jit(jax.grad(lambda p: want(p)[0, 3]))(params)
    got = nnx.to_pure_dict(gradient)["weights"]
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=1e-6), got, pure_gradient)


def test_any_module_becomes_parameters_and_a_function():
    module = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    x = jnp.arange(6.0).reshape(2, 3)
    params, apply = pure(module)
    assert set(params) == {"kernel", "bias"}
    np.testing.assert_array_equal(apply(params, x), module(x))
    doubled = jax.tree.map(lambda p: 2 * p, params)
    np.testing.assert_allclose(apply(doubled, x), 2 * module(x), rtol=1e-6)
    gradient = jax.grad(lambda p: apply(p, x).sum())(params)
    np.testing.assert_allclose(gradient["kernel"], np.tile(x.sum(0)[:, None], (1, 2)))


def test_values_by_hand():
    head = init_value_head(CONFIG)
    hidden = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    np.testing.assert_array_equal(values(head, hidden), np.zeros(3))
    head = {"kernel": jnp.arange(8.0)[:, None], "bias": jnp.array([2.0])}
    np.testing.assert_allclose(values(head, hidden), hidden @ np.arange(8.0) + 2.0, rtol=1e-5)
    assert values(head, hidden.astype(jnp.bfloat16)).dtype == jnp.float32
