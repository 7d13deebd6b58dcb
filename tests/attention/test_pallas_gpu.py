"""The GPU kernels: their meaning in Pallas' interpreter, and that they lower for the real platform."""

import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import callback
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax.sharding import AxisType

from harnessrl_jax.attention import default_implementation, make_plan, plan_for, row_mask, tile_full, tree_attention
from harnessrl_jax.attention.blockwise import blockwise_attention
from harnessrl_jax.attention.pallas_gpu import pallas_gpu_attention
from harnessrl_jax.errors import ModelError

SLOTS, HEADS, KV, DIM, WINDOW = 256, 4, 2, 16, 100
BLOCK_Q, BLOCK_K = 128, 64  # so two warpgroups share a block of queries, and one has a block of keys
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""The interpreter's programs are run once or twice."""


@pytest.fixture(scope="module")
def interpreter():
    """Pallas' GPU interpreter, ten times as fast as it comes.

    It compiles each thread of each block anew: here what it has compiled is kept. And each of its calls into Python
    puts NumPy's arrays on a device first, which its functions do not need.
    """
    compiled, lock = {}, threading.Lock()

    def run(jaxpr, constants, *arguments):
        with lock:
            if jaxpr not in compiled:
                whole = jax.jit(lambda constants, *rest: jax.core.eval_jaxpr(jaxpr, constants, *rest))
                compiled[jaxpr] = whole.lower(constants, *arguments).compile(compiler_options=FAST)
        jax.block_until_ready(compiled[jaxpr](constants, *arguments))

    def call(*arguments, callback, **_):
        return jax.tree.map(np.asarray, callback(*arguments))

    # A mesh in context takes the place of custom partitioning, which has no effects such as the interpreter's.
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    with pytest.MonkeyPatch.context() as patch, jax.set_mesh(mesh):
        patch.setattr(thread_map, "_run_jaxpr", run)
        patch.setattr(callback, "io_callback_impl", call)
        yield InterpretGPUParams()


def value_and_gradient(attend):
    """Output and log-sum-exp with their gradients."""

    @partial(jax.jit, compiler_options=FAST)
    def run(q, k, v, mask, cotangent):
        plan = make_plan(mask, window=WINDOW, block_q=BLOCK_Q, block_k=BLOCK_K)
        results, pull = jax.vjp(lambda q, k, v: attend(q, k, v, mask, plan, scale=0.3), q, k, v)
        return *results, *pull(cotangent)

    return run


def test_the_kernels_equal_blockwise_attention_in_value_and_gradient(row, interpreter):
    rng = np.random.default_rng(0)
    normal = lambda *shape, dtype=jnp.bfloat16: jnp.asarray(rng.normal(size=shape), dtype)
    qkv = normal(SLOTS, HEADS, DIM), normal(SLOTS, KV, DIM), normal(SLOTS, KV, DIM)
    cotangent = normal(SLOTS, HEADS, DIM), normal(SLOTS, HEADS, dtype=jnp.float32)
    blockwise = value_and_gradient(blockwise_attention)
    kernels = value_and_gradient(partial(pallas_gpu_attention, interpret=interpreter))
    # A chain longer than the window; from its 64th token on, also trees, for which the first keys are a tile without a
    # mask. Then nobody sees the last keys, and the first queries see none: no tile visits those blocks.
    end = np.full(SLOTS, SLOTS)
    end[BLOCK_K:BLOCK_Q] = BLOCK_Q
    end[BLOCK_Q:] = BLOCK_Q + row(1, SLOTS - BLOCK_Q, SLOTS - BLOCK_Q, 0.6)[1]
    chain = row_mask(end)
    blind = chain._replace(t=chain.t.at[:BLOCK_Q].set(-1), hi=chain.hi.at[-BLOCK_K:].set(0))
    assert tile_full(make_plan(chain, window=WINDOW, block_q=BLOCK_Q, block_k=BLOCK_K).by_query).any()
    for mask in (chain, blind):
        want, got = (run(*qkv, mask, cotangent) for run in (blockwise, kernels))
        for g, w in zip(got, want, strict=True):
            assert g.dtype == w.dtype
            np.testing.assert_allclose(np.asarray(g, np.float32), np.asarray(w, np.float32), atol=2**-7, rtol=2**-7)
    out, logsum, dq, dk, dv = got
    assert not any(np.asarray(x[:BLOCK_Q]).any() for x in (out, logsum, dq))
    assert not any(np.asarray(x[-BLOCK_K:]).any() for x in (dk, dv))


