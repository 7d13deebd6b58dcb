"""Synthetic rollouts of many calls -> calls per second and tokens per CPU second, against plainer ways to serve them.

    python tests/benchmarks/sampler.py [--clients 64] [--calls 5] [--repeats 2]

Each client is a rollout: every call's prompt is the previous prompt, the sampled answer and a new tool result; the
eight rollouts of a group start with the same prompt. The alternatives run in the same process: prompts read in full at
every call (no kept chunks), one decoding step per dispatch, one lane instead of four.
"""

import argparse
import asyncio
import os
import time
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from harnessrl_jax.models import DecoderConfig, init_params
from harnessrl_jax.sampler import Engine, LocalSampler, SampleRequest

CONFIG = DecoderConfig(
    vocab_size=2048, hidden_size=128, layers=4, heads=4, kv_heads=4, head_dim=32, mlp_size=384, tie_embeddings=True
)
CONTEXT, GROUP, SHARED, QUESTION, RESULT, ANSWER = 512, 8, 120, 40, 40, 30  # tokens


class Way(NamedTuple):
    """One way to serve the same calls."""

    name: str
    lanes: int = 4
    chunk: int = 32
    steps: int = 4
    pages: int = 1024


WAYS = (
    Way("default"),
    Way("full prompt every call", pages=0),
    Way("one step per dispatch", steps=1),
    Way("one lane", lanes=1),
    Way("plain: all three", lanes=1, steps=1, pages=0),
)


def tokens(seed: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Token ids that depend on the seed alone."""
    return tuple(np.random.default_rng(seed).integers(3, CONFIG.vocab_size, size).tolist())


async def rollout(sampler: LocalSampler, number: int, calls: int) -> int:
    """The calls of one rollout, one after the other; returns the tokens sampled."""
    prompt = tokens((0,), SHARED) + tokens((1, number // GROUP), QUESTION)
    sampled = 0
    for call in range(calls):
        length = ANSWER + (number * 7 + call * 5) % 11 - 5
        request = SampleRequest(prompt_ids=prompt, max_new_tokens=length, seed=number * 1000 + call)
        output = (await sampler.complete(request)).output_ids
        sampled += len(output)
        prompt += (*output.tolist(), *tokens((2, number, call), RESULT))
    return sampled


async def measure(way: Way, params: dict, clients: int, calls: int, repeats: int) -> dict[str, float]:
    """Best of `repeats` runs with new weights each, so that no run finds chunks of another."""
    engine = Engine(
        config=CONFIG, slots=64 // way.lanes, length=CONTEXT, chunk=way.chunk, steps=way.steps, pages=way.pages
    )
    sampler = LocalSampler(engine, lanes=way.lanes)
    sampler.load_weights(params, 0)
    await sampler.start()
    best: dict[str, float] = {}
    for version in range(1, repeats + 1):
        sampler.load_weights(params, version)
        wall, cpu = time.perf_counter(), time.process_time()
        sampled = sum(await asyncio.gather(*[rollout(sampler, number, calls) for number in range(clients)]))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if not best or cpu < best["cpu s"]:
            best = {
                "calls/s": clients * calls / wall,
                "sampled tokens/s": sampled / wall,
                "sampled tokens/CPU s": sampled / cpu,
                "CPU ms/call": cpu / clients / calls * 1e3,
                "cpu s": cpu,
            }
    counts = sampler.counts
    best["chunks reused"] = counts.chunks_reused / (counts.chunks_reused + counts.chunks_read)
    best["jobs/block"] = counts.tokens / counts.generate_calls / way.steps
    await sampler.close()
    return best


def main() -> None:
    """Measures every way and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    params = init_params(CONFIG, jax.random.key(0))
    for way in WAYS:
        result = asyncio.run(measure(way, params, options.clients, options.calls, options.repeats))
        print(f"{way.name:24}", "  ".join(f"{name} {value:.2f}" for name, value in result.items()), flush=True)


if __name__ == "__main__":
    main()
