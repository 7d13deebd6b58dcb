"""The warm start: rollouts of a scripted expert, captured like any others -> a model that imitates them."""

import asyncio
import itertools
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

from harnessrl_jax.checkpoints import Checkpoints
from harnessrl_jax.config import Config, Supervised
from harnessrl_jax.errors import ConfigError, PackingError
from harnessrl_jax.gateway import Store
from harnessrl_jax.launch.describe import plan
from harnessrl_jax.launch.examine import examine
from harnessrl_jax.launch.model import export, first_params, model_folder
from harnessrl_jax.launch.policy import make_sampler
from harnessrl_jax.launch.problems import Side, heldout_side, train_side
from harnessrl_jax.launch.run_folder import RunFolder, open_run
from harnessrl_jax.launch.services import Services, collect, open_pool, open_services
from harnessrl_jax.launch.text import text_codec
from harnessrl_jax.launch.trainer import make_trainer
from harnessrl_jax.models import DecoderConfig
from harnessrl_jax.monitor import SUPERVISED_COLUMNS, MetricsWriter, Progress, Summary, print_summary, read_metrics
from harnessrl_jax.tasks import ExpertSampler, TaskStream
from harnessrl_jax.training import TrainState
from harnessrl_jax.trajectories import (
    CreditedCall,
    PackedBatch,
    PackingReport,
    Rollout,
    build,
    build_lineage,
    build_targets,
    pack,
    supervised_calls,
)

ROLLOUTS_AT_ONCE = 256
SHOW_EVERY = 20


def warm_start(config: Config, run_dir: Path) -> int:
    """Collects the expert's rollouts, then trains on them. Continues where it stopped. Returns the exit status."""
    with open_run(run_dir, config) as folder:
        if (summary := folder.finished()) is not None:
            print_summary(Console(highlight=False), Summary.from_json(summary), folder.path)
            return 0
        source = model_folder(config)
        model, params = first_params(config, source)
        side, heldout = train_side(config, folder.path), heldout_side(config, folder.path)
        with Checkpoints(folder.checkpoints, config.checkpoint.keep) as checkpoints:
            shown = plan(config, folder.path, model, params, side, heldout, checkpoints.latest() or 0)
            with Progress(shown, columns=SUPERVISED_COLUMNS) as progress:
                bundles = _collect(config, folder, side, progress)
                trained = _fit(config, folder, model, params, bundles, checkpoints, progress)
                export(model, jax.device_get(trained.params), source, folder.model)
                summary = _examine(config, folder, model, trained.params, heldout, progress)
        folder.finish(summary.to_json())
        print_summary(Console(highlight=False), summary, folder.path)
    return 0


def _collect(config: Config, folder: RunFolder, side: Side, progress: Progress) -> list["Bundle"]:
    expert = ExpertSampler(model_folder(config))
    with open_services(config, folder, expert, text_codec(config)) as services:
        asyncio.run(gather(config, services, side, progress))
        with progress.phase("reading the rollouts back"):
            return verified(config, services.store)


async def gather(config: Config, services: Services, side: Side, progress: Progress) -> None:
    """Collects expert rollouts into the store until it holds as many as the configuration asks for."""
    wanted = _supervised(config).rollouts
    stream = TaskStream(side.tasks, config.seed)
    done = over(services.store.rollouts(), config.harness.max_attempts)
    async with open_pool(services, side) as pool:
        for start in range(0, wanted, ROLLOUTS_AT_ONCE):
            label = f"expert{start:06d}"
            tasks = stream.take(min(ROLLOUTS_AT_ONCE, wanted - start))
            if not all(f"{label}-{task.task_id}" in done for task in tasks):
                with progress.phase(f"the expert's rollouts {start + 1:,} to {start + len(tasks):,} of {wanted:,}"):
                    await collect(services, pool, side, tasks, label=label, group_size=1, version=0)


def over(rollouts: Iterable[Rollout], max_attempts: int) -> set[str]:
    """Groups of one rollout that will not be tried again; a killed process may have left others half way."""
    return {r.group_id for r in rollouts if r.status != "infra_failure" or r.attempt + 1 >= max_attempts}


