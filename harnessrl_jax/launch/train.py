"""The main job: rollouts through the harness -> credit -> one optimiser step -> new weights, again and again."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console

from harnessrl_jax import config as configuration
from harnessrl_jax.checkpoints import Checkpoints
from harnessrl_jax.config import Config
from harnessrl_jax.gateway import TextCodec
from harnessrl_jax.launch.agreement import check_agreement, check_logp_kinds
from harnessrl_jax.launch.credit import packed_step
from harnessrl_jax.launch.describe import plan
from harnessrl_jax.launch.examine import Examination, examine, views
from harnessrl_jax.launch.hosts import Hosts, Order
from harnessrl_jax.launch.model import export, first_params, model_folder
from harnessrl_jax.launch.policy import make_sampler
from harnessrl_jax.launch.problems import Side, heldout_side, train_side
from harnessrl_jax.launch.run_folder import RunFolder, open_run
from harnessrl_jax.launch.services import Collected, Services, collect, open_pool, open_services
from harnessrl_jax.launch.text import text_codec
from harnessrl_jax.launch.trainer import Trainer, make_trainer
from harnessrl_jax.models import DecoderConfig
from harnessrl_jax.monitor import MetricsWriter, Progress, Summary, print_summary, read_metrics, write_report
from harnessrl_jax.rollouts import refuse_lost
from harnessrl_jax.sampler import Sampler
from harnessrl_jax.tasks import TaskStream
from harnessrl_jax.training import TrainState
from harnessrl_jax.trajectories import PackedStep
from harnessrl_jax.trajectories.credit import group_report


def train(config: Config, run_dir: Path) -> int:
    """Runs, or goes on with, the training that the configuration describes. Returns the exit status."""
    hosts = Hosts()
    with hosts.failing_together(), open_run(run_dir, config) as folder:
        if (summary := folder.finished()) is not None:
            print_summary(Console(highlight=False), Summary.from_json(summary), folder.path)
        else:
            asyncio.run(_train(config, folder, hosts))
    hosts.tell(Order("stop"))
    return 0


class Run(NamedTuple):
    """What stays the same from step to step."""

    config: Config
    hosts: Hosts
    folder: RunFolder
    model: DecoderConfig
    codec: TextCodec
    trainer: Trainer
    sampler: Sampler
    services: Services
    checkpoints: Checkpoints


class Position(NamedTuple):
    """Where a run stands between two steps."""

    state: TrainState
    step: int
    stream: TaskStream
    elapsed_s: float


async def _train(config: Config, folder: RunFolder, hosts: Hosts) -> None:
    source = model_folder(config)
    model, params = first_params(config, source)
    trainer, state = make_trainer(config, model, params)
    codec, sampler = text_codec(config), make_sampler(config, model, folder)
    train_tasks, heldout = train_side(config, folder.path), heldout_side(config, folder.path)
    hosts.tell(Order("open"))
    with Checkpoints(folder.checkpoints, config.checkpoint.keep) as checkpoints:
        start = _restore(hosts, checkpoints, Position(state, 0, TaskStream(train_tasks.tasks, config.seed), 0.0))
        sampler.load_weights(_weights(hosts, trainer, start.state), start.step)
        with open_services(config, folder, sampler, codec) as services:
            run = Run(config, hosts, folder, model, codec, trainer, sampler, services, checkpoints)
            shown = plan(config, folder.path, model, params, train_tasks, heldout, start.step)
            with Progress(shown) as progress:
                summary = await _work(run, train_tasks, heldout, start, progress)
            _finish(run, heldout, summary)


def _restore(hosts: Hosts, checkpoints: Checkpoints, new: Position) -> Position:
    """The last checkpoint's position, or `new` where there is none."""
    step = checkpoints.latest()
    if step is None:
        return new
    hosts.tell(Order("restore", step))
    state, extra = checkpoints.restore(step, new.state)
    new.stream.set_state(extra["stream"])
    return Position(state, step, new.stream, extra["elapsed_s"])


def _weights(hosts: Hosts, trainer: Trainer, state: TrainState) -> Any:
    hosts.tell(Order("gather"))
    return trainer.weights(state)


def _save(run: Run, position: Position) -> None:
    extra = {"stream": position.stream.get_state(), "elapsed_s": position.elapsed_s}
    run.hosts.tell(Order("save", position.step))
    run.checkpoints.save(position.step, position.state, extra)


