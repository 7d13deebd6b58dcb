"""Tasks through the real harness, the real gateway and the store; the scripted expert answers in the model's place."""

import asyncio
import contextlib
import os
import pathlib
import signal
import time

import pytest

import harnessrl_jax
from harnessrl_jax.errors import SamplerError
from harnessrl_jax.gateway import Gateway, Limits, Rollouts, SamplingPolicy, Server, Store, TextCodec, create_app
from harnessrl_jax.harnesses import multihop_command
from harnessrl_jax.rollouts import Effects, HarnessPool, Verdict, limits_reached, minimal_environment, run_groups
from harnessrl_jax.tasks import PERFECT, ExpertSampler, SearchIndex, best_f1, build_index, heldout_world
from harnessrl_jax.tasks.process import oracle_steps

FOLDER = pathlib.Path(harnessrl_jax.__file__).parent / "assets" / "quickstart"
POLICY = SamplingPolicy(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=200, context_tokens=2000)


class Expert(ExpertSampler):
    """The expert, with something that happens before each call."""

    async def before(self):
        pass

    async def complete(self, request):
        await self.before()
        return await super().complete(request)


class House:
    """Gateway, store and one warm harness process."""

    def __init__(self, folder, stack):
        self.store = stack.enter_context(contextlib.closing(Store(folder / "calls.sqlite")))
        server = stack.enter_context(Server())
        self.sampler = Expert(FOLDER, PERFECT)
        codec = TextCodec(FOLDER)
        gateway = Gateway(
            store=self.store, sampler=self.sampler, codec=codec, policy=POLICY, run_seed=0, clock=time.time
        )
        self.registry = Rollouts(self.store, server.url)
        server.start(create_app(gateway, self.registry, self.sampler))

    async def run(self, pool, tasks, label, *, group_size=1, max_calls=32, max_attempts=2):
        async def open_endpoint(identity):
            return self.registry.open(
                run_id=identity.run_id,
                task_id=identity.task_id,
                group_id=identity.group_id,
                rollout_id=identity.rollout_id,
                attempt=identity.attempt,
                harness=identity.harness,
                trainable_agents={"central"},
                limits=Limits(max_calls=max_calls),
            )

        async def close_endpoint(identity):
            close = self.registry.close
            return limits_reached(
                await asyncio.to_thread(close, identity.run_id, identity.rollout_id, identity.attempt)
            )

        effects = Effects(
            open_endpoint=open_endpoint,
            close_endpoint=close_endpoint,
            run_job=pool.run,
            verify=lambda task, identity, answer: Verdict(reward=best_f1(answer, task.answers)),
            record=self.store.put_rollout,
            clock=time.time,
        )
        return await run_groups(
            tasks,
            group_size=group_size,
            label=label,
            run_id="run",
            harness="multihop",
            version=0,
            max_attempts=max_attempts,
            effects=effects,
        )


async def scenario(house, pool, tasks):
    """Rollouts of four kinds in one warm process: good, cut off, the model failing, the harness killed."""
    seen = {"good": await house.run(pool, tasks, "good", group_size=2)}
    seen["cut"] = await house.run(pool, tasks[:1], "cut", max_calls=1)

    async def fail():
        raise SamplerError("no memory.")

    house.sampler.before = fail
    seen["failing"] = await house.run(pool, tasks[:1], "failing")

    async def kill_once():
        os.killpg(pool._shared[0].process.group, signal.SIGKILL)
        del house.sampler.before

    house.sampler.before = kill_once
    seen["killed"] = await house.run(pool, tasks[:1], "killed")
    return seen, dict(pool.counts)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """What became of the scenario: rollouts by kind, the pool's counts, the store."""
    folder = tmp_path_factory.mktemp("world")
    facts, tasks = heldout_world()
    build_index(facts, folder / "passages.sqlite")
    with contextlib.closing(SearchIndex(folder / "passages.sqlite")) as search:
        # The first of every template whose facts the search can find.
        findable = [task for task in reversed(tasks) if len(oracle_steps(task, search)) == task.hops]
    chosen = list({task.template: task for task in findable}.values())

    async def main(house):
        pool = HarnessPool(
            multihop_command(folder / "passages.sqlite", 16),
            workers=1,
            concurrency=16,
            deadline_s=120,
            environment=minimal_environment(os.environ),
            log_dir=folder / "logs",
        )
        async with pool:
            return await scenario(house, pool, chosen)

    with contextlib.ExitStack() as stack:
        house = House(folder, stack)
        seen, counts = asyncio.run(main(house))
        yield seen, counts, house.store, chosen


def test_perfect_play_earns_everything(world):
    seen, _, store, tasks = world
    assert [(r.status, r.reward) for r in seen["good"]] == [("completed", 1.0)] * 2 * len(tasks)
    assert {task.hops for task in tasks} >= {1, 2}
    for rollout in seen["good"]:
        calls = [stored.call for stored in store.calls(rollout.rollout_id, 0)]
        sessions = {call.session_id for call in calls}
        assert {call.agent for call in calls} == {"central", "researcher"}
        assert "central" in sessions
        assert all(name == "central" or name.startswith("researcher-") for name in sessions)
        assert all(call.delivered and call.parse_status == "ok" for call in calls)
        assert {call.trainable for call in calls if call.agent == "researcher"} == {False}


def test_the_call_limit_truncates_and_is_not_tried_again(world):
    (cut,) = world[0]["cut"]
    assert (cut.status, cut.attempt, cut.reward) == ("truncated", 0, 0.0)
    assert cut.detail == "limit: rollout_call_limit x1"


def test_a_failing_model_is_the_machines_failure(world):
    (failing,) = world[0]["failing"]
    assert (failing.status, failing.attempt, failing.reward) == ("infra_failure", 1, None)
    assert failing.detail.startswith("error: InternalServerError")
    assert "no memory." in failing.detail


def test_a_killed_harness_is_replaced_and_its_rollout_tried_again(world):
    seen, counts, store, _ = world
    (killed,) = seen["killed"]
    assert (killed.status, killed.attempt, killed.reward) == ("completed", 1, 1.0)
    first, second = (r for r in store.rollouts() if r.rollout_id == killed.rollout_id)
    assert (first.attempt, first.status, first.reward) == (0, "infra_failure", None)
    assert first.detail == "crash: worker-0 was ended by signal 9 (Killed)"
    assert second == killed
    assert counts["processes"] == 2  # the second try ran alone, in a process of its own
    assert counts["crash"] == 1
