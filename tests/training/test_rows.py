"""The decoder's row function reads the slot before a target, never the target's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harnessrl_jax.capo import RELU, probe_row
from harnessrl_jax.models import DecoderConfig, init_params, logits, row_hidden
from harnessrl_jax.training import decoder_row_fn
from harnessrl_jax.training.rows import Row
from harnessrl_jax.trajectories import PackedBatch

TINY = DecoderConfig(vocab_size=12, hidden_size=8, layers=2, heads=2, kv_heads=1, head_dim=4, mlp_size=8)


@pytest.fixture(scope="module")
def params():
    return jax.jit(init_params, static_argnums=0)(TINY, jax.random.key(0))


def one_row(toy):
    row = Row(*jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), toy.batch(rows=1)))
    return row._replace(token=row.token % 12, target=row.target % 12)


@pytest.mark.parametrize("collect", ["hidden", "gate", "up", "heads", "residual", None])
def test_outputs_are_those_of_the_source_slot(toy, params, collect):
    row = one_row(toy)
    row_fn = decoder_row_fn(TINY, temperature=0.5, implementation="dense", remat="none", collect=collect)
    out = jax.jit(row_fn)(params, row)
    hidden, units = jax.jit(
        lambda params: row_hidden(TINY, params, row.token, row.position, row.subtree_end, collect=collect)
    )(params)
    every = np.asarray(jax.nn.log_softmax(logits(TINY, params, hidden) / 0.5))
    out, row, units = jax.tree.map(np.asarray, (out, row, units))
    for i, (source, target) in enumerate(zip(row.source, row.target, strict=True)):
        np.testing.assert_allclose(out.logp[i], every[source, target], rtol=1e-5)
        np.testing.assert_allclose(out.entropy[i], -(np.exp(every[source]) * every[source]).sum(), rtol=1e-5)
        for layer, got in zip(units, out.units):
            np.testing.assert_allclose(got[i], layer[source], rtol=1e-5, atol=1e-6)
    assert len(out.units) == (2 if collect else 0)


def test_a_unit_that_fires_on_the_action_token_is_not_probed(toy):
    # Unit 0 fires at the slot before the action token, unit 1 on it. Only unit 0 predicts it.
    slots, source = np.zeros((8, 2), np.float32), 3
    slots[source, 0], slots[source + 1, 1] = 1, 1
    row = one_row(toy)._replace(source=jnp.full(6, source))
    probe = probe_row((jnp.asarray(slots)[row.source],), jnp.zeros(6, int), np.arange(6) == 0, statistic=RELU)
    np.testing.assert_array_equal(probe.total[0, 0], [1, 0])


def test_a_row_has_the_fields_of_a_packed_batch():
    # The ratio of the whole call is the one thing that is made on the way.
    assert Row._fields == (*PackedBatch._fields, "sequence_log_ratio")
