"""The warm start: rollouts of a scripted expert, captured like any others -> a model that imitates them."""

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from harnessrl_jax.config import Config, Supervised
from harnessrl_jax.errors import ConfigError
from harnessrl_jax.launch.problems import Side
from harnessrl_jax.launch.services import Services, collect, open_pool
from harnessrl_jax.tasks import TaskStream
from harnessrl_jax.trajectories import (
    CreditedCall,
    PackedBatch,
    PackingReport,
    build,
    build_lineage,
    build_targets,
    pack,
    supervised_calls,
)

ROLLOUTS_AT_ONCE = 256


async def gather(config: Config, services: Services, side: Side) -> None:
    """Collects expert rollouts into the store until it holds as many as the configuration asks for."""
    wanted = _supervised(config).rollouts
    stream = TaskStream(side.tasks, config.seed)
    done = {rollout.group_id for rollout in services.store.rollouts()}
    async with open_pool(services, side) as pool:
        for start in range(0, wanted, ROLLOUTS_AT_ONCE):
            label = f"expert{start:06d}"
            tasks = stream.take(min(ROLLOUTS_AT_ONCE, wanted - start))
            if not all(f"{label}-{task.task_id}" in done for task in tasks):
                await collect(services, pool, side, tasks, label=label, group_size=1, version=0)
                print(f"{start + len(tasks)} rollouts", time.time(), flush=True)


class Bundle(NamedTuple):
    """The trained calls of one rollout."""

    calls: tuple[CreditedCall, ...]


def verified(config: Config, services: Services) -> list[Bundle]:
    """The rollouts to imitate: all that the verifier passed, and the configured share of the others."""
    wanted, rng = _supervised(config), random.Random(config.seed)
    kept = []
    for rollout in services.store.rollouts():
        solved = rollout.reward is not None and rollout.reward >= wanted.solved_reward
        if rollout.status == "completed" and (solved or rng.random() < wanted.keep_unsolved):
            calls = [stored.call for stored in services.store.calls(rollout.rollout_id, rollout.attempt)]
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
    return pack(
        [(tree, targets)], row_slots=packing.row_slots, row_targets=packing.row_targets, max_rows=packing.max_rows
    )


def _supervised(config: Config) -> Supervised:
    if config.algorithm.kind != "supervised":
        raise ConfigError(f'algorithm.kind = "{config.algorithm.kind}"; the warm start needs "supervised".')
    return config.algorithm
