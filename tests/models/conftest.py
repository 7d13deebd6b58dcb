"""A tiny decoder with every kind of parameter away from its initial value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harnessrl_jax.models import DecoderConfig, init_params

TINY = DecoderConfig(
    vocab_size=40,
    hidden_size=16,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=4,
    mlp_size=24,
    qkv_bias=True,
    rope_theta=50.0,
)


@pytest.fixture(scope="session")
def config():
    return TINY


@pytest.fixture(scope="session")
def params():
    """Biases, scales and embeddings large enough that each of them matters."""
    rng = np.random.default_rng(0)
    start = jax.jit(lambda key: init_params(TINY, key))(jax.random.key(0))
    return jax.tree.map(lambda x: jnp.asarray(x + rng.normal(scale=0.3, size=x.shape), jnp.float32), start)
