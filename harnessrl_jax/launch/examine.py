"""Held-out questions and a policy -> scores, kept in the run folder; and rollouts to show."""

import json
from collections.abc import Sequence
from typing import NamedTuple, Self

from harnessrl_jax.gateway import Store, TextCodec
from harnessrl_jax.launch.problems import Side
from harnessrl_jax.launch.run_folder import RunFolder, write_whole
from harnessrl_jax.launch.services import Services, collect, open_pool
from harnessrl_jax.monitor import RolloutView, view
from harnessrl_jax.tasks import best_exact_match
from harnessrl_jax.trajectories import Call, Rollout, build_lineage


class Examination(NamedTuple):
    """What a policy scored, each question asked once and sampled as in training."""

    label: str
    version: int
    questions: int
    f1: float
    em: float
    f1_by_hops: dict[str, float]
    failed: int
    """Questions without a score because the machine failed."""

    @classmethod
    def read(cls, folder: RunFolder, label: str) -> Self | None:
        """The examination of that label, if it was finished in an earlier life of the run."""
        path = folder.path / f"{label}.json"
        return cls(**json.loads(path.read_text())) if path.exists() else None


async def examine(services: Services, folder: RunFolder, side: Side, label: str, version: int) -> Examination:
    """Asks every question of the side once. The result is kept in `LABEL.json`; a finished one is not repeated."""
    if (before := Examination.read(folder, label)) is not None:
        return before
    async with open_pool(services, side) as pool:
        collected = await collect(services, pool, side, side.tasks, label=label, group_size=1, version=version)
    result = score(side, collected.rollouts, label, version)
    write_whole(folder.path / f"{label}.json", json.dumps(result._asdict(), indent=2) + "\n")
    return result


def score(side: Side, rollouts: Sequence[Rollout], label: str, version: int) -> Examination:
    """Means over the rollouts that have a reward."""
    pairs = [(task, rollout) for task, rollout in zip(side.tasks, rollouts, strict=True) if rollout.reward is not None]
    hops = sorted({task.hops for task, _ in pairs})
    return Examination(
        label=label,
        version=version,
        questions=len(pairs),
        f1=_mean([rollout.reward or 0.0 for _, rollout in pairs]),
        em=_mean([best_exact_match(rollout.answer, task.answers) for task, rollout in pairs]),
        f1_by_hops={str(n): _mean([rollout.reward or 0.0 for task, rollout in pairs if task.hops == n]) for n in hops},
        failed=len(rollouts) - len(pairs),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def views(store: Store, codec: TextCodec, side: Side, labels: tuple[str, str], shown: int) -> list[list[RolloutView]]:
    """The same few questions in two examinations, those first whose score rose most."""
    by_task = [{rollout.task_id: rollout for rollout in _of(store, label)} for label in labels]
    tasks = [task for task in side.tasks if all(task.task_id in rollouts for rollouts in by_task)]
    rise = lambda task: (by_task[1][task.task_id].reward or 0.0) - (by_task[0][task.task_id].reward or 0.0)
    # A long chain that was learnt tells more than a short one; sorting is stable, so equal ones keep their order.
    chosen = sorted(tasks, key=lambda task: (-rise(task), -task.hops))[:shown]
    decode = codec.decode
    return [
        [
            view(rollout, build_lineage(calls) if (calls := _calls(store, rollout)) else None, decode, task=task)
            for task in chosen
            for rollout in [rollouts[task.task_id]]
        ]
        for rollouts in by_task
    ]


def _of(store: Store, label: str) -> list[Rollout]:
    return [rollout for rollout in store.rollouts() if rollout.rollout_id.startswith(f"{label}-")]


def _calls(store: Store, rollout: Rollout) -> list[Call]:
    return [stored.call for stored in store.calls(rollout.rollout_id, rollout.attempt)]
