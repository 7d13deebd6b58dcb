"""Options of the compiler: recomputed layers wait until the backward pass needs them."""

import jax
import jax.numpy as jnp

from harnessrl_jax.models import DecoderConfig, init_params
from harnessrl_jax.training import decoder_row_fn, step_compiler_options
from harnessrl_jax.training.rows import Row

SLOTS, LAYERS = 256, 3
MODEL = DecoderConfig(vocab_size=32, hidden_size=32, layers=LAYERS, heads=2, kv_heads=2, head_dim=16, mlp_size=512)


def row() -> Row:
    slot = jnp.arange(SLOTS)
    number, flag = jnp.zeros(SLOTS), jnp.ones(SLOTS, bool)
    return Row(
        token=slot % 32,
        position=slot,
        subtree_end=jnp.full(SLOTS, SLOTS),
        source=slot,
        target=slot % 32,
        logp_behaviour=number,
        has_logp=flag,
        advantage=number,
        role=jnp.zeros(SLOTS, jnp.int8),
        weight=number,
        success=flag,
        call=slot,
        rollout=slot,
    )


def bytes_of_a_gradient(options: dict[str, str]) -> int:
    row_fn = decoder_row_fn(MODEL, temperature=1.0, implementation="blockwise", remat="full", collect=None)
    params = jax.eval_shape(lambda: init_params(MODEL, jax.random.key(0)))
    gradient = jax.grad(lambda params: row_fn(params, row()).logp.sum())
    found = jax.jit(gradient, compiler_options=options).lower(params).compile().memory_analysis()
    assert found is not None
    return found.temp_size_in_bytes


def test_recomputed_layers_are_not_all_in_memory_at_once() -> None:
    one_layer = 3 * SLOTS * MODEL.mlp_size * 4  # gate, up and their product
    assert bytes_of_a_gradient(step_compiler_options()) < bytes_of_a_gradient({}) - (LAYERS - 2) * one_layer
