"""The policy of the small task: sampling, evaluation and the warm start that all arms of a seed share."""

import functools
import tempfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ablation_batch import Sampled, packed
from ablation_task import Outcome, Problems, Tables, Task, expert, outcome, problems, tables, worker_prompt
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax

from harnessrl_jax.models import extend, init_cache, init_params, logits
from harnessrl_jax.training import Supervised, decoder_row_fn, init_state, make_optimizer, make_step

CACHE = Path(tempfile.gettempdir()) / "harnessrl_jax_ablation"
WARM_STEPS, WARM_ROWS, WARM_RATE = 300, 64, 8e-3
HELD_OUT = 768


@functools.partial(jax.jit, static_argnums=0)
def generate(task: Task, params: Any, prompt: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One output for each prompt at temperature 1, and the log-probability of each token."""
    count, depth = prompt.shape
    cache = init_cache(task.model, count, depth + task.output)
    hidden, cache = extend(task.model, params, prompt, jnp.zeros(count, jnp.int32), cache)

    def token(carry: tuple, i: jax.Array) -> tuple[tuple, tuple]:
        last, cache = carry
        score = jax.nn.log_softmax(logits(task.model, params, last))
        chosen = jax.random.categorical(jax.random.fold_in(key, i), score)
        place = jnp.full(count, depth + i, jnp.int32)
        hidden, cache = extend(task.model, params, chosen[:, None].astype(jnp.int32), place, cache)
        return (hidden[:, 0], cache), (chosen, jnp.take_along_axis(score, chosen[:, None], 1)[:, 0])

    _, (output, logp) = lax.scan(token, (hidden[:, -1], cache), jnp.arange(task.output))
    return output.T, logp.T


@functools.partial(jax.jit, static_argnums=0)
def score(task: Task, params: Any, prompt: jax.Array, output: jax.Array) -> jax.Array:
    """Log-probability of each token of given outputs."""
    whole = jnp.concatenate([prompt, output], axis=1)
    cache = init_cache(task.model, *whole.shape)
    hidden, _ = extend(task.model, params, whole, jnp.zeros(len(whole), jnp.int32), cache)
    scores = jax.nn.log_softmax(logits(task.model, params, hidden[:, prompt.shape[1] - 1 : -1]))
    return jnp.take_along_axis(scores, output[..., None], 2)[..., 0]


class Played(NamedTuple):
    """Rollouts of a batch of problems."""

    central: Sampled
    worker: Sampled
    outcome: Outcome


def play(task: Task, rules: Tables, asked: Problems, params: Any, worker: Any, key: jax.Array) -> Played:
    """The central agent with `params`, then the worker with its own."""
    first, second = jax.random.split(key)
    calls = Sampled(asked.prompt, *map(np.asarray, generate(task, params, asked.prompt, first)))
    prompt = worker_prompt(task, calls.output).astype(np.int32)
    answers = Sampled(prompt, *map(np.asarray, generate(task, worker, prompt, second)))
    return Played(calls, answers, outcome(task, rules, asked, calls.output, answers.output))


def repeated(asked: Problems, rollouts: int) -> Problems:
    """Each problem several times in a row."""
    return Problems(*(np.repeat(x, rollouts, axis=0) for x in asked))


def held_out(task: Task, rules: Tables, seed: int, params: Any, worker: Any, start: Any) -> dict[str, float]:
    """Scores on problems and with random numbers that are the same for every arm of a seed."""
    asked = problems(task, np.random.default_rng([seed, 2]), HELD_OUT)
    played = play(task, rules, asked, params, worker, jax.random.key(1000 + seed))
    calls = played.central
    kl = calls.logp - np.asarray(score(task, start, calls.prompt, calls.output))
    found = {name: float(value.mean()) for name, value in played.outcome._asdict().items()}
    return found | {"kl_action": float(kl[:, 0].mean()), "kl_args": float(kl[:, 1:].sum(axis=1).mean())}


def rules_of(task: Task, seed: int) -> Tables:
    """The tables of a seed."""
    return tables(task, np.random.default_rng([seed, 0]))


def warm_start(task: Task, seed: int) -> Any:
    """Parameters after supervised training on the expert, from the cache if they are there."""
    file = CACHE / f"{hash_of(task):08x}-{seed}.npz"
    if file.exists():
        with np.load(file) as stored:
            return unflatten_dict({name: jnp.asarray(stored[name]) for name in stored.files}, sep="/")
    params = _supervised(task, seed)
    CACHE.mkdir(exist_ok=True)
    np.savez(file, **{name: np.asarray(leaf) for name, leaf in flatten_dict(params, sep="/").items()})
    return params


def hash_of(task: Task) -> int:
    """The same number for the same task and warm start in every process."""
    return zlib.crc32(repr((task, WARM_STEPS, WARM_ROWS, WARM_RATE)).encode())


def _supervised(task: Task, seed: int) -> Any:
    rng, rules = np.random.default_rng([seed, 1]), rules_of(task, seed)
    rate = lambda step: WARM_RATE * jnp.minimum((step + 1) / 50, 1) * jnp.cos(jnp.pi / 2 * step / WARM_STEPS)
    optimizer = make_optimizer(learning_rate=rate, b1=0.9, b2=0.98, eps=1e-8, weight_decay=0.01, clip_norm=1.0)
    row_fn = decoder_row_fn(task.model, temperature=1.0, implementation="dense", remat="none", collect=None)
    state = init_state(init_params(task.model, jax.random.key(seed)), optimizer, Supervised())
    step = jax.jit(make_step(row_fn, optimizer, Supervised(), micro_rows=WARM_ROWS), donate_argnums=0)
    for i in range(WARM_STEPS):
        asked = problems(task, rng, WARM_ROWS)
        central, worker = expert(task, rules, asked, rng)
        nothing = np.zeros(central.shape, np.float32)
        batch = packed(
            Sampled(asked.prompt, central, nothing),
            Sampled(worker_prompt(task, central), worker, nothing),
            np.zeros(WARM_ROWS),
            1,
        )
        state, metrics = step(state, batch, np.int32(WARM_ROWS))
        if i % 100 == 99:
            print(f"    warm start {i + 1}: loss {float(metrics['loss']):.3f}", flush=True)
    return state.params
