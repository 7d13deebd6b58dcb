"""What a training step costs on agent trajectories, against the ways others train on them, in the same run.

    python tests/benchmarks/training_step.py [SHAPE ...] [--repeats 3] [--shrink 1] [--rollouts 8]

One optimiser step (clipped loss, AdamW) of the same model on the same targets, laid out in three ways that all use the
same kernel: `trees` (each shared token once), `chains` (calls that continue one another merged, as other libraries do)
and `calls` (each call a sequence of its own, packed first-fit-decreasing). CPU seconds, all threads, medians of
interleaved repeats. Rows are as short as they can be without being more, so that little of them is padding. Of a layout
with many rows the first two are timed, scaled by operations, freed of their padding:

    seconds = timed · (operations of all rows / of the timed rows) · (tokens in the timed rows / their slots)

`--shrink 4` takes a quarter of every length (and of the rows), which is quick, and needs blocks that are as fine
against a turn as 256 would be at full length.

Operations are those of the tokens that exist, without recomputation: 6·P·tokens + 14·visible pairs·heads·head_dim·
layers + 6·hidden·vocabulary·targets. `limit` is operations / (matmul rate measured in the same run).
"""

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from agent_shapes import SHAPES, Shape, chains, each_alone, group, shrunk

from harnessrl_jax.attention.plan import BLOCK
from harnessrl_jax.models import DecoderConfig, init_params
from harnessrl_jax.training import Policy, decoder_row_fn, init_state, make_optimizer, make_step, step_compiler_options
from harnessrl_jax.trajectories import CreditedCalls, PackedBatch, group_trees, pack

MODEL = DecoderConfig(
    vocab_size=2048,
    hidden_size=256,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=64,
    mlp_size=1024,
    qkv_bias=True,
    tie_embeddings=False,
)
SMALL = dataclasses.replace(MODEL, hidden_size=128, head_dim=32, mlp_size=512)
"""For the comparisons with other libraries."""
ADAMW = {"learning_rate": 1e-4, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "clip_norm": 1.0}
ROW, ROUND, TIMED = 16384, 128, 2


class Layout(NamedTuple):
    """Rows of one way to lay out the targets, and what a step on them costs in operations."""

    batch: PackedBatch
    timed: PackedBatch
    """Those of the rows whose step is timed."""
    operations: float
    operations_timed: float
    tokens: int
    fill: float
    """Share of the timed rows' slots that hold a token."""


def used(batch: PackedBatch) -> np.ndarray:
    """Slots that hold a token: all up to the last source of the row, since unneeded nodes are pruned."""
    last = np.where(batch.weight > 0, batch.source, -1).max(axis=1)
    return np.arange(batch.token.shape[1]) <= last[:, None]


def operations(m: DecoderConfig, batch: PackedBatch) -> np.ndarray:
    """Floating-point operations of each row, forward and backward, each once."""
    held = used(batch)
    layer = m.hidden_size * m.head_dim * 2 * (m.heads + m.kv_heads) + 3 * m.hidden_size * m.mlp_size
    pairs = np.where(held, batch.position + 1, 0).sum(axis=1, dtype=np.float64)
    targets = (batch.weight > 0).sum(axis=1)
    return (
        6.0 * layer * m.layers * held.sum(axis=1)
        + 14.0 * pairs * m.heads * m.head_dim * m.layers
        + 6.0 * m.hidden_size * m.vocab_size * targets
    )


def visible_share(batch: PackedBatch) -> float:
    """Share of the pairs in the tiles that attention reads which are visible; the test is that of `make_plan`."""
    rows, slots = batch.token.shape
    first = np.arange(0, slots, BLOCK)
    below = batch.subtree_end.reshape(rows, -1, BLOCK).max(axis=2)
    tiles = (first[None, None, :] <= first[None, :, None]) & (below[:, None, :] > first[None, :, None])
    return np.where(used(batch), batch.position + 1.0, 0).sum() / tiles.sum() / BLOCK**2