async def _work(run: Run, side: Side, heldout: Side, start: Position, progress: Progress) -> Summary:
    config, position, began_s = run.config, start, time.monotonic() - start.elapsed_s
    questions = f"asking {len(heldout.tasks)} held-out questions"
    with MetricsWriter(run.folder.path, after_step=start.step) as metrics:
        if start.step == 0:
            with progress.phase(f"{questions} before training"):
                await examine(run.services, run.folder, heldout, "before", 0)
        async with open_pool(run.services, side) as pool:
            while position.step < config.steps:
                position, numbers = await _step(run, side, pool, position, progress)
                position = position._replace(elapsed_s=time.monotonic() - began_s)
                metrics.write(position.step, numbers)
                progress.step(position.step, numbers)
                if position.step % config.checkpoint.every_steps == 0 or position.step == config.steps:
                    with progress.part("saving a checkpoint"):
                        _save(run, position)
        with progress.phase(f"{questions} after training"):
            await examine(run.services, run.folder, heldout, "after", position.step)
    weights = jax.device_get(_weights(run.hosts, run.trainer, position.state))
    export(run.model, weights, model_folder(config), run.folder.model)
    return _summary(run, time.monotonic() - began_s)


async def _step(
    run: Run, side: Side, pool: Any, position: Position, progress: Progress
) -> tuple[Position, dict[str, Any]]:
    """One step: collect, credit, pack, train, hand over the weights."""
    config, clock = run.config, Clock()
    with progress.part("rollouts"):
        tasks = position.stream.take(config.rollouts.groups)
        collected = await collect(
            run.services,
            pool,
            side,
            tasks,
            label=f"{position.step:05d}",
            group_size=config.rollouts.group_size,
            version=position.step,
        )
    refuse_lost(collected.rollouts)
    clock.lap("rollouts")
    packed = packed_step(config, collected.rollouts, collected.lineages)
    check_logp_kinds((credited.call for credited in packed.calls), config.behaviour.temperature)
    clock.lap("packing")
    with progress.part("training"):
        run.hosts.tell(Order("train", position.step, replayed=packed.batch.replayed))
        state, numbers = run.trainer.run(position.state, packed.batch, packed.report.rows_used)
        clock.lap("training")
        if position.step == 0:
            check_agreement(numbers)
        run.sampler.load_weights(_weights(run.hosts, run.trainer, state), position.step + 1)
        clock.lap("weights")
    numbers |= describe_step(collected, packed, clock.laps)
    return position._replace(state=state, step=position.step + 1), numbers


class Clock:
    """Seconds of the parts of a step."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        """Ends a part."""
        now = time.monotonic()
        self.laps[name] = now - self._last
        self._last = now


def describe_step(collected: Collected, packed: PackedStep, laps: Mapping[str, float]) -> dict[str, float]:
    """The numbers of a step that do not come from the device."""
    report, rewards = packed.report, [r.reward for r in collected.rollouts if r.reward is not None]
    seconds = sum(laps.values())
    numbers = {
        "reward": collected.mean_reward(),
        "f1": collected.mean_reward(),
        "solved": sum(reward == 1.0 for reward in rewards) / max(1, len(rewards)),
        "tokens_per_s": collected.sampled_tokens / seconds,
        "packing/fill": report.fill,
        "packing/reuse": report.reuse,
        "packing/rows": report.rows_used,
        "count/rollouts": len(collected.rollouts),
        "count/calls": collected.calls,
        "count/sampled_tokens": collected.sampled_tokens,
        "count/targets": report.targets_used,
    }
    numbers |= {f"groups/{name}": value for name, value in group_report(collected.rollouts)._asdict().items()}
    numbers |= collected.counts()
    numbers |= {f"dropped/{reason}": drop.tokens for reason, drop in report.dropped.items()}
    numbers |= {
        f"status/{s}": sum(r.status == s for r in collected.rollouts) for s in {r.status for r in collected.rollouts}
    }
    return numbers | {f"time/{name}": value for name, value in laps.items()}


def _summary(run: Run, wall_s: float) -> Summary:
    before, after = (Examination.read(run.folder, label) for label in ("before", "after"))
    return Summary.of_records(
        read_metrics(run.folder.path),
        name=run.config.name,
        seed=run.config.seed,
        wall_s=wall_s,
        heldout_questions=after.questions if after else 0,
        heldout_f1_start=before.f1 if before else None,
        heldout_f1_end=after.f1 if after else None,
        heldout_em_start=before.em if before else None,
        heldout_em_end=after.em if after else None,
    )


def _finish(run: Run, heldout: Side, summary: Summary) -> None:
    before, after = views(run.services.store, run.codec, heldout, ("before", "after"), run.config.evaluation.shown)
    write_report(
        run.folder.path,
        summary=summary,
        config=configuration.to_toml(run.config),
        before=before,
        after=after,
        about=run.config.about,
    )
    run.folder.finish(summary.to_json())
    print_summary(Console(highlight=False), summary, run.folder.path)
