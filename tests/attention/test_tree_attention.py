import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from harnessrl_jax.attention import TreeMask, make_plan, row_mask, tree_attention, visible
from harnessrl_jax.errors import ModelError

SLOTS, HEADS, KV, DIM = 64, 4, 2, 8


def arrays(seed, queries=SLOTS, keys=SLOTS):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    q, k, v = normal(queries, HEADS, DIM), normal(keys, KV, DIM), normal(keys, KV, DIM)
    return q, k, v, normal(queries, HEADS, DIM)


def by_loops(q, k, v, mask, scale):
    """The definition, one query and one head at a time, in float64."""
    q, k, v, see = (np.asarray(x, np.float64) for x in (q, k, v, visible(mask)))
    out = np.zeros(q.shape)
    for i in range(q.shape[0]):
        keys = np.flatnonzero(see[i])
        for head in range(q.shape[1]):
            kv = head // (q.shape[1] // k.shape[1])
            weights = np.exp(scale * k[keys, kv] @ q[i, head]) if len(keys) else np.ones(0)
            out[i, head] = (weights / weights.sum()) @ v[keys, kv] if len(keys) else 0.0
    return out


@jax.jit
def both(q, k, v, mask, cotangent):
    """Value and gradients of the dense and of the blockwise implementation."""

    def value_and_gradient(implementation, plan):
        attend = lambda q, k, v: tree_attention(q, k, v, mask, plan, implementation=implementation)
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(cotangent)

    plan = make_plan(mask, block_q=16, block_k=8)
    return value_and_gradient("dense", None), value_and_gradient("blockwise", plan)


def assert_close(got, want, tolerance=2e-5):
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, atol=tolerance, rtol=tolerance)


@hypothesis.settings(max_examples=20)
@hypothesis.given(seed=st.integers(0, 10_000), used=st.integers(0, SLOTS), reach=st.sampled_from([0.0, 0.8, 1.0]))
def test_blockwise_equals_dense_in_value_and_gradient(row, seed, used, reach):
    mask = row_mask(row(seed, SLOTS, used, reach)[1])
    dense, blockwise = both(*arrays(seed)[:3], mask, arrays(seed)[3])
    assert_close(blockwise, dense)


def test_both_follow_the_definition(row):
    q, k, v, cotangent = arrays(1)
    mask = row_mask(row(1, SLOTS, 60)[1])
    want = by_loops(q, k, v, mask, DIM**-0.5)
    for out, *_ in both(q, k, v, mask, cotangent):
        np.testing.assert_allclose(out, want, atol=1e-5)


def test_gradients_match_finite_differences(row):
    q, k, v, cotangent = arrays(2)
    mask = row_mask(row(2, SLOTS, 60)[1])
    step = jax.tree.map(lambda x: jnp.asarray(np.random.default_rng(3).normal(size=x.shape), x.dtype), (q, k, v))
    value = lambda eps: np.vdot(
        by_loops(*(np.asarray(x, np.float64) + eps * np.asarray(d) for x, d in zip((q, k, v), step)), mask, DIM**-0.5),
        cotangent,
    )
    want = (value(1e-5) - value(-1e-5)) / 2e-5
    for _, *gradient in both(q, k, v, mask, cotangent):
        got = sum(np.vdot(g, d) for g, d in zip(gradient, step, strict=True))
        np.testing.assert_allclose(got, want, rtol=1e-4)


def test_the_place_of_a_token_in_memory_does_not_matter(row):
    q, k, v, cotangent = arrays(4)
    mask = row_mask(row(4, SLOTS, SLOTS)[1])
    rng = np.random.default_rng(4)
    queries, keys = rng.permutation(SLOTS), rng.permutation(SLOTS)
    shuffled = TreeMask(mask.t[queries], mask.lo[keys], mask.hi[keys])
    _, (out, dq, dk, dv) = both(q, k, v, mask, cotangent)
    _, moved = both(q[queries], k[keys], v[keys], shuffled, cotangent[queries])
    assert_close(moved, (out[queries], dq[queries], dk[keys], dv[keys]))


def test_a_query_that_sees_nothing_gets_zero_and_sends_nothing_back(row):
    q, k, v, cotangent = arrays(5)
    mask = row_mask(row(5, SLOTS, SLOTS)[1])
    blind = jnp.arange(SLOTS) % 3 == 0  # scattered among seeing queries: inside tiles that are visited
    mask = mask._replace(t=jnp.where(blind, -5, mask.t))
    for out, dq, dk, dv in both(100.0 * q, k, v, mask, cotangent):
        assert not np.asarray(out[blind]).any()
        assert not np.asarray(dq[blind]).any()
        assert all(np.isfinite(x).all() for x in (out, dq, dk, dv))
    dense, blockwise = both(q, k, v, mask, cotangent)
    assert_close(blockwise, dense)


