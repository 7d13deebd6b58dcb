"""What a training row keeps in memory: no array of tokens times vocabulary, and as little as the policy says."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harnessrl_jax.models import row_hidden, target_logps

SLOTS, TARGETS, CHUNK, VOCAB = 64, 48, 16, 40


@pytest.fixture(scope="module")
def loss():
    """Summed log-probability of a row's targets, by remat policy."""

    def summed(config, params, remat, implementation="dense"):
        row = (jnp.arange(SLOTS) % VOCAB, jnp.arange(SLOTS), jnp.full(SLOTS, SLOTS))
        hidden, _ = row_hidden(config, params, *row, implementation=implementation, block=16, remat=remat)
        source, target = jnp.arange(TARGETS), jnp.arange(TARGETS) % VOCAB
        return target_logps(config, params, hidden, source, target, chunk=CHUNK)[0].sum()

    return summed


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_no_array_of_tokens_times_vocabulary_is_in_the_step(config, params, loss, implementation):
    step = jax.jit(jax.value_and_grad(lambda p: loss(config, p, "attention", implementation)))
    text = step.lower(params).as_text()
    shapes = [[int(n) for n in dims.split("x")[:-1]] for dims in re.findall(r"tensor<((?:\d+x)+)[a-z]", text)]
    with_vocabulary = [math.prod(shape) // VOCAB for shape in shapes if VOCAB in shape]
    assert max(with_vocabulary) == CHUNK == config.hidden_size  # a chunk's logits; the embedding has as many rows


def test_policies_keep_less_and_less_and_give_the_same(config, params, loss):
    def kept(remat):
        """Numbers that the forward pass leaves for the backward pass."""
        residuals = jax.eval_shape(lambda p: jax.vjp(lambda q: loss(config, q, remat), p)[1], params)
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(residuals))

    sizes = [kept(remat) for remat in ("none", "dots", "attention", "full")]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4
    gradient = lambda remat: jax.jit(jax.grad(lambda p: loss(config, p, remat)))(params)
    want = gradient("none")
    for remat in ("dots", "full"):
        for got, right in zip(jax.tree.leaves(gradient(remat)), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(got, right, atol=1e-4 * max(1.0, np.abs(right).max()))
