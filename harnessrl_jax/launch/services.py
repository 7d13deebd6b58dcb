"""A Config, a sampler and a run folder -> running gateway and harness processes; tasks -> rollouts and lineages."""

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from harnessrl_jax.config import Config
from harnessrl_jax.gateway import (
    Endpoint,
    Gateway,
    Limits,
    Rollouts,
    SamplingPolicy,
    Server,
    Store,
    TextCodec,
    Traffic,
    create_app,
)
from harnessrl_jax.gateway.registry import random_key
from harnessrl_jax.launch.problems import Side
from harnessrl_jax.launch.run_folder import RunFolder
from harnessrl_jax.rollouts import (
    Effects,
    HarnessPool,
    Identity,
    Verdict,
    limits_reached,
    minimal_environment,
    run_groups,
)
from harnessrl_jax.sampler import Sampler
from harnessrl_jax.trajectories import Call, Lineage, Rollout, Task, build_lineage


class Services(NamedTuple):
    """What a run keeps open."""

    config: Config
    store: Store
    registry: Rollouts
    traffic: Traffic
    logs: Path


class Address(NamedTuple):
    """Where a gateway listens, and what harnesses need to call it.

    Attributes:
      host: an address of this machine.
      port: 0 takes any free one.
      public_url: address that harnesses use, if it is not the one that is listened on.
      make_key: makes the key of a rollout.
    """

    host: str = "127.0.0.1"
    port: int = 0
    public_url: str | None = None
    make_key: Callable[[], str] = random_key


LOCAL = Address()


class Collected(NamedTuple):
    """Rollouts of one step or examination, and the lineages of their last attempts."""

    rollouts: tuple[Rollout, ...]
    lineages: tuple[Lineage, ...]
    late: int
    """Requests that came for closed rollouts meanwhile; they were refused."""

    @property
    def calls(self) -> int:
        """Model calls of all of them."""
        return sum(len(lineage.calls) for lineage in self.lineages)

    @property
    def sampled_tokens(self) -> int:
        """Tokens the sampler produced for them."""
        return sum(len(item.call.output_ids) for lineage in self.lineages for item in lineage.calls)

    def counts(self) -> dict[str, int]:
        """What the harness did, as metrics: `lineage/...` as `Lineage.counts`, and `count/late_calls`."""
        total: Counter[str] = Counter()
        for lineage in self.lineages:
            total.update({f"lineage/{name}": number for name, number in lineage.counts().items()})
        return {**total, "count/late_calls": self.late}

    def mean_reward(self) -> float:
        """Mean reward; rollouts without one, which the machine failed, do not count. 0 if none has one."""
        rewards = [rollout.reward for rollout in self.rollouts if rollout.reward is not None]
        return sum(rewards) / len(rewards) if rewards else 0.0


@contextlib.contextmanager
def open_services(
    config: Config, folder: RunFolder, sampler: Sampler, codec: TextCodec, *, address: Address = LOCAL
) -> Iterator[Services]:
    """Starts gateway and store; both are closed at the end, the sampler with them."""
    store = Store(folder.store, run_id=config.name)
    with (
        contextlib.closing(store),
        Server(address.host, address.port, public=address.public_url is not None) as server,
    ):
        gateway = Gateway(
            store=store,
            sampler=sampler,
            codec=codec,
            policy=sampling_policy(config),
            run_seed=config.seed,
            clock=time.time,
        )
        registry = Rollouts(store, address.public_url or server.url, address.make_key)
        traffic = Traffic()
        server.start(create_app(gateway, registry, sampler, traffic=traffic))
        yield Services(config, store, registry, traffic, folder.logs)


def sampling_policy(config: Config) -> SamplingPolicy:
    """How model calls are sampled, for the gateway."""
    behaviour = config.behaviour
    return SamplingPolicy(
        temperature=behaviour.temperature,
        top_p=behaviour.top_p,
        top_k=behaviour.top_k,
        max_new_tokens=behaviour.max_new_tokens,
        context_tokens=behaviour.context_tokens,
    )


@contextlib.asynccontextmanager
async def open_pool(services: Services, side: Side) -> AsyncIterator[HarnessPool]:
    """Warm harness processes for one side's tasks."""
    harness = services.config.harness
    async with HarnessPool(
        side.command,
        workers=harness.workers,
        concurrency=harness.concurrency,
        deadline_s=harness.deadline_s,
        environment=minimal_environment(os.environ),
        log_dir=services.logs,
    ) as pool:
        yield pool


async def collect(
    services: Services,
    pool: HarnessPool,
    side: Side,
    tasks: Sequence[Task],
    *,
    label: str,
    group_size: int,
    version: int,
) -> Collected:
    """Runs every task `group_size` times and links the calls that came of it."""
    harness, late = services.config.harness, services.registry.counts()["late"]
    rollouts = await run_groups(
        tasks,
        group_size=group_size,
        label=label,
        run_id=services.config.name,
        harness=Path(side.command[1 if len(side.command) > 1 else 0]).stem,
        version=version,
        max_attempts=harness.max_attempts,
        effects=_effects(services, pool, side),
    )
    lineages = [build_lineage(calls) for rollout in rollouts if (calls := _calls(services.store, rollout))]
    return Collected(tuple(rollouts), tuple(lineages), services.registry.counts()["late"] - late)


def _effects(services: Services, pool: HarnessPool, side: Side) -> Effects:
    harness, registry, store = services.config.harness, services.registry, services.store
    limits = Limits(
        max_calls=harness.max_calls,
        max_new_tokens=services.config.behaviour.max_new_tokens,
        max_tokens=harness.max_tokens,
        max_concurrent=harness.max_concurrent_calls,
    )

    async def open_endpoint(identity: Identity) -> Endpoint:
        return await asyncio.to_thread(
            registry.open,
            run_id=identity.run_id,
            task_id=identity.task_id,
            group_id=identity.group_id,
            rollout_id=identity.rollout_id,
            attempt=identity.attempt,
            harness=identity.harness,
            trainable_agents=harness.trainable_agents,
            limits=limits,
        )

    async def close_endpoint(identity: Identity) -> str:
        counts = await asyncio.to_thread(registry.close, identity.run_id, identity.rollout_id, identity.attempt)
        return limits_reached(counts)

    def verify(task: Task, identity: Identity, answer: str | None) -> Verdict:
        return side.verify(task, answer, [stored.call for stored in store.calls(identity.rollout_id, identity.attempt)])

    return Effects(
        open_endpoint=open_endpoint,
        close_endpoint=close_endpoint,
        run_job=pool.run,
        verify=verify,
        record=store.put_rollout,
        clock=time.time,
    )


def _calls(store: Store, rollout: Rollout) -> list[Call]:
    return [stored.call for stored in store.calls(rollout.rollout_id, rollout.attempt)]