def test_what_is_not_visible_is_not_read(row):
    q, k, v, cotangent = arrays(6)
    mask = row_mask(row(6, SLOTS, 40)[1])
    clean = both(q, k, v, mask, cotangent)
    pads = jnp.arange(SLOTS)[:, None, None] >= 40
    spoiled = both(q, jnp.where(pads, 1e4, k), jnp.where(pads, -1e4, v), mask, cotangent)
    for (out, dq, dk, dv), (out_s, dq_s, dk_s, dv_s) in zip(clean, spoiled, strict=True):
        np.testing.assert_array_equal(out[:40], out_s[:40])
        np.testing.assert_array_equal(dq[:40], dq_s[:40])
        np.testing.assert_array_equal(dk[:40], dk_s[:40])
        np.testing.assert_array_equal(dv[:40], dv_s[:40])


def rows_of(row, count):
    """Several rows at once, and a function of them all whose gradient is a gradient per row."""
    ends = jnp.stack([jnp.asarray(row(seed, SLOTS, 20 + 4 * seed)[1]) for seed in range(count)])
    inputs = [jnp.stack(x) for x in zip(*(arrays(seed) for seed in range(count)), strict=True)]
    attend = lambda q, k, v, end: tree_attention(
        q, k, v, row_mask(end), make_plan(row_mask(end), block_q=16, block_k=8)
    )
    return inputs, ends, jax.vmap(attend)


@jax.jit
def rows_and_gradients(q, k, v, ends, cotangent):
    """Values of all rows, and their gradients under two cotangents at once."""
    attend = lambda q, k, v, end: tree_attention(
        q, k, v, row_mask(end), make_plan(row_mask(end), block_q=16, block_k=8)
    )
    out, pull = jax.vjp(lambda q, k, v: jax.vmap(attend)(q, k, v, ends), q, k, v)
    return out, jax.vmap(pull)(jnp.stack([cotangent, -2.0 * cotangent]))


@pytest.mark.parametrize("sharded", [False, True])
def test_rows_of_a_batch_get_their_own_result_and_stay_on_their_devices(row, sharded):
    ends = jnp.stack([jnp.asarray(row(seed, SLOTS, 20 + 4 * seed)[1]) for seed in range(8)])
    q, k, v, cotangent = (jnp.stack(x) for x in zip(*(arrays(seed) for seed in range(8)), strict=True))
    inputs = (q, k, v, ends, cotangent)
    if sharded:
        mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
        spec = lambda x: PartitionSpec("data", None, "tensor") if x.ndim == 4 else PartitionSpec("data")
        inputs = tuple(jax.device_put(x, NamedSharding(mesh, spec(x))) for x in inputs)
    compiled = rows_and_gradients.lower(*inputs).compile()
    assert not [word for word in ("all-gather", "all-to-all", "collective-permute") if word in compiled.as_text()]
    out, gradients = jax.tree.map(np.asarray, compiled(*inputs))
    q, k, v, ends, cotangent = map(np.asarray, inputs)
    for i in range(8):
        _, alone = both(q[i], k[i], v[i], row_mask(ends[i]), cotangent[i])
        assert_close((out[i], *(x[0, i] for x in gradients)), alone)
        assert_close([x[1, i] for x in gradients], [-2.0 * x for x in alone[1:]], 5e-5)


def test_no_array_grows_with_the_square_of_the_row(row):
    slots = 512
    q, k, v, cotangent = arrays(7, slots, slots)
    loss = lambda q, k, v, end: jnp.vdot(tree_attention(q, k, v, row_mask(end)), cotangent)
    text = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v, jnp.full(slots, slots)))
    assert f"[{slots},{slots}]" not in text
    assert f"{slots},{HEADS},{DIM}" in text  # the text does hold shapes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"k": (SLOTS, 3, DIM), "v": (SLOTS, 3, DIM)},
            r"the key-value heads must divide the heads, got q \[64, 4, 8\]",
        ),
        ({"v": (SLOTS, KV, 4)}, r"wants q \[query, head, dim\] and k, v \[key, kv, dim\], got .*v \[64, 2, 4\]"),
        ({"q": (32, HEADS, DIM)}, r"the mask is for \(t, lo, hi\) of lengths \(64, 64, 64\), got q \[32, 4, 8\]"),
        ({"implementation": "flash"}, r"implementation is 'flash'; use 'blockwise' or 'dense'\."),
    ],
)
def test_wrong_arguments_are_named(row, change, message):
    shapes = {"q": (SLOTS, HEADS, DIM), "k": (SLOTS, KV, DIM), "v": (SLOTS, KV, DIM)} | change
    how = {"implementation": shapes.pop("implementation", "blockwise")}
    q, k, v = (jnp.zeros(shapes[name]) for name in "qkv")
    with pytest.raises(ModelError, match=message):
        tree_attention(q, k, v, row_mask(row(0, SLOTS, 60)[1]), **how)