@pytest.mark.parametrize(("dim", "window"), [(128, None), (64, 128)])
def test_forward_and_backward_lower_for_cuda(dim, window):
    slots, heads, kv = 4096, 14, 2

    def run(q, k, v, end, cotangent):
        mask = row_mask(end)
        plan = plan_for(mask, window=window, implementation="pallas_gpu")
        attend = partial(tree_attention, implementation="pallas_gpu", window=window)
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, mask, plan), q, k, v)
        return out, pull(cotangent)

    of = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)
    arguments = of(slots, heads, dim), of(slots, kv, dim), of(slots, kv, dim), of(slots, dtype=jnp.int32)
    exported = jax.export.export(jax.jit(run), platforms=["cuda"])(*arguments, of(slots, heads, dim))
    assert exported.mlir_module().count("@mosaic_gpu_v2") == 3  # forward, queries, keys and values
    assert [x.shape for x in exported.out_avals] == [arguments[0].shape, *(x.shape for x in arguments[:3])]
    assert f"{slots}x{slots}" not in exported.mlir_module()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_q": 32}, r"the plan has blocks of 32 queries and 64 keys; wants 64 or 128"),
        ({"block_k": 256}, r"the plan has blocks of 64 queries and 256 keys; wants 64 or 128"),
        (
            {"dtype": jnp.float32},
            r"wants bf16 or f16 throughout, got q float32 and k float32; cast them, or use 'block",
        ),
        ({"dim": 192}, r"wants heads of at most 128, got 192; use 'blockwise'"),
    ],
)
def test_what_the_kernels_cannot_take_is_refused_by_them_and_blockwise_in_the_interface(change, message):
    how = {"block_q": 64, "block_k": 64, "dtype": jnp.bfloat16, "dim": 64} | change
    shape = lambda heads: jax.ShapeDtypeStruct((256, heads, how["dim"]), how["dtype"])
    arguments = shape(2), shape(1), shape(1), jax.ShapeDtypeStruct((256,), jnp.int32)

    def run(attend, q, k, v, end):
        plan = make_plan(row_mask(end), block_q=how["block_q"], block_k=how["block_k"])
        return attend(q, k, v, row_mask(end), plan, scale=1.0)

    with pytest.raises(ModelError, match=message):
        jax.eval_shape(partial(run, pallas_gpu_attention), *arguments)
    traced = jax.make_jaxpr(partial(run, partial(tree_attention, implementation="pallas_gpu")))(*arguments)
    assert "forward_kernel" not in str(traced)


@pytest.mark.parametrize(
    ("capability", "implementation"), [("9.0", "pallas_gpu"), ("8.9", "blockwise"), ("10.0", "blockwise")]
)
def test_only_hopper_gpus_get_the_kernels(monkeypatch, capability, implementation):
    device = type("Device", (), {"compute_capability": capability})()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert default_implementation() == implementation


@pytest.mark.parametrize(("slots", "blocks"), [(512, (4, 4)), (192, (3, 3)), (32, (1, 1))])
def test_blocks_fit_rows_of_a_multiple_of_64_and_short_ones(slots, blocks):
    plan = lambda end: plan_for(row_mask(end), implementation="pallas_gpu")
    assert jax.eval_shape(plan, jax.ShapeDtypeStruct((slots,), jnp.int32)).blocks == blocks
