"""A Config -> tasks to train on and to be examined on, what the search tool knows, and how answers are scored."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from harnessrl_jax.config import Config
from harnessrl_jax.errors import ConfigError
from harnessrl_jax.harnesses import multihop_command
from harnessrl_jax.rollouts import Verdict
from harnessrl_jax.tasks import (
    JsonLinesSource,
    SearchIndex,
    TaskSource,
    TfdsSource,
    World,
    best_f1,
    build_index,
    heldout_world,
    process_rewards,
    training_world,
)
from harnessrl_jax.trajectories import Call, Task


class Side(NamedTuple):
    """One side of the split: its tasks, and the harness that works on them."""

    tasks: tuple[Task, ...]
    command: tuple[str, ...]
    search: SearchIndex | None
    """The harness's search tool, to credit calls that found something; None with a harness of the user's own."""

    def verify(self, task: Task, answer: str | None, calls: Sequence[Call]) -> Verdict:
        """The score of a rollout: token F1 of its answer, and process rewards of its calls."""
        process = process_rewards(task, calls, self.search) if self.search is not None else {}
        return Verdict(reward=best_f1(answer, task.answers), process_rewards=process)


def train_side(config: Config, folder: Path) -> Side:
    """The tasks to learn from. Raises ConfigError or TaskError."""
    if config.task.source != "factbook":
        return _own(config, "train")
    return _bundled(config, _training_world(config), folder / "passages-train.sqlite")


def heldout_side(config: Config, folder: Path) -> Side:
    """The tasks of the examination: as many as the configuration asks. Raises ConfigError or TaskError."""
    if config.task.source != "factbook":
        side = _own(config, "heldout")
    else:
        side = _bundled(config, heldout_world(), folder / "passages-heldout.sqlite")
    if len(side.tasks) < config.evaluation.questions:
        raise ConfigError(
            f"evaluation.questions = {config.evaluation.questions}, but there are {len(side.tasks)} held-out questions."
        )
    return side._replace(tasks=side.tasks[: config.evaluation.questions])


def known_tasks(config: Config) -> dict[str, Task]:
    """Every task of the embedded source by id, to show what was asked; empty for a source of the user's own."""
    if config.task.source != "factbook":
        return {}
    return {task.task_id: task for task in (*_training_world(config).tasks, *heldout_world().tasks)}


def _training_world(config: Config) -> World:
    return training_world(
        invented_countries=config.task.invented_countries, invented_per_template=config.task.invented_per_template
    )


def _bundled(config: Config, world: World, index: Path) -> Side:
    if config.harness.command:
        return Side(world.tasks, config.harness.command, None)
    if not index.exists():
        build_index(world.facts, index)
    return Side(world.tasks, multihop_command(index, config.harness.concurrency), SearchIndex(index))


def _own(config: Config, split: str) -> Side:
    if not config.harness.command:
        raise ConfigError(
            f'task.source = "{config.task.source}" needs harness.command: the bundled harness can search only the '
            "World Factbook. Give the program that answers your questions."
        )
    path, heldout = str(config.task.path), config.task.heldout_path
    source: TaskSource
    if config.task.source == "jsonl":
        source = JsonLinesSource(path=path, heldout_path=heldout)
    else:
        source = TfdsSource(name=path, heldout_split=heldout)
    return Side(tuple(source.tasks(split)), config.harness.command, None)
