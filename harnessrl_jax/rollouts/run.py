"""Tasks -> scored rollouts, a group of each, through harness processes. What touches the world is passed in."""

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from harnessrl_jax.errors import HarnessRLError, RolloutError
from harnessrl_jax.rollouts.jobs import Job, Outcome
from harnessrl_jax.trajectories.records import Rollout, RolloutStatus, Task

PATH_SEGMENT = re.compile(r"[A-Za-z0-9._~-]+")
LIMITS = ("rollout_call_limit", "rollout_token_limit", "context_length_exceeded")


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Which attempt of which rollout of which group this is: the same in every run with the same tasks."""

    run_id: str
    task_id: str
    group_id: str
    rollout_id: str
    attempt: int
    harness: str


class Endpoint(Protocol):
    """Where a harness finds its model."""

    @property
    def base_url(self) -> str:
        """URL to which `/AGENT/v1` or `/v1` is added."""
        ...

    @property
    def api_key(self) -> str:
        """The secret of this attempt."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the verifier says: the outcome reward, and rewards of single calls by call id."""

    reward: float
    process_rewards: Mapping[str, float] = field(default_factory=dict)


class RunJob(Protocol):
    """Runs one job in a harness process; `HarnessPool.run`."""

    def __call__(self, job: Job, *, alone: bool) -> Awaitable[Outcome]:
        """The job's outcome; `alone` keeps other jobs out of its process."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Effects:
    """Everything that rollouts do to the world.

    Attributes:
      open_endpoint: makes the model reachable for one attempt.
      close_endpoint: ends that; later calls are refused. Gives back which limit made the endpoint refuse calls, or "";
        see `limits_reached`. A model that failed is no limit.
      run_job: runs the harness.
      verify: scores the answer of a closed attempt, or its lack (None).
      record: takes the record of every attempt, failed ones included, in order of completion.
      clock: the time in seconds.
    """

    open_endpoint: Callable[[Identity], Awaitable[Endpoint]]
    close_endpoint: Callable[[Identity], Awaitable[str]]
    run_job: RunJob
    verify: Callable[[Task, Identity, str | None], Verdict]
    record: Callable[[Rollout], None]
    clock: Callable[[], float]


async def run_groups(
    tasks: Sequence[Task],
    *,
    group_size: int,
    label: str,
    run_id: str,
    harness: str,
    version: int,
    max_attempts: int,
    effects: Effects,
) -> list[Rollout]:
    """Runs every task `group_size` times, all at once.

    A rollout whose machine failed (`infra_failure`) is tried again, alone in its process, up to `max_attempts` times in
    all. What the policy does wrong is never tried again: it has earned its reward.

    Args:
      tasks: the problems, each once.
      group_size: rollouts of each.
      label: the step, or the name of an evaluation; first part of the rollout ids `{label}-{task_id}-{k}`.
      run_id: the training run.
      harness: name of the program, for the records.
      version: number of the weights that answer.
      max_attempts: tries of one rollout, at least 1.
      effects: what touches the world.

    Returns:
      The last attempt of every rollout, in the order of the tasks.

    Raises:
      RolloutError: an id that cannot be part of a URL, a task given twice, or a harness that cannot be run at all.
      HarnessRLError: what `effects` raised first; everything else is cancelled.
    """
    rollouts = _identities(tasks, group_size, label, run_id, harness)
    _check(rollouts, max_attempts)
    by_id = {task.task_id: task for task in tasks}
    try:
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(_rollout(by_id[first.task_id], first, version, max_attempts, effects))
                for first in rollouts
            ]
    except* HarnessRLError as errors:
        raise _first(errors) from None
    return [task.result() for task in running]


def failure_counts(rollouts: Iterable[Rollout]) -> Counter[str]:
    """How often each failure occurred, as `status/reason`: `infra_failure/hang`, `policy_failure/gave_up`, ..."""
    return Counter(f"{r.status}/{r.detail.partition(':')[0]}" for r in rollouts if r.status != "completed")


def refuse_lost(rollouts: Sequence[Rollout]) -> None:
    """Stops where the machine failed every rollout of several tasks: the cause is not in a task, so the next fail too.

    One task alone may be what breaks the harness; its group is then left out, as always.

    Raises:
      RolloutError: nothing was rolled out.
    """
    tasks = {rollout.task_id for rollout in rollouts}
    if len(tasks) < 2 or any(rollout.status != "infra_failure" for rollout in rollouts):
        return
    reasons = ", ".join(f"{reason.partition('/')[2]} x{n}" for reason, n in failure_counts(rollouts).most_common())
    raise RolloutError(
        f"All {len(rollouts)} rollouts of {len(tasks)} tasks failed, and not because of the policy ({reasons}). The "
        f"last: {rollouts[-1].detail}. Find out whether the model still answers and the harness still runs; the same "
        "command then continues from the last checkpoint."
    )


def limits_reached(counts: Mapping[str, int]) -> str:
    """Which limits of the gateway a rollout ran into, from the counts that closing it gave; "" if none.

    >>> limits_reached({"calls": 4, "refused/rollout_call_limit": 2, "refused/sampler_failed": 1})
    'rollout_call_limit x2'
    """
    return ", ".join(f"{code} x{counts[key]}" for code in LIMITS if counts.get(key := f"refused/{code}"))


def classify(outcome: Outcome, refusal: str) -> tuple[RolloutStatus, str]:
    """The status of an attempt and the reason in words, `reason: text`; "" if it was completed.

    Args:
      outcome: how the job ended.
      refusal: why the endpoint refused calls, or "". A harness that did not answer after that was cut off, whatever
        became of it.
    """
    if outcome.status == "completed":
        return "completed", ""
    if refusal:
        return "truncated", f"limit: {refusal}"
    return outcome.status, f"{outcome.ending}: {outcome.detail}"


def _identities(tasks: Sequence[Task], group_size: int, label: str, run_id: str, harness: str) -> list[Identity]:
    """The first attempt of every rollout."""
    return [
        Identity(
            run_id=run_id,
            task_id=task.task_id,
            group_id=f"{label}-{task.task_id}",
            rollout_id=f"{label}-{task.task_id}-{k}",
            attempt=0,
            harness=harness,
        )
        for task in tasks
        for k in range(group_size)
    ]


async def _rollout(task: Task, first: Identity, version: int, max_attempts: int, effects: Effects) -> Rollout:
    """Attempts until one is not the machine's failure; the last one."""
    attempt = 0
    while True:
        rollout = await _attempt(task, replace(first, attempt=attempt), version, effects)
        effects.record(rollout)
        attempt += 1
        if rollout.status != "infra_failure" or attempt == max_attempts:
            return rollout


