"""A tiny decoder-shaped model and small packed batches whose padding is poisoned with NaN."""

import dataclasses
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harnessrl_jax.capo import decoder_units, default
from harnessrl_jax.training import Policy, RowOutput
from harnessrl_jax.trajectories import PackedBatch, Role, Targets, build, pack

VOCAB, HIDDEN, UNITS = 16, 8, 8


def toy_params(dtype=np.float32, layers=2):
    rng = np.random.default_rng(0)
    normal = lambda *shape: (rng.normal(size=shape) * shape[0] ** -0.5).astype(dtype)
    layer = lambda: {
        "attn": {"o": {"kernel": normal(HIDDEN, HIDDEN)}},
        "mlp": {
            "gate": {"kernel": normal(HIDDEN, UNITS)},
            "up": {"kernel": normal(HIDDEN, UNITS)},
            "down": {"kernel": normal(UNITS, HIDDEN)},
        },
    }
    params = {f"layers_{i}": layer() for i in range(layers)}
    params["embed"] = {"embedding": normal(VOCAB, HIDDEN)}
    params["final_norm"] = {"scale": np.ones(HIDDEN, dtype)}
    return jax.tree.map(jnp.asarray, params)


def toy_row_fn(params, row):
    """Embedding, layers of tree-causal averaging and a gated MLP, tied output."""
    i = jnp.arange(row.token.shape[0])
    sees = (i[None] <= i[:, None]) & (i[:, None] < row.subtree_end[None])
    x = params["embed"]["embedding"][row.token]
    mix = sees.astype(x.dtype) / sees.sum(1, keepdims=True)
    units = []
    for layer in (params[name] for name in sorted(params) if name.startswith("layers_")):
        x = x + mix @ x @ layer["attn"]["o"]["kernel"]
        hidden = jax.nn.silu(x @ layer["mlp"]["gate"]["kernel"]) * (x @ layer["mlp"]["up"]["kernel"])
        units.append(hidden[row.source])
        x = x + hidden @ layer["mlp"]["down"]["kernel"]
    x = x[row.source] * params["final_norm"]["scale"][None]
    every = jax.nn.log_softmax(x @ params["embed"]["embedding"].T)
    logp = jnp.take_along_axis(every, row.target[:, None], axis=1)[:, 0]
    return RowOutput(logp, -(jnp.exp(every) * every).sum(-1), tuple(units))


def toy_batch(rows=4, max_rows=8, slots=8, targets=6, seed=0, missing=0.0):
    """`rows` rows of one path each; a call and a rollout a row; the rest is padding with NaN where floats stand."""
    rng = np.random.default_rng(seed)
    shape, ends = (max_rows, targets), np.broadcast_to(np.arange(1, slots + 1), (max_rows, slots)).copy()
    used = (np.arange(max_rows) < rows)[:, None] & (np.arange(targets) < targets - 1)[None]
    ends[:rows] = slots
    row = np.broadcast_to(np.arange(max_rows)[:, None], shape)
    has_logp = used & (rng.random(shape) >= missing)
    floats = lambda values, read: np.where(read, values, np.nan).astype(np.float32)
    return PackedBatch(
        token=rng.integers(0, VOCAB, (max_rows, slots)).astype(np.int32),
        position=np.broadcast_to(np.arange(slots), (max_rows, slots)).astype(np.int32),
        subtree_end=ends.astype(np.int32),
        source=np.broadcast_to(np.arange(targets) + 1, shape).astype(np.int32),
        target=rng.integers(0, VOCAB, shape).astype(np.int32),
        logp_behaviour=floats(rng.uniform(-3.5, -2.0, shape), has_logp),
        has_logp=has_logp,
        advantage=floats(np.where(row % 2 == 0, 1.0, -0.5) + 0.25 * rng.normal(size=shape), used),
        role=np.where(used, rng.permuted(np.tile([1, 2, 2, 2, 3, 3], (max_rows, 1)), axis=1)[:, :targets], 0).astype(
            np.int8
        ),
        weight=np.where(used, np.where(row % 3 == 0, 0.5, 1.0), 0).astype(np.float32),
        success=used & (row % 4 != 1),
        call=np.where(used, row + 10, -1).astype(np.int32),
        rollout=np.where(used, row // 2 + 100, -1).astype(np.int32),
    )


def packed_trees(vocabulary, *, row_slots, row_targets, max_rows, seed=0):
    """(batch, rows used) of four trees of three calls each, as packed; NaN where nothing is read. A rollout a tree."""
    rng, items = np.random.default_rng(seed), []
    for n in range(4):
        start = rng.integers(0, vocabulary, 2)
        tree, _ = build([np.concatenate([start, rng.integers(0, vocabulary, 3)]) for _ in range(3)])
        source = np.repeat(np.flatnonzero(tree.depth >= 1), 2)
        size = len(source)
        items.append((tree, Targets(
            source=source.astype(np.int32),
            token=rng.integers(0, vocabulary, size).astype(np.int32),
            logp_behaviour=rng.uniform(-2.6, -1.6, size).astype(np.float32),
            has_logp=np.ones(size, bool),
            advantage=rng.normal(size=size).astype(np.float32),
            role=rng.choice([Role.ACTION, Role.ARGS], size).astype(np.int8),
            weight=rng.choice([0.5, 1.0], size).astype(np.float32),
            success=np.ones(size, bool),
            call=np.full(size, n, np.int32),
            rollout=np.full(size, n, np.int32),
        )))  # fmt: skip
    batch, report = pack(items, row_slots=row_slots, row_targets=row_targets, max_rows=max_rows)
    assert not report.dropped
    poison = lambda array: np.where(batch.weight > 0, array, np.nan).astype(np.float32)
    batch = batch._replace(logp_behaviour=poison(batch.logp_behaviour), advantage=poison(batch.advantage))
    return batch, jnp.int32(report.rows_used)


def toy_capo(layers=2, **changes):
    quick = {"warmup_rollouts": 1, "warmup_steps": 100, "refresh_steps": 2}
    capo = dataclasses.replace(default(decoder_units(layers, include_gate=True)), **quick | changes)
    return Policy(clip_low=0.2, clip_high=0.28, capo=capo)


class Toy(NamedTuple):
    """Everything the tests of the step are made of."""

    params: Callable  # (dtype) -> parameters
    row_fn: Callable
    batch: Callable
    capo: Callable
    jit: Callable


@pytest.fixture(scope="session")
def toy():
    # Nearly all the time of these tests is LLVM optimising steps that then run once.
    jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    return Toy(toy_params, toy_row_fn, toy_batch, toy_capo, jit)


@pytest.fixture(scope="session")
def tree_batch():
    return packed_trees


@pytest.fixture(scope="session")
def plain_policy():
    return Policy(clip_low=0.2, clip_high=0.28, capo=None)


@pytest.fixture(scope="session")
def decoder_job():
    """The module `decoder_job.py` of this folder, which other processes import too."""
    spec = importlib.util.spec_from_file_location("decoder_job", Path(__file__).parent / "decoder_job.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
