import itertools
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


def draw(stream, count):
    return names(itertools.islice(stream, count))


def test_every_epoch_holds_every_task_once_in_an_order_of_its_own():
    drawn = draw(TaskStream(TASKS, 3), 21)
    epochs = [drawn[0:7], drawn[7:14], drawn[14:21]]
    assert [sorted(epoch) for epoch in epochs] == [names(TASKS)] * 3
    assert len({tuple(epoch) for epoch in [*epochs, names(TASKS)]}) == 4


def test_seeds_decide():
    assert draw(TaskStream(TASKS, 3), 14) == draw(TaskStream(TASKS, 3), 14)
    assert draw(TaskStream(TASKS, 3), 14) != draw(TaskStream(TASKS, 4), 14)


def test_a_resumed_stream_goes_on_exactly():
    stream = TaskStream(TASKS, 3)
    draw(stream, 10)
    state = json.loads(json.dumps(stream.get_state()))
    rest = draw(stream, 10)
    resumed = TaskStream(TASKS, 3)
    resumed.set_state(state)
    assert draw(resumed, 10) == rest


def test_tasks_taken_together_are_different():
    stream = TaskStream(TASKS, 3)
    plain = draw(TaskStream(TASKS, 3), 21)
    # 5 of the first 7, then 5 of the second, then 2 more of it: the 2 left of the first are passed over.
    assert [names(stream.take(count)) for count in (5, 5, 2, 7)] == [
        plain[0:5],
        plain[7:12],
        plain[12:14],
        plain[14:21],
    ]
    with pytest.raises(TaskError, match=r"8 different tasks were asked for, but there are 7"):
        stream.take(8)


def test_a_state_of_other_tasks_is_refused():
    state = TaskStream(TASKS, 3).get_state()
    with pytest.raises(TaskError, match=r"state was taken with seed = 3, but this stream has 4"):
        TaskStream(TASKS, 4).set_state(state)
    with pytest.raises(TaskError, match=r"state was taken with tasks = .* same tasks in the same order"):
        TaskStream(TASKS[::-1], 3).set_state(state)
    with pytest.raises(TaskError, match=r"no tasks were given"):
        TaskStream([], 0)