def shortest_rows(items: Sequence[Any], row_slots: int) -> int:
    """The shortest rows, at most `row_slots` long, that are no more than the fewest."""
    rows = lambda slots: pack(items, row_slots=slots, row_targets=slots, max_rows=512)[1].rows_used
    sizes, fewest = [len(tree.token) for tree, _ in items], rows(row_slots)
    least = -(-max(max(sizes), sum(sizes) // fewest) // ROUND) * ROUND
    return next(slots for slots in range(least, row_slots + 1, ROUND) if rows(slots) == fewest)


def layout(model: DecoderConfig, credited: CreditedCalls, row_slots: int) -> Layout:
    """Packs the calls."""
    items = group_trees(credited, loss_mean="rollout", row_slots=row_slots).items
    row_slots = shortest_rows(items, row_slots)
    _, report = pack(items, row_slots=row_slots, row_targets=row_slots, max_rows=512)
    timed = min(report.rows_used, TIMED)
    most = -(-max(row.targets for row in report.rows) // ROUND) * ROUND
    batch, _ = pack(items, row_slots=row_slots, row_targets=most, max_rows=report.rows_used)
    each, held = operations(model, batch), used(batch)
    return Layout(
        batch=batch,
        timed=jax.tree.map(lambda field: field[:timed], batch),
        operations=float(each.sum()),
        operations_timed=float(each[:timed].sum()),
        tokens=int(held.sum()),
        fill=float(held[:timed].mean()),
    )


def compiled_step(model: DecoderConfig, batch: PackedBatch) -> Callable[[], Any]:
    """One step on all rows of the batch, one at a time; compiles."""
    batch = jax.tree.map(jnp.asarray, batch)
    optimizer = make_optimizer(**ADAMW)
    objective = Policy(clip_low=0.2, clip_high=0.28, capo=None)
    row_fn = decoder_row_fn(model, temperature=1.0, implementation="blockwise", remat="attention", collect=None)
    state = init_state(jax.jit(init_params, static_argnums=0)(model, jax.random.key(0)), optimizer, objective)
    arguments = (state, batch, jnp.int32(len(batch.token)))
    step = make_step(row_fn, optimizer, objective, micro_rows=1)
    compiled = jax.jit(step, compiler_options=step_compiler_options()).lower(*arguments).compile()
    return lambda: compiled(*arguments)


def cpu_seconds(work: Callable[[], Any]) -> float:
    """CPU seconds of one call, all threads."""
    start = time.process_time()
    jax.block_until_ready(work())
    return time.process_time() - start


def medians(works: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """CPU seconds of each, interleaved."""
    times = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            times[name].append(cpu_seconds(work))
    return {name: float(np.median(taken)) for name, taken in times.items()}


def cosine(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """Of two gradients."""
    one, other = (np.concatenate([np.ravel(tree[name]) for name in sorted(a)]).astype(float) for tree in (a, b))
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def matmul_rate() -> float:
    """Operations per CPU-second of a large product: the best of a few."""
    x = jnp.ones((1024, 1024), jnp.float32)
    product = jax.jit(jnp.matmul)
    return 2 * 1024**3 / min(cpu_seconds(lambda: product(x, x)) for _ in range(4))


def measure(name: str, shape: Shape, row_slots: int, repeats: int) -> None:
    """Prints a line for each layout of one shape."""
    credited = group(shape, MODEL.vocab_size)
    whole = sum(len(tree.token) for tree, _ in group_trees(credited, loss_mean="rollout", row_slots=10**6).items)
    layouts = {
        "trees": layout(MODEL, credited, -(-whole // ROUND) * ROUND),
        "chains": layout(MODEL, chains(credited), row_slots),
        "calls": layout(MODEL, each_alone(credited), row_slots),
    }
    targets = {way: int((made.batch.weight > 0).sum()) for way, made in layouts.items()}
    assert len(set(targets.values())) == 1, f"the layouts train different targets: {targets}"
    seconds, rate = timed(layouts, repeats) if repeats else ({}, 0.0)
    trees = layouts["trees"]
    print(f"\n{name}: {len(credited.calls)} calls, {targets['trees']} targets, {rate / 1e9:.0f} GFLOP per CPU-second")
    for way, made in layouts.items():
        ratio, rows = made.operations / trees.operations, len(made.batch.token)
        line = f"  {way:7s} {made.tokens:7d} tokens in {rows:3d} rows, {made.operations / 1e9:6.1f} GFLOP"
        line += f", ratio {ratio:5.2f}, {visible_share(made.batch):3.0%} of tiles visible"
        if seconds:
            slower = seconds[way] / seconds["trees"]
            line += f"  {seconds[way]:7.2f} s, ratio {slower:5.2f}  attained {slower / ratio:4.2f}"
            line += f"  of the limit {made.operations / rate / seconds[way]:4.0%}"
        print(line, flush=True)


def timed(layouts: dict[str, Layout], repeats: int) -> tuple[dict[str, float], float]:
    """CPU seconds of a step on all rows of each layout, free of padding, and the matmul rate: interleaved medians."""
    works = {way: compiled_step(MODEL, made.timed) for way, made in layouts.items()}
    rates, times = [], {way: [] for way in layouts}
    for repeat in range(repeats + 1):
        for way, made in layouts.items():
            taken = cpu_seconds(works[way]) * made.operations / made.operations_timed * made.fill
            times[way] += [taken] if repeat else []  # the first touches memory
        rates.append(matmul_rate())
    return {way: float(np.median(each)) for way, each in times.items()}, float(np.median(rates))


def main() -> None:
    """Reads the command line and measures each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("--repeats", type=int, default=3, help="0 counts operations only")
    parser.add_argument("--shrink", type=int, default=1, help="every length divided by this")
    parser.add_argument("--rollouts", type=int, default=8)
    arguments = parser.parse_args()
    for name in arguments.shapes or SHAPES:
        shape = shrunk(SHAPES[name], arguments.shrink)._replace(rollouts=arguments.rollouts)
        measure(name, shape, ROW // arguments.shrink, arguments.repeats)


if __name__ == "__main__":
    main()
