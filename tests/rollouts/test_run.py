import asyncio
import dataclasses
import itertools
import types

import pytest

from harnessrl_jax.errors import RolloutError, StoreError
from harnessrl_jax.rollouts import Effects, Outcome, Verdict, classify, failure_counts, refuse_lost, run_groups
from harnessrl_jax.trajectories.records import Task

ENDINGS = ("error", "crash", "hang", "lost", "protocol")


def task(name):
    return Task(task_id=name, question=f"{name}?", answers=("yes",), hops=1, chain=(), template="", split="train")


@dataclasses.dataclass(frozen=True)
class Address:
    base_url: str
    api_key: str


class World:
    """Fake neighbours that write down, in order, what was done to them."""

    def __init__(self, endings=None, refusals=None):
        self.events, self.records, self.jobs = [], [], []
        self.endings = endings or {}
        self.refusals = refusals or {}
        self.ticks = itertools.count(100)

    async def open_endpoint(self, identity):
        self.events.append(("open", identity.rollout_id, identity.attempt))
        return Address(
            f"http://h/{identity.run_id}/{identity.rollout_id}/{identity.attempt}", f"key-{identity.attempt}"
        )

    async def close_endpoint(self, identity):
        self.events.append(("close", identity.rollout_id, identity.attempt))
        return self.refusals.get(identity.rollout_id, "")

    async def run_job(self, job, *, alone):
        self.jobs.append((job, alone))
        ending = self.endings.get(job.job_id, "completed")
        if isinstance(ending, Exception):
            raise ending
        return Outcome(ending=ending, answer="yes" if ending == "completed" else None, detail=f"it was {ending}")

    def verify(self, task, identity, answer):
        self.events.append(("verify", identity.rollout_id, identity.attempt))
        return Verdict(reward=float(answer in task.answers), process_rewards={f"{identity.rollout_id}-c0": 0.5})

    def run(self, *names, group_size=1, label="3", max_attempts=1):
        effects = Effects(
            open_endpoint=self.open_endpoint,
            close_endpoint=self.close_endpoint,
            run_job=self.run_job,
            verify=self.verify,
            record=self.records.append,
            clock=lambda: float(next(self.ticks)),
        )
        return asyncio.run(
            run_groups(
                [task(name) for name in names],
                group_size=group_size,
                label=label,
                run_id="run",
                harness="stub",
                version=7,
                max_attempts=max_attempts,
                effects=effects,
            )
        )


def test_groups_come_in_the_order_of_the_tasks_with_ids_that_never_vary():
    rollouts = World().run("b", "a", group_size=2)
    assert [(r.group_id, r.rollout_id) for r in rollouts] == [
        ("3-b", "3-b-0"),
        ("3-b", "3-b-1"),
        ("3-a", "3-a-0"),
        ("3-a", "3-a-1"),
    ]
    first = rollouts[0]
    assert (first.run_id, first.task_id, first.attempt, first.harness, first.version) == ("run", "b", 0, "stub", 7)
    assert (first.status, first.reward, first.answer, first.detail) == ("completed", 1.0, "yes", "")
    assert first.process_rewards == {"3-b-0-c0": 0.5}
    assert first.started_s < first.finished_s


def test_the_harness_gets_the_question_and_the_endpoint_of_its_attempt():
    world = World()
    world.run("t")
    ((job, alone),) = world.jobs
    assert (job.job_id, job.question, job.base_url, job.api_key) == ("3-t-0/0", "t?", "http://h/run/3-t-0/0", "key-0")
    assert not alone


def test_the_verdict_falls_when_the_endpoint_is_closed():
    world = World()
    world.run("t")
    assert [event for event, *_ in world.events] == ["open", "close", "verify"]


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_machines_failure_is_tried_again_alone_and_both_attempts_are_recorded(ending):
    world = World({"3-t-0/0": ending})
    (rollout,) = world.run("t", max_attempts=3)
    assert [(r.attempt, r.status, r.reward) for r in world.records] == [
        (0, "infra_failure", None),
        (1, "completed", 1.0),
    ]
    assert world.records[0].detail == f"{ending}: it was {ending}"
    assert rollout == world.records[1]
    assert [(job.base_url[-1], job.api_key, alone) for job, alone in world.jobs] == [
        ("0", "key-0", False),
        ("1", "key-1", True),
    ]


def test_attempts_end():
    world = World({f"3-t-0/{attempt}": "crash" for attempt in range(9)})
    (rollout,) = world.run("t", max_attempts=3)
    assert (rollout.attempt, rollout.status, rollout.reward, rollout.process_rewards) == (2, "infra_failure", None, {})
    assert len(world.records) == 3
    assert ("verify", "3-t-0", 2) not in world.events


