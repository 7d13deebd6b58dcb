"""The GPU kernels against other attention on the same GPU, and how much of the chip's peak they and a step attain.

    python tests/benchmarks/gpu_attention.py [SLOTS ...] [--repeats 10] [--heads 16] [--kv-heads 4] [--dim 128]

Needs an NVIDIA GPU of compute capability 9.0 (Hopper); with torch, set XLA_PYTHON_CLIENT_PREALLOCATE=false. One row of
agent trees a length (8k, 16k, 32k and 64k slots), in bf16, forward and backward; medians of interleaved repeats after a
first one that compiles:

- `pallas_gpu` and `blockwise`: ours, with the tile plan made outside, as the layers of a model share it;
- `cudnn causal`: `jax.nn.dot_product_attention`, causal. It knows no trees: a lower limit of what one pays without
  skipping, for the same number of tokens;
- `dense mask`: the same function with the tree's mask written out, where its square fits (up to 16k);
- `flex`: PyTorch's FlexAttention, compiled, with the same mask and its own block mask, where torch is installed.

The share of the peak counts 14 * dim operations a visible pair and head (4 forward, 10 backward) over the rate of a
large bf16 matrix product in the same run. `step` is the gradient of a decoder of 0.5 B parameters on the same row:
6 * P * slots + 14 * pairs * heads * dim * layers + 6 * hidden * vocabulary * targets operations.
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attention import full_row

from harnessrl_jax.attention import default_implementation, plan_for, row_mask, tree_attention, visible
from harnessrl_jax.models import DecoderConfig, init_params, row_hidden, target_logps

MODEL = DecoderConfig(  # the shape of Qwen2.5-0.5B, with a smaller vocabulary
    vocab_size=32768, hidden_size=896, layers=24, heads=14, kv_heads=2, head_dim=64, mlp_size=4864, qkv_bias=True
)
DENSE_LIMIT = 16384  # slots whose square is written out

Work = Callable[[], Any]


def ours(implementation: Any, qkv: tuple, d_out: Any, end: Any) -> Work:
    """Forward and backward of `tree_attention`."""
    mask = row_mask(end)
    plan = jax.block_until_ready(jax.jit(partial(plan_for, implementation=implementation))(mask))
    attend = partial(tree_attention, implementation=implementation, scale=1.0)
    return pulled(lambda q, k, v: attend(q, k, v, mask, plan), qkv, d_out)


def jax_own(qkv: tuple, d_out: Any, end: Any | None) -> Work:
    """Forward and backward of `jax.nn.dot_product_attention`: causal by cuDNN, or with a tree's mask written out."""
    how = {"is_causal": True, "implementation": "cudnn"} if end is None else {"implementation": "xla"}
    attend = partial(jax.nn.dot_product_attention, scale=1.0, **how)
    seen = None if end is None else visible(row_mask(end))[None, None]
    return pulled(lambda q, k, v: attend(q[None], k[None], v[None], mask=seen)[0], qkv, d_out)


def pulled(attend: Callable[..., Any], qkv: tuple, d_out: Any) -> Work:
    """A call that computes the output and its three cotangents."""

    @jax.jit
    def run(qkv: tuple, d_out: Any) -> Any:
        out, pull = jax.vjp(attend, *qkv)
        return out, pull(d_out)

    return lambda: jax.block_until_ready(run(qkv, d_out))


def flex(qkv: tuple, d_out: Any, end: Any) -> Work:
    """Forward and backward of FlexAttention in PyTorch, on the same numbers."""
    import torch
    from torch.nn.attention import flex_attention as module

    tensor = lambda x: torch.tensor(np.asarray(x, np.float32), device="cuda", dtype=torch.bfloat16)
    q, k, v = (tensor(x).transpose(0, 1)[None].contiguous().requires_grad_() for x in qkv)
    cotangent, ends = tensor(d_out).transpose(0, 1)[None].contiguous(), torch.tensor(np.asarray(end), device="cuda")
    see = lambda batch, head, query, key: (key <= query) & (query < ends[key])
    blocks = torch.compile(module.create_block_mask)(see, None, None, len(ends), len(ends), device="cuda")
    attend = torch.compile(partial(module.flex_attention, block_mask=blocks, enable_gqa=True, scale=1.0))

    def run() -> None:
        torch.autograd.grad(attend(q, k, v), (q, k, v), cotangent)
        torch.cuda.synchronize()

    return run


