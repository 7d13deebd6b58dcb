from contextlib import nullcontext
from functools import partial

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from harnessrl_jax.attention import (
    TreeMask,
    default_implementation,
    make_plan,
    plan_for,
    row_mask,
    tree_attention,
    visible,
)
from harnessrl_jax.errors import ModelError

SLOTS, HEADS, KV, DIM = 64, 4, 2, 8
WINDOW = 4


def arrays(seed, queries=SLOTS, keys=SLOTS, dtype=jnp.float32):
    """Queries, keys, values, sinks, and a cotangent of the output."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    q, k, v = normal(queries, HEADS, DIM), normal(keys, KV, DIM), normal(keys, KV, DIM)
    return q, k, v, normal(HEADS), normal(queries, HEADS, DIM)


def by_loops(q, k, v, sinks, mask, window=None):
    """The definition, one query and one head at a time, in float64; sinks None for none."""
    q, k, v, see = (np.asarray(x, np.float64) for x in (q, k, v, visible(mask, window)))
    rest = np.zeros(q.shape[1]) if sinks is None else np.exp(np.asarray(sinks, np.float64))
    out = np.zeros(q.shape)
    for i in range(q.shape[0]):
        keys = np.flatnonzero(see[i])
        for head in range(q.shape[1]):
            kv = head // (q.shape[1] // k.shape[1])
            weights = np.exp(DIM**-0.5 * k[keys, kv] @ q[i, head])
            out[i, head] = (weights / (weights.sum() + rest[head])) @ v[keys, kv] if len(keys) else 0.0
    return out


@partial(jax.jit, static_argnames=("window", "with_sinks"))
def both(q, k, v, sinks, cotangent, mask, window=None, with_sinks=False):
    """Value and gradients (q, k, v, sinks) of the dense and of the blockwise implementation."""

    def value_and_gradient(implementation, plan):
        how = {"implementation": implementation, "window": window}
        attend = lambda q, k, v, sinks: tree_attention(q, k, v, mask, plan, sinks=sinks if with_sinks else None, **how)
        out, pull = jax.vjp(attend, q, k, v, sinks)
        return out, *pull(cotangent)

    plan = make_plan(mask, window=window, block_q=16, block_k=8)
    return value_and_gradient("dense", None), value_and_gradient("blockwise", plan)


KINDS = pytest.mark.parametrize("kind", [{}, {"window": WINDOW, "with_sinks": True}], ids=["plain", "window and sinks"])


def assert_close(got, want, tolerance=2e-5):
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, atol=tolerance, rtol=tolerance)


@KINDS
@hypothesis.settings(max_examples=20)
@hypothesis.given(seed=st.integers(0, 10_000), used=st.integers(0, SLOTS), reach=st.sampled_from([0.0, 0.8, 1.0]))
def test_blockwise_equals_dense_in_value_and_gradient(row, kind, seed, used, reach):
    mask = row_mask(row(seed, SLOTS, used, reach)[1])
    dense, blockwise = both(*arrays(seed), mask, **kind)
    assert_close(blockwise, dense)


@KINDS
def test_both_follow_the_definition(row, kind):
    q, k, v, sinks, cotangent = arrays(1)
    mask = row_mask(row(1, SLOTS, 60)[1])
    want = by_loops(q, k, v, sinks if kind else None, mask, kind.get("window"))
    for out, *_ in both(q, k, v, sinks, cotangent, mask, **kind):
        np.testing.assert_allclose(out, want, atol=1e-5)


def test_gradients_match_finite_differences(row):
    with jax.enable_x64(True):
        *inputs, cotangent = arrays(2, dtype=jnp.float64)
        mask = row_mask(row(2, SLOTS, 60)[1])
        rng = np.random.default_rng(3)
        results = both(*inputs, cotangent, mask, window=WINDOW, with_sinks=True)
        for index, name in enumerate(["q", "k", "v", "sinks"]):
            step = rng.normal(size=inputs[index].shape)
            at = lambda eps, index=index, step=step: by_loops(
                *(x + eps * step if i == index else x for i, x in enumerate(inputs)), mask, WINDOW
            )
            want = np.vdot(at(1e-5) - at(-1e-5), cotangent) / 2e-5
            for _, *gradient in results:
                np.testing.assert_allclose(np.vdot(gradient[index], step), want, rtol=1e-7, err_msg=name)


def test_a_window_as_long_as_the_paths_and_sinks_at_minus_infinity_change_nothing():
    q, k, v, _, cotangent = arrays(8)
    end = (4 * np.arange(SLOTS // 4)[:, None] + np.array([4, 3, 3, 4])).reshape(-1)  # trees of depth 2
    for (*plain, _), (*wide, d_sinks) in zip(
        both(q, k, v, jnp.zeros(HEADS), cotangent, row_mask(end)),
        both(q, k, v, jnp.full(HEADS, -jnp.inf), cotangent, row_mask(end), window=WINDOW, with_sinks=True),
        strict=True,
    ):
        assert_close(wide, plain, 1e-6)
        assert not np.asarray(d_sinks).any()


def test_a_chain_with_a_window_is_sliding_window_attention():
    q, k, v, _, cotangent = arrays(9)
    want = jax.nn.dot_product_attention(
        q[None], k[None], v[None], is_causal=True, local_window_size=(WINDOW - 1, 0), implementation="xla"
    )[0]
    chain = row_mask(np.full(SLOTS, SLOTS))
    for out, *_ in both(q, k, v, jnp.full(HEADS, -jnp.inf), cotangent, chain, window=WINDOW, with_sinks=True):
        np.testing.assert_allclose(out, want, atol=1e-5)


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_bf16_inputs_are_summed_in_f32(implementation):
    # 1024 equal scores: a bf16 sum of weights would stop growing at 256
    slots, queries = 1024, 8
    zeros, ones = jnp.zeros((slots, 1, DIM), jnp.bfloat16), jnp.ones((slots, 1, DIM), jnp.bfloat16)
    t, index = jnp.full(queries, slots - 1), jnp.arange(slots)
    last = TreeMask(t, index, jnp.full(slots, slots))

    @jax.jit
    def value_and_gradient(q, k, v):
        out, pull = jax.vjp(lambda q, k, v: tree_attention(q, k, v, last, implementation=implementation), q, k, v)
        return out, pull(jnp.ones_like(out))[2]

    out, dv = value_and_gradient(zeros[:queries], zeros, ones)
    assert out.dtype == dv.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(out, np.float32), 1.0)
    np.testing.assert_allclose(np.asarray(dv, np.float32), queries / slots, rtol=0.01)


@KINDS
def test_the_place_of_a_token_in_memory_does_not_matter(row, kind):
    q, k, v, sinks, cotangent = arrays(4)
    mask = row_mask(row(4, SLOTS, SLOTS)[1])
    rng = np.random.default_rng(4)
    queries, keys = rng.permutation(SLOTS), rng.permutation(SLOTS)
    shuffled = TreeMask(mask.t[queries], mask.lo[keys], mask.hi[keys], mask.query_depth[queries], mask.key_depth[keys])
    _, (out, dq, dk, dv, d_sinks) = both(q, k, v, sinks, cotangent, mask, **kind)
    _, moved = both(q[queries], k[keys], v[keys], sinks, cotangent[queries], shuffled, **kind)
    assert_close(moved, (out[queries], dq[queries], dk[keys], dv[keys], d_sinks))


@KINDS
def test_a_query_that_sees_nothing_gets_zero_and_sends_nothing_back(row, kind):
    q, k, v, sinks, cotangent = arrays(5)
    mask = row_mask(row(5, SLOTS, SLOTS)[1])
    blind = jnp.arange(SLOTS) % 3 == 0  # scattered among seeing queries: inside tiles that are visited
    mask = mask._replace(t=jnp.where(blind, -5, mask.t))
    for out, dq, *others in both(100.0 * q, k, v, sinks, cotangent, mask, **kind):
        assert not np.asarray(out[blind]).any()
        assert not np.asarray(dq[blind]).any()
        assert all(np.isfinite(x).all() for x in (out, dq, *others))
    dense, blockwise = both(q, k, v, sinks, cotangent, mask, **kind)
    assert_close(blockwise, dense)
    nobody = mask._replace(t=jnp.full(SLOTS, -5))
    for results in both(q, k, v, sinks, cotangent, nobody, **kind):
        assert not any(np.asarray(x).any() for x in results)


def test_what_is_not_visible_is_not_read(row):
    q, k, v, sinks, cotangent = arrays(6)
    mask = row_mask(row(6, SLOTS, 40)[1])
    clean = both(q, k, v, sinks, cotangent, mask)
    pads = jnp.arange(SLOTS)[:, None, None] >= 40
    spoiled = both(q, jnp.where(pads, 1e4, k), jnp.where(pads, -1e4, v), sinks, cotangent, mask)
    for one, other in zip(clean, spoiled, strict=True):
        for x, y in zip(one[:4], other[:4], strict=True):
            np.testing.assert_array_equal(x[:40], y[:40])


@jax.jit
def rows_and_gradients(q, k, v, ends, cotangent):
    """Values of all rows, and their gradients under two cotangents at once."""
    attend = lambda q, k, v, end: tree_attention(
        q, k, v, row_mask(end), make_plan(row_mask(end), block_q=16, block_k=8)
    )
    out, pull = jax.vjp(lambda q, k, v: jax.vmap(attend)(q, k, v, ends), q, k, v)
    return out, jax.vmap(pull)(jnp.stack([cotangent, -2.0 * cotangent]))


@pytest.mark.parametrize("mesh_in_context", [False, True])
def test_rows_of_a_batch_get_their_own_result_and_stay_on_their_devices(row, mesh_in_context):
    ends = jnp.stack([jnp.asarray(row(seed, SLOTS, 20 + 4 * seed)[1]) for seed in range(8)])
    q, k, v, _, cotangent = (jnp.stack(x) for x in zip(*(arrays(seed) for seed in range(8)), strict=True))
    inputs = (q, k, v, ends, cotangent)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    spec = lambda x: PartitionSpec("data", None, "tensor") if x.ndim == 4 else PartitionSpec("data")
    inputs = tuple(jax.device_put(x, NamedSharding(mesh, spec(x))) for x in inputs)
    with jax.set_mesh(mesh) if mesh_in_context else nullcontext():
        lowered = rows_and_gradients.lower(*inputs)
    assert ("CustomSPMDPartitioning" in lowered.as_text()) != mesh_in_context  # TPUs have none
    compiled = lowered.compile()
    assert not [word for word in ("all-gather", "all-to-all", "collective-permute") if word in compiled.as_text()]
    out, gradients = jax.tree.map(np.asarray, compiled(*inputs))
    q, k, v, ends, cotangent = map(np.asarray, inputs)
    for i in range(8):
        _, (*alone, _) = both(q[i], k[i], v[i], jnp.zeros(HEADS), cotangent[i], row_mask(ends[i]))
        assert_close((out[i], *(x[0, i] for x in gradients)), alone)
        assert_close([x[1, i] for x in gradients], [-2.0 * x for x in alone[1:]], 5e-5)


def test_no_array_grows_with_the_square_of_the_row(row):
    slots = 512
    q, k, v, _, cotangent = arrays(7, slots, slots)
    loss = lambda q, k, v, end: jnp.vdot(tree_attention(q, k, v, row_mask(end)), cotangent)
    text = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v, jnp.full(slots, slots)))
    assert f"[{slots},{slots}]" not in text
    assert f"{slots},{HEADS},{DIM}" in text  # the text does hold shapes


def test_the_platform_chooses_where_nobody_does(row, monkeypatch):
    q, k, v, _, _ = arrays(10)
    mask = row_mask(row(10, SLOTS, 60)[1])
    text = lambda implementation: str(
        jax.make_jaxpr(lambda q, k, v: tree_attention(q, k, v, mask, implementation=implementation))(q, k, v)
    )
    assert default_implementation() == "blockwise"
    assert plan_for(mask).blocks == make_plan(mask).blocks
    assert plan_for(mask, implementation="dense") is None
    assert f"{SLOTS},{SLOTS}]" not in text(None)
    assert f"{SLOTS},{SLOTS}]" in text("dense")
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert default_implementation() == "pallas_tpu"
    assert plan_for(row_mask(np.full(512, 512))).blocks == (4, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"k": (SLOTS, 3, DIM), "v": (SLOTS, 3, DIM)},
            r"the key-value heads must divide the heads, got q \[64, 4, 8\]",
        ),
        ({"v": (SLOTS, KV, 4)}, r"wants q \[query, head, dim\] and k, v \[key, kv, dim\], got .*v \[64, 2, 4\]"),
        ({"q": (32, HEADS, DIM)}, r"the mask is for \(t, lo, hi\) of lengths \(64, 64, 64\), got q \[32, 4, 8\]"),
        ({"sinks": (KV,)}, r"wants one sink a head, got sinks \[2\] with q \[64, 4, 8\]"),
        ({"window": 0}, r"window is 0; give at least 1"),
        ({"plan": 3, "window": 4}, r"window is 4, the plan was made for 3; make one plan for each window"),
        ({"plan": 3}, r"window is None, the plan was made for 3"),
        ({"implementation": "flash"}, r"implementation is 'flash'; use 'blockwise', 'pallas_tpu', 'pallas_gpu' or"),
    ],
)
def test_wrong_arguments_are_named(row, change, message):
    shapes = {"q": (SLOTS, HEADS, DIM), "k": (SLOTS, KV, DIM), "v": (SLOTS, KV, DIM)} | change
    mask, how = (
        row_mask(row(0, SLOTS, 60)[1]),
        {name: shapes.pop(name) for name in ("implementation", "window") if name in shapes},
    )
    plan = make_plan(mask, window=shapes.pop("plan")) if "plan" in shapes else None
    arguments = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    with pytest.raises(ModelError, match=message):
        tree_attention(**arguments, mask=mask, plan=plan, **how)