async def _attempt(task: Task, identity: Identity, version: int, effects: Effects) -> Rollout:
    started_s = effects.clock()
    endpoint = await effects.open_endpoint(identity)
    try:
        job = Job(
            job_id=f"{identity.rollout_id}/{identity.attempt}",
            question=task.question,
            base_url=endpoint.base_url,
            api_key=endpoint.api_key,
        )
        outcome = await effects.run_job(job, alone=identity.attempt > 0)
    finally:
        refusal = await effects.close_endpoint(identity)
    status, detail = classify(outcome, refusal)
    verdict = None if status == "infra_failure" else effects.verify(task, identity, outcome.answer)
    return Rollout(
        run_id=identity.run_id,
        task_id=identity.task_id,
        group_id=identity.group_id,
        rollout_id=identity.rollout_id,
        attempt=identity.attempt,
        harness=identity.harness,
        status=status,
        reward=None if verdict is None else verdict.reward,
        process_rewards={} if verdict is None else verdict.process_rewards,
        answer=outcome.answer,
        detail=detail,
        version=version,
        started_s=started_s,
        finished_s=effects.clock(),
    )


def _check(rollouts: Sequence[Identity], max_attempts: int) -> None:
    if max_attempts < 1:
        raise RolloutError(f"run_groups: max_attempts is {max_attempts}; a rollout needs at least 1.")
    for rollout_id, times in Counter(rollout.rollout_id for rollout in rollouts).items():
        if times > 1:
            raise RolloutError(f"run_groups: rollout {rollout_id!r} occurs {times} times; give each task once.")
    for name in {name for rollout in rollouts for name in (rollout.run_id, rollout.rollout_id)}:
        if not PATH_SEGMENT.fullmatch(name):
            raise RolloutError(
                f"run_groups: {name!r} becomes a part of a URL; use only letters, digits and . _ ~ - in run ids, "
                "labels and task ids."
            )


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
