import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from harnessrl_jax.models import init_params, row_hidden, target_logps
from harnessrl_jax.trajectories import trees

SLOTS, TARGETS, LONGEST = 64, 64, 14  # four sequences of 14 tokens always fit


def rotate_half(x):
    return np.concatenate([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1)


def norm(x, scale, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def by_hand(c, params, tokens):
    """One sequence through the decoder in float64 NumPy, in the words of the Hugging Face implementation.

    Returns the normed hidden states, and the input of every down projection.
    """
    params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    n = len(tokens)
    inverse = 1.0 / c.rope_theta ** (np.arange(0, c.head_dim, 2) / c.head_dim)
    angles = np.tile(np.arange(n)[:, None] * inverse, 2)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    x, units = params["embed"]["embedding"][tokens], []
    for i in range(c.layers):
        layer = params[f"layers_{i}"]
        attn, mlp = layer["attn"], layer["mlp"]
        h = norm(x, layer["input_norm"]["scale"], c.rms_eps)
        q, k, v = ((h @ attn[name]["kernel"] + attn[name]["bias"]).reshape(n, -1, c.head_dim) for name in "qkv")
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        k, v = np.repeat(k, c.heads // c.kv_heads, 1), np.repeat(v, c.heads // c.kv_heads, 1)
        scores = np.einsum("nhd,mhd->hnm", q, k) / np.sqrt(c.head_dim)
        weights = np.where(np.tri(n, dtype=bool), np.exp(scores), 0.0)
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("hnm,mhd->nhd", weights, v).reshape(n, -1) @ attn["o"]["kernel"]
        h = norm(x, layer["post_norm"]["scale"], c.rms_eps)
        gate, up = h @ mlp["gate"]["kernel"], h @ mlp["up"]["kernel"]
        units.append(gate / (1.0 + np.exp(-gate)) * up)
        x = x + units[-1] @ mlp["down"]["kernel"]
    return norm(x, params["final_norm"]["scale"], c.rms_eps), units


def padded(values, length, fill=0):
    return np.concatenate([values, np.full(length - len(values), fill)]).astype(np.int32)


def laid_out(tree, paths, weights):
    """A row, and every step of every path as a target of its own: the arguments of `row_gradients`."""
    nodes = len(tree.token)
    end = np.concatenate([tree.subtree_end, np.arange(nodes, SLOTS) + 1]).astype(np.int32)
    source = padded(np.concatenate([path[:-1] for path in paths]), TARGETS)
    target = padded(np.concatenate([tree.token[path[1:]] for path in paths]), TARGETS)
    weight = np.zeros(TARGETS, np.float32)
    weight[: len(weights)] = weights
    return padded(tree.token, SLOTS), padded(tree.depth, SLOTS), end, source, target, weight


def loss_of(config, implementation, *, remat):
    """Weighted log-probability of the targets of a row, and the log-probabilities."""

    def loss(params, token, position, subtree_end, source, target, weight):
        how = {"implementation": implementation, "block": 16, "remat": remat}
        hidden, _ = row_hidden(config, params, token, position, subtree_end, **how)
        logp, _ = target_logps(config, params, hidden, source, target, chunk=24)
        return jnp.vdot(weight, logp), logp

    return jax.value_and_grad(loss, has_aux=True)


@pytest.fixture(scope="session")
def row_gradients(config, params):
    """((loss, log-probabilities), gradient) of a row, by implementation."""

    def compiled(implementation, *, remat):
        run = jax.jit(loss_of(config, implementation, remat=remat))
        return lambda *row: jax.device_get(run(params, *row))

    return {"blockwise": compiled("blockwise", remat="none"), "dense": compiled("dense", remat="attention")}


def assert_trees_close(got, want, tolerance):
    for (path, g), w in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        scale = max(np.abs(w).max(), 1.0)
        np.testing.assert_allclose(g / scale, w / scale, atol=tolerance, err_msg=jax.tree_util.keystr(path))


def random_sequences(seed):
    """Four sequences that share prefixes: each continues a random part of an earlier one."""
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, 40, LONGEST)]
    for _ in range(3):
        start = sequences[rng.integers(len(sequences))]
        start = start[: rng.integers(0, len(start) + 1)]
        sequences.append(np.concatenate([start, rng.integers(0, 40, rng.integers(2, LONGEST))])[:LONGEST])
    return sequences, rng


@hypothesis.settings(max_examples=10)
@hypothesis.given(seed=st.integers(0, 10_000))
def test_a_packed_tree_gives_what_its_paths_give_alone(row_gradients, seed):
    sequences, rng = random_sequences(seed)
    weights = [rng.normal(size=len(s) - 1).astype(np.float32) for s in sequences]
    tree, leaf = trees.build(sequences)
    paths = [trees.path(tree, int(node)) for node in leaf]
    packed = laid_out(tree, paths, np.concatenate(weights))
    alone = [laid_out(*_single(s), w) for s, w in zip(sequences, weights, strict=True)]
    counts = np.cumsum([0] + [len(w) for w in weights])
    for compiled in row_gradients.values():
        (_, logp), gradient = compiled(*packed)
        results = [compiled(*arguments) for arguments in alone]
        for i, ((_, own), _) in enumerate(results):
            np.testing.assert_allclose(logp[counts[i] : counts[i + 1]], own[: len(weights[i])], atol=2e-5)
        total = jax.tree.map(lambda *g: sum(g), *(g for _, g in results))
        assert_trees_close(gradient, total, 2e-5)


def _single(sequence):
    tree, leaf = trees.build([sequence])
    return tree, [trees.path(tree, int(leaf[0]))]


def test_values_by_hand(config, params):
    tokens = np.random.default_rng(1).integers(0, 40, 9)
    tree, _ = trees.build([tokens])
    run = jax.jit(lambda *row: row_hidden(config, params, *row, collect="hidden"))
    hidden, units = run(tree.token, tree.depth, tree.subtree_end)
    want, want_units = by_hand(config, params, tokens)
    np.testing.assert_allclose(hidden, want, atol=1e-5)
    assert len(units) == config.layers
    for got, unit in zip(units, want_units, strict=True):
        np.testing.assert_allclose(got, unit, atol=1e-5, rtol=2e-6)  # they reach 10; float32 has 7 digits


def test_a_row_of_padding_is_finite(row_gradients):
    nothing = np.zeros(SLOTS, np.int32)
    row = (nothing, nothing, np.arange(SLOTS, dtype=np.int32) + 1)
    targets = (np.zeros(TARGETS, np.int32), np.zeros(TARGETS, np.int32), np.ones(TARGETS, np.float32))
    for compiled in row_gradients.values():
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(compiled(*row, *targets)))