def step(row: tuple[np.ndarray, ...]) -> tuple[Work, int]:
    """The gradient of the targets' log-probabilities through a decoder, and its number of parameters."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), jax.jit(partial(init_params, MODEL))(jax.random.key(0)))
    token, depth, end, source, target = map(jnp.asarray, row)

    @jax.jit
    def gradient(params: Any) -> Any:
        def total(params: Any) -> jax.Array:
            hidden, _ = row_hidden(MODEL, params, token, depth, end, remat="attention")
            return target_logps(MODEL, params, hidden, source, target)[0].sum()

        return jax.grad(total)(params)

    size = sum(x.size for x in jax.tree.leaves(params)) - MODEL.vocab_size * MODEL.hidden_size
    return lambda: jax.block_until_ready(gradient(params)), size


def seconds(works: dict[str, Work], repeats: int) -> dict[str, float]:
    """Median wall seconds of each, interleaved; the first call of each compiles."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(repeats + 1):
        for name, work in works.items():
            begin = time.perf_counter()
            work()
            taken[name] += [time.perf_counter() - begin] if repeat else []
    return {name: float(np.median(times)) for name, times in taken.items()}


def peak(size: int = 8192) -> float:
    """Operations a second of a large bf16 matrix product."""
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    product = jax.jit(jnp.matmul)
    times = seconds({"product": lambda: jax.block_until_ready(product(a, a))}, 10)
    return 2 * size**3 / times["product"]


def measure(slots: int, heads: tuple[int, int, int], repeats: int, rate: float) -> None:
    """Prints the lines of one length."""
    query_heads, kv_heads, dim = heads
    rng = np.random.default_rng(0)
    row = full_row(rng, slots)
    end, pairs = jnp.asarray(row[2]), float((row[1] + 1).sum())
    normal = lambda count: jnp.asarray(rng.normal(size=(slots, count, dim)), jnp.bfloat16)
    qkv, d_out = (normal(query_heads) * dim**-0.5, normal(kv_heads), normal(kv_heads)), normal(query_heads)
    works = {name: ours(name, qkv, d_out, end) for name in ("pallas_gpu", "blockwise")}
    works["cudnn causal"] = jax_own(qkv, d_out, None)
    if slots <= DENSE_LIMIT:
        works["dense mask"] = jax_own(qkv, d_out, end)
    if importlib.util.find_spec("torch"):
        works["flex"] = flex(qkv, d_out, end)
    times = seconds(works, repeats)
    print(f"\n{slots} slots, {2 * pairs / slots**2:.1%} of a causal row's pairs are visible")
    for name, taken in times.items():
        share = 14 * dim * query_heads * pairs / taken / rate
        print(f"  {name:14s} {1e3 * taken:9.3f} ms  {taken / times['pallas_gpu']:6.2f} x  {share:.1%} of the peak")
    work, parameters = step(row)
    taken = seconds({"step": work}, repeats)["step"]
    operations = (
        6.0 * parameters * slots
        + 14 * pairs * MODEL.heads * MODEL.head_dim * MODEL.layers
        + 6.0 * MODEL.hidden_size * MODEL.vocab_size * len(row[3])
    )
    share = operations / taken / rate
    print(f"  {'step':14s} {1e3 * taken:9.3f} ms  {slots / taken:9.0f} tokens/s  {share:.1%} of the peak")


def main() -> None:
    """Reads the command line; says so where there is no GPU that has the kernels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("slots", type=int, nargs="*", default=[8192, 16384, 32768, 65536])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128)
    arguments = parser.parse_args()
    if default_implementation() != "pallas_gpu":
        sys.exit(f"needs a GPU of compute capability 9.0 (Hopper); JAX runs on {jax.devices()[0]}.")
    rate = peak()
    print(f"{jax.devices()[0].device_kind}: {rate / 1e12:.0f} TFLOP/s in a bf16 matrix product")
    for slots in arguments.slots:
        measure(slots, (arguments.heads, arguments.kv_heads, arguments.dim), arguments.repeats, rate)


if __name__ == "__main__":
    main()