def test_the_policys_failure_has_earned_its_reward():
    world = World({"3-t-0/0": "gave_up"})
    (rollout,) = world.run("t", max_attempts=3)
    assert (rollout.attempt, rollout.status, rollout.reward, rollout.answer) == (0, "policy_failure", 0.0, None)
    assert rollout.detail == "gave_up: it was gave_up"


def test_a_rollout_that_the_endpoint_cut_off_is_truncated_and_not_tried_again():
    world = World({"3-t-0/0": "error"}, refusals={"3-t-0": "33 calls of 32"})
    (rollout,) = world.run("t", max_attempts=3)
    assert (rollout.attempt, rollout.status, rollout.reward) == (0, "truncated", 0.0)
    assert rollout.detail == "limit: 33 calls of 32"


@pytest.mark.parametrize(
    ("ending", "refusal", "status"),
    [
        ("completed", "too many calls", "completed"),
        ("gave_up", "too many calls", "truncated"),
        ("crash", "too many calls", "truncated"),
        ("truncated", "", "truncated"),
        ("crash", "", "infra_failure"),
    ],
)
def test_an_answer_counts_even_after_a_refusal(ending, refusal, status):
    answer = "yes" if ending == "completed" else None
    assert classify(Outcome(ending=ending, answer=answer, detail="d"), refusal)[0] == status


def test_failures_are_counted_by_reason():
    world = World({"3-a-0/0": "gave_up", "3-b-0/0": "hang", "3-c-0/0": "hang", "3-d-0/0": "truncated"})
    counts = failure_counts(world.run("a", "b", "c", "d", "e"))
    assert counts == {"policy_failure/gave_up": 1, "infra_failure/hang": 2, "truncated/truncated": 1}


def test_where_everything_fails_nobody_goes_on():
    ends = {f"3-{name}-{k}/0": "error" for name in "ab" for k in (0, 1)} | {"3-b-0/0": "hang"}
    lost = World(ends).run("a", "b", group_size=2)
    message = r"All 4 rollouts of 2 tasks failed, .*\(error x3, hang x1\)\. The last: error: it was error\. Find out"
    with pytest.raises(RolloutError, match=message):
        refuse_lost(lost)
    # One task may break the harness, and what the policy failed was rolled out.
    refuse_lost(lost[:2])
    refuse_lost(World(ends | {"3-b-1/0": "gave_up"}).run("a", "b", group_size=2))
    refuse_lost([])


def test_a_harness_that_cannot_run_ends_the_run_and_closes_every_endpoint():
    world = World({"3-a-1/0": RolloutError("it keeps dying")})
    with pytest.raises(RolloutError, match=r"^it keeps dying$"):
        world.run("a", "b", group_size=2)
    opened = {event[1:] for event in world.events if event[0] == "open"}
    assert len(opened) == 4
    assert opened == {event[1:] for event in world.events if event[0] == "close"}


def test_an_outcome_that_cannot_be_stored_ends_the_run_with_its_own_words():
    world = World()
    never = asyncio.Event()

    async def run_job(job, *, alone):
        if job.job_id != "3-a-0/0":
            await never.wait()
        return Outcome(ending="completed", answer="yes", detail="")

    def record(rollout):
        raise StoreError("the disk is full")

    world.run_job = run_job
    world.records = types.SimpleNamespace(append=record)
    with pytest.raises(StoreError, match=r"^the disk is full$"):
        world.run("a", "b", group_size=2)
    opened = {event[1:] for event in world.events if event[0] == "open"}
    assert opened == {event[1:] for event in world.events if event[0] == "close"}


def test_all_rollouts_run_at_once():
    world = World()
    meeting = asyncio.Barrier(4)

    async def run_job(job, *, alone):
        await asyncio.wait_for(meeting.wait(), 10)
        return Outcome(ending="completed", answer="yes", detail="")

    world.run_job = run_job
    assert len(world.run("a", "b", group_size=2)) == 4


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["a", "a"], {}, r"rollout '3-a-0' occurs 2 times; give each task once"),
        (["a/b"], {}, r"'3-a/b-0' becomes a part of a URL; use only letters, digits"),
        (["a"], {"label": "Schritt ü"}, "becomes a part of a URL"),
        (["a"], {"max_attempts": 0}, "max_attempts is 0"),
    ],
)
def test_impossible_requests_are_refused_before_anything_happens(names, options, message):
    world = World()
    with pytest.raises(RolloutError, match=message):
        world.run(*names, **options)
    assert world.events == []
