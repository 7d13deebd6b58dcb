"""A harness command -> a pool of warm processes that turns jobs into outcomes."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from harnessrl_jax.errors import RolloutError
from harnessrl_jax.rollouts.jobs import Job, Outcome, Reported
from harnessrl_jax.rollouts.process import CappedLog, HarnessProcess
from harnessrl_jax.rollouts.reaper import Reaper

REPORTED: frozenset[str] = frozenset(Reported.__args__)


class _Worker:
    """A place in the pool: a process, replaced when it ends."""

    def __init__(self, name: str, log: CappedLog):
        self.name = name
        self.log = log
        self.process: HarnessProcess | None = None
        self.load = 0
        self.lock = asyncio.Lock()


class HarnessPool:
    """Runs jobs in warm harness processes; an `async with` block starts and ends them.

    A job runs beside others in a shared process, or alone in a process that no other job can take down: run what failed
    once alone, and the next failure is its own. A process that ends is replaced when the next job needs it. Nothing the
    pool started survives it: not the block's end, not Ctrl-C, not `kill -9` of this process.

    The pool belongs to the event loop it was started in.

    Args:
      command: the harness program and its arguments; see `jobs` for what it reads and prints.
      workers: shared processes; as many more are started for jobs that run alone, when there are any.
      concurrency: jobs at a time in one shared process.
      deadline_s: time for one job, from when a process takes it.
      environment: all variables the program sees; see `minimal_environment`.
      log_dir: folder for the processes' stderr, one file a worker.
      max_log_bytes: size of one such file.
      max_deaths: processes that may end, one after the other, without a single result between them.
      grace_s: time an idle process is given to end by itself.

    Attributes:
      counts: jobs by ending, and `processes` started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        workers: int,
        concurrency: int,
        deadline_s: float,
        environment: Mapping[str, str],
        log_dir: Path,
        max_log_bytes: int = 1 << 20,
        max_deaths: int = 16,
        grace_s: float = 2.0,
    ):
        if not command or workers < 1 or concurrency < 1 or deadline_s <= 0:
            raise RolloutError(
                f"HarnessPool: got command {list(command)}, workers {workers}, concurrency {concurrency}, deadline_s "
                f"{deadline_s}. Give a program, at least 1 worker, at least 1 job at a time and a positive deadline."
            )
        self.counts: Counter[str] = Counter()
        self._command = tuple(command)
        self._workers, self._concurrency, self._deadline_s = workers, concurrency, deadline_s
        self._environment = dict(environment)
        self._log_dir, self._max_log_bytes = log_dir, max_log_bytes
        self._max_deaths, self._grace_s = max_deaths, grace_s
        self._deaths = 0
        self._closed = False

    async def __aenter__(self) -> Self:
        self._reaper = Reaper()
        self._shared = self._places("worker", self._workers)
        self._alone = self._places("alone", self._workers)
        self._shared_slots = asyncio.Semaphore(self._workers * self._concurrency)
        self._alone_slots = asyncio.Semaphore(self._workers)
        async with AsyncExitStack() as on_failure:
            on_failure.push_async_callback(self.close)
            for worker in self._shared:
                await self._process(worker)
            on_failure.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def run(self, job: Job, *, alone: bool = False) -> Outcome:
        """Runs a job when there is room for it.

        Args:
          job: the job; its id must be new to the pool.
          alone: in a process that holds no other job.

        Returns:
          How it ended. A harness that fails, dies, hangs or talks nonsense is an outcome, not an error.

        Raises:
          RolloutError: the program cannot be started, or keeps dying without ever finishing a job.
        """
        slots, workers = (self._alone_slots, self._alone) if alone else (self._shared_slots, self._shared)
        async with slots:
            worker = min(workers, key=lambda worker: worker.load)
            worker.load += 1
            try:
                process = await self._process(worker)
                outcome = await process.run(job, self._deadline_s)
            finally:
                worker.load -= 1
        self.counts[outcome.ending] += 1
        if outcome.ending in REPORTED:
            self._deaths = 0
        return outcome

    async def close(self) -> None:
        """Ends all processes; jobs still running end as `lost`. Idempotent."""
        self._closed = True
        workers = [*self._shared, *self._alone]
        await asyncio.gather(*(worker.process.close(self._grace_s) for worker in workers if worker.process is not None))
        for worker in workers:
            worker.log.close()
        self._reaper.close()

    def _places(self, kind: str, count: int) -> list[_Worker]:
        names = [f"{kind}-{index}" for index in range(count)]
        return [_Worker(name, CappedLog(self._log_dir / f"{name}.log", self._max_log_bytes)) for name in names]

    async def _process(self, worker: _Worker) -> HarnessProcess:
        """The worker's process; a new one if there is none that takes jobs."""
        async with worker.lock:
            if worker.process is not None and not worker.process.ending:
                return worker.process
            if worker.process is not None:
                await worker.process.gone
                self._refuse_endless_deaths(worker.process)
            if self._closed:
                raise RolloutError(
                    "HarnessPool: a job was given to a closed pool. Run jobs inside its `async with` block."
                )
            worker.process = await HarnessProcess.start(
                self._command, name=worker.name, environment=self._environment, log=worker.log, on_gone=self._gone
            )
            self.counts["processes"] += 1
            self._watch(worker.process)
            return worker.process

    def _watch(self, process: HarnessProcess) -> None:
        try:
            self._reaper.watch(process.group)
        except BrokenPipeError as error:
            raise RolloutError(
                "HarnessPool: its reaper process was ended by somebody, so harness processes might outlive this one. "
                "Start the pool again."
            ) from error

    def _gone(self, process: HarnessProcess) -> None:
        self._reaper.forget(process.group)
        self._deaths += 1

    def _refuse_endless_deaths(self, process: HarnessProcess) -> None:
        if self._deaths > self._max_deaths:
            raise RolloutError(
                f"Harness command {' '.join(self._command)!r}: {self._deaths} processes in a row ended without a "
                f"result. The last: {process.last_words}. Run the command by hand and give it a job line on stdin."
            )
