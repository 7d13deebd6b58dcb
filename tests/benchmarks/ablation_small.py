"""Stage 1 of the ablation: every arm on the small task, a cell (regime, mode, arm, rate, seed) at a time.

All arms of a seed start from the same policy and see the same problems; the first batch is shown twice, to CAPO's probe
and then to the update, so all arms have the same number of rollouts and of updates.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ablation_arms import ARMS, Arm, Form, masks_of
from ablation_batch import packed
from ablation_policy import held_out, play, repeated, rules_of, warm_start
from ablation_task import Task, problems

from harnessrl_jax.capo import RELU, Statistic, UnitMap, adapter_units, decoder_units, default
from harnessrl_jax.models import adapted, init_adapters
from harnessrl_jax.training import (
    Policy,
    RowOutput,
    Step,
    TrainState,
    decoder_row_fn,
    init_state,
    make_optimizer,
    make_step,
)
from harnessrl_jax.training.rows import Row

GROUPS, ROLLOUTS, STEPS = 16, 8, 40
RANK = 4
RATE = 1e-3
"""The rate at which `plain` did best; see docs/results/capo.md."""
REGIMES: Mapping[str, Task] = {
    "base": Task(),
    "long args": Task(args=12),
    "many actions": Task(actions=16, cues=16),
    "wide": Task(width=64, mlp=128),
    "deep prefix": Task(filler=24),
    "shared tokens": Task(shared=True),
}
NOTHING = Statistic("hidden", lambda channel: channel)
"""Adapters have no activations to choose by: their row function reports zeros."""


class Cell(NamedTuple):
    """One run."""

    regime: str
    mode: Literal["central", "joint"]
    """Whether the worker is frozen at the start, or trained too."""
    arm: str
    rate: float
    seed: int


class Learner(NamedTuple):
    """What the cells of a form share: everything that is compiled."""

    step: Step
    init: Callable[[Any, float], TrainState]
    """(parameters, learning rate) -> the state; the rate is a part of it, so a sweep compiles nothing."""
    params: Callable[[Any, int], Any]
    """(warm start, seed) -> what is trained."""
    policy: Callable[[Any], Any]
    """What is trained -> the decoder's parameters."""


def run_cell(cell: Cell) -> dict[str, float]:
    """Trains a cell and measures it."""
    task, arm, rules = REGIMES[cell.regime], ARMS[cell.arm], rules_of(REGIMES[cell.regime], cell.seed)
    start = warm_start(task, cell.seed)
    learner = learner_of(task, arm.form)
    first = learner.params(start, cell.seed)
    worker = lambda params: learner.policy(params) if cell.mode == "joint" else start
    measure = lambda params: held_out(task, rules, cell.seed, learner.policy(params), worker(params), start)
    state, rng, log, seconds = learner.init(first, cell.rate), np.random.default_rng([cell.seed, 3]), [], []
    for i in range(STEPS):
        began = time.process_time()
        asked = repeated(problems(task, rng, GROUPS), ROLLOUTS)
        key = jax.random.key(cell.seed * 10_000 + i)
        played = play(task, rules, asked, learner.policy(state.params), worker(state.params), key)
        batch = packed(played.central, played.worker if cell.mode == "joint" else None, played.outcome.reward, ROLLOUTS)
        if i == 0:
            state = _with_partition(learner.step, state, batch, arm, cell.seed)
        state, metrics = learner.step(state, batch, np.int32(GROUPS))
        log.append({name: np.asarray(value) for name, value in metrics.items()} | played.outcome._asdict())
        seconds.append(time.process_time() - began)
    return _summary(measure(first), measure(state.params), log, first, state.params, float(np.median(seconds)))


def _with_partition(step: Step, state: TrainState, batch: Any, arm: Arm, seed: int) -> TrainState:
    """The same parameters with the arm's partition in force: the step only probes until there is one."""
    probed, _ = step(state, batch, np.int32(GROUPS))
    units = masks_of(arm, probed.capo, seed)
    return state._replace(capo=probed.capo._replace(units=units, active=jnp.ones((), bool), age=jnp.int32(0)))


