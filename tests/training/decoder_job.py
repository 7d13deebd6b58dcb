"""A small decoder, packed trees and a few optimiser steps on any mesh: the same job for every test of scale.

The tests load it as a module; the processes of `test_processes.py` import it from their own folder.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from harnessrl_jax.capo import decoder_units, default
from harnessrl_jax.models import DecoderConfig, init_params
from harnessrl_jax.training import (
    DECODER_RULES,
    Policy,
    context_row_fn,
    decoder_row_fn,
    init_state,
    make_mesh,
    make_optimizer,
    make_step,
    place_batch,
    place_state,
    state_shardings,
)
from harnessrl_jax.trajectories import PackedBatch, Role

MODEL = DecoderConfig(
    vocab_size=32, hidden_size=16, layers=1, heads=4, kv_heads=2, head_dim=4, mlp_size=16, qkv_bias=True, sinks=True
)
ROWS, SLOTS, TARGETS = 16, 64, 32
USED = 13
# eps is far above the rounding of a gradient: where an entry nearly cancels, Adam would else divide noise by noise.
ADAMW = make_optimizer(learning_rate=1e-2, b1=0.9, b2=0.95, eps=1e-3, weight_decay=0.1, clip_norm=1.0)
QUICK = {"xla_backend_optimization_level": 0}  # nearly all the time of these tests is LLVM


def params():
    """Float32, every parameter away from its initial value."""
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(lambda: init_params(MODEL, jax.random.key(0)))
    return jax.tree.map(lambda x: np.float32(rng.normal(scale=0.3, size=x.shape) + (x.ndim == 1)), shapes)


def tree_slots(rng):
    """Depth and subtree end of one row: a random forest in depth-first order, then some padding."""
    used, path, depth, end = SLOTS - int(rng.integers(0, 8)), [], np.zeros(SLOTS), np.arange(1, SLOTS + 1)
    for slot in range(used):
        if rng.random() < 0.15:
            path = path[: rng.integers(0, len(path) + 1)]
        depth[slot] = len(path)
        path = [*path, slot]
        end[path] = slot + 1
    return depth, end


def batch(seed):
    """Rows of random trees; the last ones are padding, with NaN where floats stand."""
    rng = np.random.default_rng(seed)
    shape = (ROWS, TARGETS)
    position, end = (np.stack(x).astype(np.int32) for x in zip(*(tree_slots(rng) for _ in range(ROWS)), strict=True))
    used = np.broadcast_to((np.arange(ROWS) < USED)[:, None] & (np.arange(TARGETS) < TARGETS - 3)[None], shape)
    row = np.broadcast_to(np.arange(ROWS)[:, None], shape)
    floats = lambda x: np.where(used, x, np.nan).astype(np.float32)
    role = rng.choice([Role.ACTION, Role.ARGS, Role.OTHER], shape, p=[0.3, 0.5, 0.2])
    return PackedBatch(
        token=rng.integers(0, MODEL.vocab_size, (ROWS, SLOTS)).astype(np.int32),
        position=position,
        subtree_end=end,
        source=rng.integers(0, SLOTS, shape).astype(np.int32),
        target=rng.integers(0, MODEL.vocab_size, shape).astype(np.int32),
        logp_behaviour=floats(rng.uniform(-4.5, -2.5, shape)),
        has_logp=used,
        advantage=floats(rng.normal(size=shape)),
        role=np.where(used, role, Role.NONE).astype(np.int8),
        weight=np.where(used, rng.uniform(0.5, 1, shape), 0).astype(np.float32),
        success=used & (row % 4 != 1),
        call=np.where(used, row + 10, -1).astype(np.int32),
        rollout=np.where(used, row // 2 + 100, -1).astype(np.int32),
    )


def objective(routing):
    """CAPO in the named form, whose first partition is made in the first step; None is the plain gradient."""
    capo = None
    if routing is not None:
        quick = {"warmup_rollouts": 1, "warmup_steps": 1, "refresh_steps": 2, "ema": 0.0}
        capo = dataclasses.replace(default(decoder_units(MODEL.layers, include_gate=True)), routing=routing, **quick)
    return Policy(clip_low=0.2, clip_high=0.28, capo=capo)


class Job:
    """The compiled step of a mesh, and its state; `mesh` None is one device."""

    def __init__(self, mesh, routing, micro_rows, implementation="blockwise"):
        self.mesh, goal = mesh, objective(routing)
        reads = goal.capo.statistic.reads if goal.capo else None
        how = {"temperature": 0.7, "implementation": implementation, "remat": "attention", "collect": reads}
        spread = mesh and (mesh.shape["context"] > 1 or MODEL.kv_heads % mesh.shape["tensor"])
        row_fn = context_row_fn(MODEL, mesh, **how) if spread else decoder_row_fn(MODEL, **how)
        state = init_state(jax.tree.map(jnp.asarray, params()), ADAMW, goal)
        shardings = mesh and state_shardings(state, ADAMW, mesh, DECODER_RULES)
        step = make_step(row_fn, ADAMW, goal, micro_rows=micro_rows, shardings=shardings)
        out = {"out_shardings": (shardings, None)} if mesh else {}
        self.step = jax.jit(step, donate_argnums=0, compiler_options=QUICK, **out)
        self.state = place_state(state, shardings) if mesh else state

    def run(self, steps):
        """Takes steps; returns what the last one measured."""
        metrics = {}
        for seed in steps:
            rows = batch(seed)
            placed = place_batch(rows, self.mesh) if self.mesh else rows
            self.state, metrics = self.step(self.state, placed, np.int32(USED))
        return jax.tree.map(np.asarray, metrics)


def job(sizes, routing="vjp", micro_rows=8, **choices):
    """The job on a mesh of (data, fsdp, tensor, context) over all devices."""
    return Job(make_mesh(**dict(zip(("data", "fsdp", "tensor", "context"), sizes))), routing, micro_rows, **choices)


def whole(tree):
    """The arrays of a tree on this host, from wherever they lie."""
    return jax.tree.map(lambda leaf: np.asarray(process_allgather(leaf, tiled=True)), tree)
