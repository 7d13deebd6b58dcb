"""Tasks and a seed -> an endless, shuffled stream of tasks that can stop and go on anywhere. Grain shuffles."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import grain

from harnessrl_jax.errors import TaskError
from harnessrl_jax.trajectories.records import Task


class TaskStream(Iterator[Task]):
    """Every epoch holds every task once, in an order of its own; the order depends on the seed and the epoch alone.

    Args:
      tasks: at least one.
      seed: any integer from 0.

    Raises:
      TaskError: no tasks.
    """

    def __init__(self, tasks: Sequence[Task], seed: int):
        if not tasks:
            raise TaskError("TaskStream: no tasks were given; a stream needs at least one. Check the task source.")
        self._order = grain.MapDataset.source(range(len(tasks))).seed(seed).shuffle().repeat()
        self._tasks = tasks
        self._position = 0
        names = "\n".join(task.task_id for task in tasks)
        self._identity = {"seed": seed, "tasks": hashlib.sha256(names.encode()).hexdigest()}

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Task:
        index = self._order[self._position]
        assert index is not None  # only a filtered dataset has gaps
        self._position += 1
        return self._tasks[index]

    def take(self, count: int) -> list[Task]:
        """The next `count` tasks, all different: where fewer are left in an epoch, the next one begins.

        Raises:
          TaskError: there are fewer tasks than that.
        """
        if count > len(self._tasks):
            raise TaskError(
                f"TaskStream.take: {count} different tasks were asked for, but there are {len(self._tasks)}."
            )
        if self._position % len(self._tasks) + count > len(self._tasks):
            self._position += -self._position % len(self._tasks)
        return [next(self) for _ in range(count)]

    def get_state(self) -> dict[str, Any]:
        """Where the stream stands, as JSON values."""
        return {"position": self._position, **self._identity}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on where `get_state` was taken.

        Raises:
          TaskError: the state belongs to another seed or other tasks.
        """
        for key, value in self._identity.items():
            if state.get(key) != value:
                raise TaskError(
                    f"TaskStream.set_state: the state was taken with {key} = {state.get(key)!r}, but this stream has "
                    f"{value!r}. Resume with the same tasks in the same order and the same seed."
                )
        self._position = int(state["position"])
