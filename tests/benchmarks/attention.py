"""Blockwise tree attention against dense attention in the same run: memory, time, and distance to the limit.

    python tests/benchmarks/attention.py step [SLOTS ...]
    python tests/benchmarks/attention.py alone [SLOTS ...] [--measure SLOTS]

`step`: for each row length, one gradient (forward and backward) of the log-probabilities of the targets, through the
decoder of the quick start, of a few rows at once. Prints CPU seconds (median of interleaved repeats, all threads),
slots per CPU-second, XLA's temporary memory, CPU seconds to compile, and the ratio to dense.

`alone`: attention and its gradient without a model, on one row of agent trees. XLA's temporary memory of both for every
length (compiled, not run). Up to `--measure` slots also CPU seconds of both, their ratio, and the share of the matrix
product rate, measured in the same run, that the visible pairs' products (14 * dim operations a pair and head) make.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from harnessrl_jax.attention import make_plan, row_mask, tree_attention, visible
from harnessrl_jax.models import DecoderConfig, init_params, row_hidden, target_logps
from harnessrl_jax.trajectories import trees

MODEL = DecoderConfig(
    vocab_size=2048, hidden_size=128, layers=4, heads=4, kv_heads=2, head_dim=32, mlp_size=384, qkv_bias=True
)
ROWS = {512: 4, 1024: 2, 4096: 1}  # rows at once, by row length
VARIANTS = {"dense": None, "blockwise 32": 32, "blockwise 64": 64, "blockwise 128": 128}


def agent_sequences(rng: np.random.Generator, rollouts: int = 8, turns: int = 3) -> list[np.ndarray]:
    """One group: rollouts that share a prompt of about 130 tokens and grow by some 23 + 30 tokens a turn."""
    words = lambda low, high: rng.integers(7, 2048, rng.integers(low, high)).astype(np.int32)
    prompt, sequences = words(100, 160), []
    for _ in range(rollouts):
        context = prompt
        for _ in range(turns):
            context = np.concatenate([context, words(15, 30), words(20, 40)])
        sequences.append(context)
    return sequences


def full_row(rng: np.random.Generator, slots: int) -> tuple[np.ndarray, ...]:
    """Token, position, subtree end, source and target of a row filled with trees; the last tree is cut to fit."""
    token, depth, end = (np.zeros(slots, np.int32) for _ in range(3))
    used = 0
    while used < slots:
        tree, _ = trees.build(agent_sequences(rng))
        room = min(len(tree.token), slots - used)
        token[used : used + room] = tree.token[:room]
        depth[used : used + room] = tree.depth[:room]
        end[used : used + room] = np.minimum(tree.subtree_end[:room], room) + used
        used += room
    source = np.sort(rng.choice(slots - 1, slots * 2 // 5, replace=False)).astype(np.int32)
    return token, depth, end, source, token[source + 1]


def gradient(block: int | None) -> Callable[..., Any]:
    """The gradient of all rows with one implementation, as a jitted function."""

    def loss(params: Any, token: Any, depth: Any, end: Any, source: Any, target: Any) -> jax.Array:
        how = {"implementation": "dense"} if block is None else {"implementation": "blockwise", "block": block}
        hidden, _ = row_hidden(MODEL, params, token, depth, end, **how)
        return target_logps(MODEL, params, hidden, source, target)[0].sum()

    rows = jax.vmap(loss, in_axes=(None, 0, 0, 0, 0, 0))
    return jax.jit(jax.grad(lambda params, batch: rows(params, *batch).sum()))


def cpu_seconds(work: Callable[[], Any]) -> float:
    """CPU seconds of one call, all threads."""
    start = time.process_time()
    jax.block_until_ready(work())
    return time.process_time() - start


def measure(slots: int, repeats: int) -> None:
    """One row length: compiles every variant, interleaves their repeats and prints a line for each."""
    rng = np.random.default_rng(0)
    rows = ROWS.get(slots, 1)
    batch = tuple(jnp.asarray(np.stack(x)) for x in zip(*(full_row(rng, slots) for _ in range(rows)), strict=True))
    params = init_params(MODEL, jax.random.key(0))
    masks = [row_mask(end) for end in batch[2]]
    seen = np.mean([float(visible(mask).mean()) for mask in masks])
    print(f"\n{rows} rows of {slots} slots, {batch[3].shape[1]} targets each; {seen:.1%} of all pairs are visible")
    compiled, compile_s = {}, {}
    for name, block in VARIANTS.items():
        start = time.process_time()
        compiled[name] = gradient(block).lower(params, batch).compile()
        compile_s[name] = time.process_time() - start
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for repeat in range(repeats + 1):
        for name, work in compiled.items():
            taken = cpu_seconds(lambda work=work: work(params, batch))
            times[name] += [taken] if repeat else []  # the first touches memory
    base = np.median(times["dense"])
    for name, block in VARIANTS.items():
        median = np.median(times[name])
        tiles = (
            [float(make_plan(m, block_q=block, block_k=block).query_start[-1]) * block**2 for m in masks]
            if block
            else []
        )
        memory = compiled[name].memory_analysis().temp_size_in_bytes / 1e6
        read = f"  tiles read {np.mean(tiles) / slots**2:.0%}" if tiles else ""
        print(
            f"  {name:14s} {median:7.3f} s (least {min(times[name]):.3f})  {rows * slots / median:6.0f} slots/cpu-s  "
            f"ratio {base / median:5.2f}  temporary {memory:6.0f} MB  compile {compile_s[name]:4.1f} s{read}"
        )


HEADS, KV_HEADS, DIM = 4, 2, 64  # of `alone`


def alone(implementation: str, slots: int) -> Any:
    """Attention and its gradient for a row of this length, compiled."""

    def value_and_gradient(q: Any, k: Any, v: Any, end: Any, cotangent: Any) -> Any:
        attend = lambda q, k, v: tree_attention(q, k, v, row_mask(end), implementation=implementation)
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(cotangent)

    of = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
    q, k = of(slots, HEADS, DIM), of(slots, KV_HEADS, DIM)
    return jax.jit(value_and_gradient).lower(q, k, k, of(slots, dtype=jnp.int32), q).compile()


def product_rate(size: int = 1024) -> float:
    """Operations per CPU second of a large f32 matrix product, the best of a few."""
    a = jnp.ones((size, size))
    product = jax.jit(jnp.matmul).lower(a, a).compile()
    return 2 * size**3 / min(cpu_seconds(lambda: product(a, a)) for _ in range(5))


def measure_alone(lengths: list[int], limit: int, repeats: int = 3) -> None:
    """Prints a line for each length."""
    print("   slots  dense MB  blockwise MB   dense s  blockwise s   ratio  of the matrix product rate")
    for slots in lengths:
        both = {name: alone(name, slots) for name in ("dense", "blockwise")}
        dense, blockwise = (work.memory_analysis().temp_size_in_bytes / 1e6 for work in both.values())
        line = f"{slots:8d} {dense:9.0f} {blockwise:13.1f}"
        if slots <= limit:
            rng = np.random.default_rng(0)
            _, depth, end, _, _ = full_row(rng, slots)
            normal = lambda heads, rng=rng, slots=slots: jnp.asarray(rng.normal(size=(slots, heads, DIM)), jnp.float32)
            arguments = normal(HEADS), normal(KV_HEADS), normal(KV_HEADS), jnp.asarray(end), normal(HEADS)
            times: dict[str, list[float]] = {name: [] for name in both}
            for _ in range(repeats):
                for name, work in both.items():
                    times[name].append(cpu_seconds(lambda work=work, arguments=arguments: work(*arguments)))
            slow, fast = (float(np.median(x)) for x in times.values())
            useful = 14.0 * DIM * HEADS * float((depth + 1).sum()) / fast / product_rate()
            line += f" {slow:9.3f} {fast:12.3f} {slow / fast:7.1f}  {useful:.0%}"
        print(line, flush=True)


def main() -> None:
    """Reads the command line and runs one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["step", "alone"])
    parser.add_argument("slots", type=int, nargs="*")
    parser.add_argument("--measure", type=int, default=4096, metavar="SLOTS")
    arguments = parser.parse_args()
    if arguments.what == "alone":
        measure_alone(arguments.slots or [1024 * 2**i for i in range(7)], arguments.measure)
    else:
        for length in arguments.slots or list(ROWS):
            measure(length, repeats=9 if length < 4096 else 3)


if __name__ == "__main__":
    main()
