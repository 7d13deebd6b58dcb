"""The TPU kernels: their meaning in Pallas' interpreter, and that they lower for the real platform."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harnessrl_jax.attention import make_plan, row_mask
from harnessrl_jax.attention.blockwise import blockwise_attention
from harnessrl_jax.attention.pallas_tpu import pallas_tpu_attention
from harnessrl_jax.errors import ModelError

SLOTS, HEADS, KV, DIM = 256, 4, 2, 16


@partial(jax.jit, static_argnums=5)
def both(q, k, v, mask, cotangent, window):
    """Output and log-sum-exp with their gradients, of blockwise attention and of the kernels."""
    plan = make_plan(mask, window=window, block_q=32, block_k=128)

    def value_and_gradient(attend):
        results, pull = jax.vjp(lambda q, k, v: attend(q, k, v, mask, plan, scale=0.3), q, k, v)
        return *results, *pull(cotangent)

    return value_and_gradient(blockwise_attention), value_and_gradient(partial(pallas_tpu_attention, interpret=True))


def inputs(seed, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    normal = lambda *shape, dtype=dtype: jnp.asarray(rng.normal(size=shape), dtype)
    q, k, v, d_out = (
        normal(SLOTS, HEADS, DIM),
        normal(SLOTS, KV, DIM),
        normal(SLOTS, KV, DIM),
        normal(SLOTS, HEADS, DIM),
    )
    return (q, k, v), (d_out, normal(SLOTS, HEADS, dtype=jnp.float32))


@pytest.mark.parametrize(("window", "dtype", "ulp"), [(None, jnp.float32, 2e-5), (20, jnp.bfloat16, 2**-7)])
def test_the_kernels_equal_blockwise_attention_in_value_and_gradient(row, window, dtype, ulp):
    for seed, used, reach in [(0, 220, 0.9), (1, 256, 1.0)]:
        qkv, cotangent = inputs(seed, dtype)
        mask = row_mask(row(seed, SLOTS, used, reach)[1])
        want, got = both(*qkv, mask, cotangent, window)
        for g, w in zip(got, want, strict=True):
            assert g.dtype == w.dtype
            np.testing.assert_allclose(np.asarray(g, np.float32), np.asarray(w, np.float32), atol=ulp, rtol=ulp)


def test_a_chain_has_tiles_that_need_no_mask_and_blocks_nobody_sees_give_zero():
    qkv, cotangent = inputs(3)
    mask = row_mask(np.full(SLOTS, SLOTS))
    # The first 32 queries see nothing, nor does anybody see the last 128 keys: no tile visits those blocks.
    t, hi = mask.t.at[:32].set(-1), mask.hi.at[128:].set(0)
    want, got = both(*qkv, mask._replace(t=t, hi=hi), cotangent, None)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, atol=2e-5, rtol=2e-5)
    out, logsum, dq, dk, dv = got
    assert not any(np.asarray(x[:32]).any() for x in (out, logsum, dq))
    assert not any(np.asarray(x[128:]).any() for x in (dk, dv))


@pytest.mark.parametrize(("dtype", "dim", "window"), [(jnp.bfloat16, 128, None), (jnp.bfloat16, 64, 128)])
def test_forward_and_backward_lower_for_tpu(dtype, dim, window):
    slots, heads, kv = 4096, 14, 2

    def value_and_gradient(q, k, v, end, cotangent):
        mask = row_mask(end)
        plan = make_plan(mask, window=window, block_q=128, block_k=256)
        out, pull = jax.vjp(lambda q, k, v: pallas_tpu_attention(q, k, v, mask, plan, scale=0.1)[0], q, k, v)
        return out, pull(cotangent)

    of = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, dtype)
    arguments = of(slots, heads, dim), of(slots, kv, dim), of(slots, kv, dim), of(slots, dtype=jnp.int32)
    exported = jax.export.export(jax.jit(value_and_gradient), platforms=["tpu"])(*arguments, of(slots, heads, dim))
    assert exported.mlir_module().count("tpu_custom_call") == 3  # forward, queries, keys and values
    assert [x.shape for x in exported.out_avals] == [arguments[0].shape, *(x.shape for x in arguments[:3])]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_q": 8}, r"the plan has blocks of 8 queries and 128 keys; wants multiples of 16 and 128"),
        ({"block_k": 64}, r"the plan has blocks of 16 queries and 64 keys; wants multiples of 16 and 128"),
        ({"dtype": jnp.float16}, r"wants f32 or bf16, got float16; cast q, k and v, or use 'blockwise'"),
        ({"slots": 65536}, r"a list of 2097152 tiles does not fit into scalar memory \(131072\); take larger blocks"),
    ],
)
def test_what_the_kernels_cannot_take_is_refused(change, message):
    how = {"block_q": 16, "block_k": 128, "dtype": jnp.bfloat16, "slots": 256} | change
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, how["dtype"])

    def attend(q, k, v, end):
        plan = make_plan(row_mask(end), block_q=how["block_q"], block_k=how["block_k"])
        return pallas_tpu_attention(q, k, v, row_mask(end), plan, scale=1.0)

    slots = how["slots"]
    with pytest.raises(ModelError, match=message):
        jax.eval_shape(
            attend,
            shape(slots, 2, 8),
            shape(slots, 1, 8),
            shape(slots, 1, 8),
            jax.ShapeDtypeStruct((slots,), jnp.int32),
        )