def _fit(
    config: Config,
    folder: RunFolder,
    model: DecoderConfig,
    params: Any,
    bundles: Sequence["Bundle"],
    checkpoints: Checkpoints,
    progress: Progress,
) -> TrainState:
    trainer, state = make_trainer(config, model, params)
    step = checkpoints.latest() or 0
    if step:
        state, _ = checkpoints.restore(step, state)
    with MetricsWriter(folder.path, after_step=step) as metrics:
        for batch, report in itertools.islice(batches(config, bundles, step), config.steps - step):
            began_s = time.monotonic()
            state, numbers = trainer.run(state, batch, report.rows_used)
            step, seconds = step + 1, time.monotonic() - began_s
            numbers |= {
                "tokens_per_s": report.slots_used / seconds,
                "packing/fill": report.fill,
                "packing/reuse": report.reuse,
                "count/targets": report.targets_used,
                "time/training": seconds,
            }
            numbers |= {f"dropped/{reason}": drop.tokens for reason, drop in report.dropped.items()}
            metrics.write(step, numbers)
            if step % SHOW_EVERY == 0:
                progress.step(step, numbers)
            if step % config.checkpoint.every_steps == 0 or step == config.steps:
                checkpoints.save(step, state, {})
    return state


def _examine(
    config: Config, folder: RunFolder, model: DecoderConfig, params: Any, side: Side, progress: Progress
) -> Summary:
    """Asks the held-out questions of the trained policy itself."""
    sampler = make_sampler(config, model, folder)
    sampler.load_weights(params, config.steps)
    asking = progress.phase(f"asking {len(side.tasks)} held-out questions")
    with open_services(config, folder, sampler, text_codec(config)) as services, asking:
        result = asyncio.run(examine(services, folder, side, "after", config.steps))
    records = read_metrics(folder.path)
    return Summary.of_records(
        records,
        name=config.name,
        seed=config.seed,
        wall_s=sum(record["time/training"] for record in records),
        heldout_questions=result.questions,
        heldout_f1_start=None,
        heldout_f1_end=result.f1,
        heldout_em_start=None,
        heldout_em_end=result.em,
    )


class Bundle(NamedTuple):
    """The trained calls of one rollout."""

    calls: tuple[CreditedCall, ...]


def verified(config: Config, store: Store) -> list[Bundle]:
    """The rollouts to imitate: all that the verifier passed, and the configured share of the others."""
    wanted, rng = _supervised(config), random.Random(config.seed)
    kept = []
    for rollout in store.rollouts():
        if not rollout.rollout_id.startswith("expert"):
            continue
        solved = rollout.reward is not None and rollout.reward >= wanted.solved_reward
        if rollout.status == "completed" and (solved or rng.random() < wanted.keep_unsolved):
            calls = [stored.call for stored in store.calls(rollout.rollout_id, rollout.attempt)]
            kept.append(Bundle(supervised_calls([rollout], [build_lineage(calls)]).calls))
    return kept


def batches(config: Config, bundles: Sequence[Bundle], first_step: int) -> Iterator[tuple[PackedBatch, PackingReport]]:
    """Endless packed batches; every epoch holds every rollout once, in an order of its own."""
    size = _supervised(config).rollouts_per_step
    per_epoch = len(bundles) // size
    for step in itertools.count(first_step):
        epoch, place = divmod(step, per_epoch)
        order = np.random.default_rng([config.seed, epoch]).permutation(len(bundles))
        yield pack_bundles(config, [bundles[i] for i in order[place * size : (place + 1) * size]])


def pack_bundles(config: Config, bundles: Sequence[Bundle]) -> tuple[PackedBatch, PackingReport]:
    """All calls of a batch as one tree, so that what they share, such as system prompts, is computed once a row."""
    calls = [call for bundle in bundles for call in bundle.calls]
    tree, leaf = build([np.concatenate([call.call.prompt_ids, call.call.output_ids]) for call in calls])
    rollout = np.repeat(np.arange(len(bundles)), [len(bundle.calls) for bundle in bundles])
    targets = build_targets(
        tree, leaf, calls, call_number=np.arange(len(calls)), rollout_number=rollout, loss_mean=config.credit.mean
    )
    packing = config.packing
    batch, report = pack(
        [(tree, targets)], row_slots=packing.row_slots, row_targets=packing.row_targets, max_rows=packing.max_rows
    )
    if report.rows_wanted > packing.max_rows:
        raise PackingError(
            f"{len(bundles)} rollouts need {report.rows_wanted} rows, packing.max_rows is {packing.max_rows}. Raise "
            "it, or lower algorithm.rollouts_per_step."
        )
    return batch, report


def _supervised(config: Config) -> Supervised:
    if config.algorithm.kind != "supervised":
        raise ConfigError(f'algorithm.kind = "{config.algorithm.kind}"; the warm start needs "supervised".')
    return config.algorithm
