import json

import pytest

from harnessrl_jax.errors import TaskError
from harnessrl_jax.tasks import TaskStream
from harnessrl_jax.trajectories.records import Task

TASKS = [
    Task(task_id=f"t{n}", question="q", answers=("a",), hops=1, chain=(), template="", split="train") for n in range(7)
]


def names(tasks):
    return [task.task_id for task in tasks]


def test_every_epoch_holds_every_task_once_in_an_order_of_its_own():
    drawn = names(TaskStream(TASKS, 3).take(21))
    epochs = [drawn[0:7], drawn[7:14], drawn[14:21]]
    assert [sorted(epoch) for epoch in epochs] == [names(TASKS)] * 3
    assert len({tuple(epoch) for epoch in [*epochs, names(TASKS)]}) == 4


def test_seeds_decide():
    assert names(TaskStream(TASKS, 3).take(14)) == names(TaskStream(TASKS, 3).take(14))
    assert names(TaskStream(TASKS, 3).take(14)) != names(TaskStream(TASKS, 4).take(14))


def test_a_resumed_stream_goes_on_exactly():
    stream = TaskStream(TASKS, 3)
    stream.take(10)
    state = json.loads(json.dumps(stream.get_state()))
    rest = names(stream.take(10))
    resumed = TaskStream(TASKS, 3)
    resumed.set_state(state)
    assert names(resumed.take(10)) == rest
    assert next(iter(resumed)).task_id in names(TASKS)


def test_a_state_of_other_tasks_is_refused():
    state = TaskStream(TASKS, 3).get_state()
    with pytest.raises(TaskError, match=r"state was taken with seed = 3, but this stream has 4"):
        TaskStream(TASKS, 4).set_state(state)
    with pytest.raises(TaskError, match=r"state was taken with tasks = .* same tasks in the same order"):
        TaskStream(TASKS[::-1], 3).set_state(state)
    with pytest.raises(TaskError, match=r"no tasks were given"):
        TaskStream([], 0)
