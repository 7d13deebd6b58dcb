"""Attention over the cache, with windows and sinks, against the dense oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harnessrl_jax.attention import row_mask, tree_attention
from harnessrl_jax.models.cached import cached_attention

LENGTH, NEW = 256, 3  # two blocks of the cache


@pytest.mark.parametrize("window", [None, 1, 40, 200])
@pytest.mark.parametrize("with_sinks", [True, False])
def test_new_tokens_see_what_they_see_in_a_row(window, with_sinks):
    rng = np.random.default_rng(0)
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    k, v, sinks = array(2, 2, LENGTH, 4), array(2, 2, LENGTH, 4), array(4) if with_sinks else None
    position = jnp.array([[5, 6, 7], [251, 252, 253]])  # one slot never looks at what the other needs
    q = array(2, NEW, 4, 4)
    garbage = jnp.arange(LENGTH).reshape(1, 1, LENGTH, 1) > position[:, -1].reshape(2, 1, 1, 1)
    dirty = [jnp.where(garbage, jnp.nan, x) for x in (k, v)]
    got = jax.jit(lambda q, k, v: cached_attention(q, k, v, position, window=window, sinks=sinks))(q, *dirty)
    mask = row_mask(jnp.full(LENGTH, LENGTH))
    for slot in range(2):
        queries = jnp.zeros((LENGTH, 4, 4)).at[position[slot]].set(q[slot])
        keys, values = (jnp.moveaxis(x[slot], 0, 1) for x in (k, v))
        want = tree_attention(queries, keys, values, mask, window=window, sinks=sinks, implementation="dense")
        np.testing.assert_allclose(got[slot], want[position[slot]], atol=2e-6)
