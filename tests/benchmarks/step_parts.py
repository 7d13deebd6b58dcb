"""Where the CPU seconds of a training step go: the whole, and its parts compiled and timed alone, in the same run.

    python tests/benchmarks/step_parts.py [SHAPE ...] [--repeats 3] [--shrink 2] [--rollouts 8]

The step of `training_step.py` on the row with the trees. Each part runs with the step's own shapes and trees, on
made-up numbers, as often as the step does:

    attention    forward and backward, of every layer
    products     matrix products of the layers: forward, recomputed (`remat="attention"`: not `down`), and backward
    vocabulary   log-probabilities of all targets, chunk by chunk: forward, recomputed, and backward
    optimiser    clipping and AdamW
    rest         the whole less those: norms, rotary embedding, activation function, residuals, embedding, the loss

`least` is the operations of the part, recomputed ones included and whole tiles counted, over the matrix product rate of
the same run: what is computed but need not be stands between it and the `limit` of `training_step.py`.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from agent_shapes import SHAPES, Shape, group, shrunk
from training_step import ADAMW, MODEL, ROUND, compiled_step, cpu_seconds, layout, matmul_rate

from harnessrl_jax.attention import plan_for, row_mask, tree_attention
from harnessrl_jax.attention.plan import BLOCK
from harnessrl_jax.models import init_params, target_logps
from harnessrl_jax.training import make_optimizer, step_compiler_options
from harnessrl_jax.trajectories import PackedBatch, group_trees


class Part(NamedTuple):
    """A part of the step, compiled alone."""

    work: Callable[[], Any]
    times: int
    """How often the step does it."""
    operations: float
    """Each time."""


def compiled(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """The function on these arguments, compiled as the step is."""
    program = jax.jit(function, compiler_options=step_compiler_options()).lower(*arguments).compile()
    return lambda: program(*arguments)


def normal(*shape: int) -> jax.Array:
    """Random numbers."""
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def attention(batch: PackedBatch) -> Part:
    """Attention of one layer, forward and backward."""
    end = jnp.asarray(batch.subtree_end[0])
    plan = jax.jit(lambda end: plan_for(row_mask(end), implementation="blockwise"))(end)
    assert plan is not None
    slots, dim = len(end), MODEL.head_dim
    q, k, v = normal(slots, MODEL.heads, dim), normal(slots, MODEL.kv_heads, dim), normal(slots, MODEL.kv_heads, dim)

    def both_ways(q: Any, k: Any, v: Any, end: Any, plan: Any, cotangent: Any) -> Any:
        attend = lambda q, k, v: tree_attention(q, k, v, row_mask(end), plan, implementation="blockwise")
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(cotangent)

    operations = 14.0 * int(plan.query_start[-1]) * BLOCK**2 * MODEL.heads * dim
    return Part(compiled(both_ways, q, k, v, end, plan, q), MODEL.layers, operations)


def products(slots: int) -> list[Part]:
    """Matrix products of one layer, one part for each product."""
    hidden, mlp = MODEL.hidden_size, MODEL.mlp_size
    q, kv = MODEL.heads * MODEL.head_dim, MODEL.kv_heads * MODEL.head_dim
    parts = []
    for size_in, size_out, count, again in (
        (hidden, q, 1, 1), (hidden, kv, 2, 2), (q, hidden, 1, 1), (hidden, mlp, 2, 2), (mlp, hidden, 1, 0),
    ):  # fmt: skip
        x, kernel, cotangent = normal(slots, size_in), normal(size_in, size_out), normal(slots, size_out)
        ways = (
            (compiled(lambda x, w: x @ w, x, kernel), count + again),
            (compiled(lambda g, w: g @ w.T, cotangent, kernel), count),
            (compiled(lambda x, g: x.T @ g, x, cotangent), count),
        )
        parts += [Part(work, times * MODEL.layers, 2.0 * slots * size_in * size_out) for work, times in ways]
    return parts


def vocabulary(params: Any, batch: PackedBatch) -> Part:
    """Log-probabilities of the row's targets and their gradient; the projection is made twice and goes back once."""
    source, target = jnp.asarray(batch.source[0]), jnp.asarray(batch.target[0])
    hidden = normal(batch.token.shape[1], MODEL.hidden_size)
    loss = lambda params, hidden: target_logps(MODEL, params, hidden, source, target)[0].sum()
    operations = 8.0 * MODEL.hidden_size * MODEL.vocab_size * len(target)
    head = {name: params[name] for name in ("embed", "lm_head")}
    return Part(compiled(jax.grad(loss, argnums=(0, 1)), head, hidden), 1, operations)


def optimiser(params: Any) -> Part:
    """One update."""
    optimizer = make_optimizer(**ADAMW)

    def update(params: Any, gradient: Any, state: Any) -> Any:
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    return Part(compiled(update, params, params, jax.jit(optimizer.init)(params)), 1, 0.0)


def measure(name: str, shape: Shape, repeats: int) -> None:
    """Prints a line for each part of one shape's step."""
    credited = group(shape, MODEL.vocab_size)
    whole = sum(len(tree.token) for tree, _ in group_trees(credited, loss_mean="rollout", row_slots=10**6).items)
    made = layout(MODEL, credited, -(-whole // ROUND) * ROUND)
    params = jax.jit(init_params, static_argnums=0)(MODEL, jax.random.key(0))
    parts = {
        "attention": [attention(made.batch)],
        "products": products(made.batch.token.shape[1]),
        "vocabulary": [vocabulary(params, made.batch)],
        "optimiser": [optimiser(params)],
    }
    step = compiled_step(MODEL, made.batch)
    seconds, rates = {name: [] for name in ("step", *parts)}, []
    for repeat in range(repeats + 1):
        taken = {name: sum(cpu_seconds(one.work) * one.times for one in several) for name, several in parts.items()}
        for way, time in (("step", cpu_seconds(step)), *taken.items()):
            seconds[way] += [time] if repeat else []  # the first touches memory
        rates.append(matmul_rate())
    report(name, made.operations, parts, {way: float(np.median(each)) for way, each in seconds.items()}, rates)


def report(name: str, least: float, parts: dict[str, list[Part]], taken: dict[str, float], rates: list[float]) -> None:
    """Prints the medians."""
    rate, step = float(np.median(rates)), taken.pop("step")
    taken["rest"] = step - sum(taken.values())
    print(f"\n{name}: {step:.2f} CPU seconds, {least / rate / step:.0%} of the limit, {rate / 1e9:.0f} GFLOP a second")
    for way, time in taken.items():
        operations = sum(one.operations * one.times for one in parts.get(way, ()))
        line = f"  {way:10s} {time:6.3f} s  {time / step:4.0%} of the step"
        print(line + (f"  least {operations / rate:6.3f} s, {operations / rate / time:4.0%}" if operations else ""))


def main() -> None:
    """Reads the command line and measures each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shrink", type=int, default=2, help="every length divided by this")
    parser.add_argument("--rollouts", type=int, default=8)
    arguments = parser.parse_args()
    for name in arguments.shapes or ("appended turns",):
        measure(name, shrunk(SHAPES[name], arguments.shrink)._replace(rollouts=arguments.rollouts), arguments.repeats)


if __name__ == "__main__":
    main()