def test_padding_does_not_touch_the_trees(config, params):
    tree, _ = trees.build(random_sequences(3)[0])
    nodes = len(tree.token)
    end = np.concatenate([tree.subtree_end, np.arange(nodes, SLOTS) + 1]).astype(np.int32)
    run = jax.jit(lambda token, position: row_hidden(config, params, token, position, end, block=16)[0])
    clean = run(padded(tree.token, SLOTS), padded(tree.depth, SLOTS))
    other = run(padded(tree.token, SLOTS, 39), padded(tree.depth, SLOTS, 7))
    np.testing.assert_array_equal(clean[:nodes], other[:nodes])
    assert (np.asarray(clean[nodes:]) != np.asarray(other[nodes:])).any()


def test_rows_and_parameters_sharded_over_a_mesh_give_the_same(config, params, row_gradients):
    sequences, _ = random_sequences(5)
    tree, leaf = trees.build(sequences)
    paths = [trees.path(tree, int(node)) for node in leaf]
    row = laid_out(tree, paths, np.ones(sum(len(path) - 1 for path in paths)))
    rows = tuple(np.stack([x, x, x, x]) for x in row)
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    kernel = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
    place = jax.tree.map(lambda p: kernel if p.ndim == 2 else NamedSharding(mesh, PartitionSpec()), params)
    over_rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    batched = jax.vmap(loss_of(config, "blockwise", remat="none"), in_axes=(None,) + (0,) * 6)
    step = jax.jit(batched, in_shardings=(place, *[over_rows] * 6))
    (value, _), gradient = step(jax.device_put(params, place), *jax.device_put(rows, over_rows))
    (want, _), want_gradient = row_gradients["blockwise"](*row)
    np.testing.assert_allclose(value, np.full(4, want), rtol=1e-5)
    assert_trees_close(jax.tree.map(lambda g: g[2], gradient), want_gradient, 2e-5)


def test_initial_parameters_have_the_documented_names_and_repeat(config):
    create = jax.jit(lambda key: init_params(config, key))
    params = create(jax.random.key(7))
    assert type(params) is dict
    names = {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(params)}
    layer = {"attn/o/kernel", "input_norm/scale", "post_norm/scale"}
    layer |= {f"attn/{name}/{kind}" for name in "qkv" for kind in ("kernel", "bias")}
    layer |= {f"mlp/{name}/kernel" for name in ("gate", "up", "down")}
    assert names == {"embed/embedding", "final_norm/scale"} | {f"layers_{i}/{n}" for i in range(2) for n in layer}
    assert params["layers_0"]["mlp"]["down"]["kernel"].shape == (24, 16)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))
    jax.tree.map(np.testing.assert_array_equal, params, create(jax.random.key(7)))
    assert (params["embed"]["embedding"] != create(jax.random.key(8))["embed"]["embedding"]).any()