def _summary(
    before: dict[str, float], after: dict[str, float], log: list[dict], first: Any, last: Any, seconds: float
) -> dict[str, float]:
    moved = [np.asarray(a != b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(last), strict=True)]
    found = {"before": before["reward"], "after": after["reward"]}
    found |= {f"{name}_before": before[name] for name in ("action", "args", "worker_action", "worker_args")}
    found |= {f"{name}_after": value for name, value in after.items() if name != "reward"}
    found["reward_area"] = float(np.mean([each["reward"].mean() for each in log]))
    found["moved"] = sum(each.sum() for each in moved) / sum(each.size for each in moved)
    for name in ("cosine", "cosine_shared", "cosine_action_only", "cosine_args_only"):
        if values := [float(each[f"capo/{name}"]) for each in log if each[f"capo/{name}_valid"]]:
            found[name] = float(np.mean(values))
    if "cosine" in found:
        for name in ("mass", "negative_layers", "retained_action", "retained_args", "norm_action", "norm_args"):
            found[name] = float(np.mean([each[f"capo/{name}"] for each in log]))
    found["jaccard"] = float(np.mean(log[-1]["capo/jaccard_layer"]))
    found["applied"] = float(np.sum([each["applied"] for each in log]))
    return {name: round(float(value), 6) for name, value in (found | {"step_cpu_s": seconds}).items()}


@functools.lru_cache(maxsize=16)
def learner_of(task: Task, form: Form) -> Learner:
    """The compiled parts of a form."""
    if form.adapters == "none":
        params, policy = (lambda start, seed: start), (lambda params: params)
        unit_map, statistic = decoder_units(task.layers, include_gate=True), RELU
    else:
        params = functools.partial(_adapters, two=form.adapters == "two")
        policy, statistic = jax.jit(_merged), NOTHING
        unit_map = adapter_units(jax.eval_shape(params, warm_start(task, 0), 0))
    fixed = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "clip_norm": 1.0}
    optimizer = optax.inject_hyperparams(make_optimizer, static_args=tuple(fixed))(learning_rate=RATE, **fixed)
    objective = Policy(clip_low=0.2, clip_high=0.28, capo=_settings(form, unit_map, statistic))
    row_fn = decoder_row_fn(
        task.model,
        temperature=1.0,
        implementation="dense",
        remat="none",
        collect=None if form.adapters != "none" else statistic.reads,
    )
    if form.adapters != "none":
        row_fn = functools.partial(_adapter_row, row_fn)
    step = jax.jit(make_step(row_fn, optimizer, objective, micro_rows=GROUPS))
    return Learner(step, lambda start, rate: _with_rate(init_state(start, optimizer, objective), rate), params, policy)


def _with_rate(state: TrainState, rate: float) -> TrainState:
    inner: Any = state.opt_state
    return state._replace(opt_state=inner._replace(hyperparams={"learning_rate": jnp.float32(rate)}))


def _settings(form: Form, unit_map: UnitMap, statistic: Statistic) -> Any:
    return dataclasses.replace(
        default(unit_map),
        statistic=statistic,
        score="contrast",
        top_fraction=form.top_fraction,
        warmup="probe",
        warmup_rollouts=1,
        warmup_steps=1,
        refresh_steps=form.refresh,
        ungated=form.ungated,
        denominator=form.denominator,
        routing=form.routing,
    )


def _adapters(start: Any, seed: int, *, two: bool) -> dict[str, Any]:
    """The frozen policy, and adapters of all its matrices that change nothing yet."""
    chosen = lambda path: path.endswith("/kernel")
    keys = jax.random.split(jax.random.key(seed), 2)
    if not two:
        return {"base": start, "action": init_adapters(start, keys[0], rank=2 * RANK, where=chosen)}
    each = [init_adapters(start, key, rank=RANK, where=chosen) for key in keys]
    return {"base": start, "action": each[0], "args": each[1]}


def _merged(params: dict[str, Any]) -> Any:
    return adapted(params["base"], *(params[name] for name in ("action", "args") if name in params), scale=2.0)


def _adapter_row(row_fn: Any, params: dict[str, Any], row: Row) -> RowOutput:
    output = row_fn(_merged(params), row)
    return RowOutput(output.logp, output.entropy, (jnp.zeros((len(row.target), 2)),))
