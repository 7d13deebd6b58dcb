"""What CAPO's forms of routing cost, against the plain clipped loss on the same packed batch in the same run.

    python tests/benchmarks/capo_cost.py [REPEATS] [--no-remat]

For each model width: one optimiser step (AdamW) with a partition in force. Prints CPU seconds (median of interleaved
repeats, all threads), the ratio to plain, XLA's peak memory (arguments, results and temporaries) and its ratio to
plain, and the operations that XLA counts, as a ratio. `position_local` is an approximation, the others are equal to
rounding.
"""

import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from harnessrl_jax.capo import decoder_units, default, fixed_partition
from harnessrl_jax.models import DecoderConfig, Remat, init_params
from harnessrl_jax.training import Policy, decoder_row_fn, init_state, make_optimizer, make_step, step_compiler_options
from harnessrl_jax.trajectories import PackedBatch, Role

SLOTS, TARGETS, VOCAB = 512, 256, 2048
FORMS = ("plain", "position_local", "fused", "vjp", "reference")


class Size(NamedTuple):
    """A model and how many rows it trains on, all of them one micro-batch."""

    width: int
    layers: int
    rows: int


SIZES = (Size(128, 4, 4), Size(256, 3, 2), Size(512, 2, 1))


def packed(rows: int) -> PackedBatch:
    """Rows of one path each: targets in runs of two ACTION, fourteen ARGS and four OTHER tokens."""
    rng = np.random.default_rng(0)
    shape = (rows, TARGETS)
    run = np.array([Role.ACTION] * 2 + [Role.ARGS] * 14 + [Role.OTHER] * 4, np.int8)
    each_row = lambda x: np.broadcast_to(x, (rows, len(x))).astype(np.int32)
    return PackedBatch(
        token=rng.integers(0, VOCAB, (rows, SLOTS)).astype(np.int32),
        position=each_row(np.arange(SLOTS)),
        subtree_end=np.full((rows, SLOTS), SLOTS, np.int32),
        source=each_row(np.arange(TARGETS) + SLOTS - TARGETS - 1),
        target=rng.integers(0, VOCAB, shape).astype(np.int32),
        logp_behaviour=np.full(shape, -7.6, np.float32),
        has_logp=np.ones(shape, bool),
        advantage=rng.normal(size=shape).astype(np.float32),
        role=np.broadcast_to(np.resize(run, TARGETS), shape).astype(np.int8),
        weight=np.ones(shape, np.float32),
        success=np.ones(shape, bool),
        call=each_row(np.arange(TARGETS) // len(run)),
        rollout=np.broadcast_to(np.arange(rows)[:, None], shape).astype(np.int32),
    )


def compiled_step(size: Size, form: str, remat: Remat) -> tuple[Callable[[], Any], Any]:
    """One step of a form, and what XLA says about it."""
    model = DecoderConfig(
        vocab_size=VOCAB,
        hidden_size=size.width,
        layers=size.layers,
        heads=size.width // 32,
        kv_heads=size.width // 64,
        head_dim=32,
        mlp_size=3 * size.width,
    )
    settings = dataclasses.replace(
        default(decoder_units(size.layers, include_gate=True)), routing="vjp" if form == "plain" else form
    )
    objective = Policy(clip_low=0.2, clip_high=0.28, capo=None if form == "plain" else settings)
    optimizer = make_optimizer(learning_rate=1e-4, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, clip_norm=1.0)
    row_fn = decoder_row_fn(
        model,
        temperature=1.0,
        implementation="blockwise",
        remat=remat,
        collect=None if form == "plain" else settings.statistic.reads,
    )
    state = init_state(jax.jit(init_params, static_argnums=0)(model, jax.random.key(0)), optimizer, objective)
    if form != "plain":
        units = jax.random.uniform(jax.random.key(1), (2, size.layers, model.mlp_size)) < settings.top_fraction
        state = state._replace(capo=fixed_partition(units))
    step = make_step(row_fn, optimizer, objective, micro_rows=size.rows)
    step = jax.jit(step, compiler_options=step_compiler_options())
    arguments = (state, jax.tree.map(jnp.asarray, packed(size.rows)), jnp.int32(size.rows))
    compiled = step.lower(*arguments).compile()
    return lambda: compiled(*arguments), compiled


def peak_bytes(compiled: Any) -> int:
    """What the step holds at most, with the state it reads and the one it writes."""
    found = compiled.memory_analysis()
    return found.temp_size_in_bytes + found.argument_size_in_bytes + found.output_size_in_bytes


def cpu_seconds(work: Callable[[], Any]) -> float:
    """CPU seconds of one call, all threads."""
    start = time.process_time()
    jax.block_until_ready(work())
    return time.process_time() - start


def measure(size: Size, repeats: int, remat: Remat) -> None:
    """One width: compiles every form, interleaves their repeats and prints a line for each."""
    steps = {form: compiled_step(size, form, remat) for form in FORMS}
    times: dict[str, list[float]] = {form: [] for form in FORMS}
    for repeat in range(repeats + 1):
        for form, (work, _) in steps.items():
            taken = cpu_seconds(work)
            times[form] += [taken] if repeat else []  # the first touches memory
    print(
        f"\nwidth {size.width}, {size.layers} layers, {size.rows} rows of {SLOTS} slots and {TARGETS} targets",
        flush=True,
    )
    memory = {form: peak_bytes(compiled) for form, (_, compiled) in steps.items()}
    operations = {form: compiled.cost_analysis()["flops"] for form, (_, compiled) in steps.items()}
    for form in FORMS:
        median = float(np.median(times[form]))
        print(
            f"  {form:15s} {median:7.3f} s  ratio {median / np.median(times['plain']):4.2f} "
            f"(least {min(times[form]) / min(times['plain']):4.2f})  "
            f"peak {memory[form] / 1e6:6.1f} MB  ratio {memory[form] / memory['plain']:4.2f}  "
            f"operations {operations[form] / operations['plain']:4.2f}"
        )


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:] if argument.isdigit()]
    for each in SIZES:
        measure(each, numbers[0] if numbers else 7, "none" if "--no-remat" in sys.argv else "attention")
