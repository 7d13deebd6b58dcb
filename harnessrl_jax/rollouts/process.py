"""A command -> one running harness process; jobs in, outcomes out, whatever becomes of the process."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from harnessrl_jax.errors import RolloutError
from harnessrl_jax.rollouts.jobs import Job, Outcome, read_result

STDERR = 2
MAX_LINE_BYTES = 1 << 20
TAIL_BYTES = 2000
PIPES_GRACE_S = 1.0
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")


def minimal_environment(source: Mapping[str, str]) -> dict[str, str]:
    """The variables of `source` that programs need to run: no keys, no proxies, no Python settings.

    >>> minimal_environment({"PATH": "/bin", "OPENAI_API_KEY": "secret"})
    {'PATH': '/bin'}
    """
    return {name: source[name] for name in KEPT_VARIABLES if name in source}


class CappedLog:
    """A file that takes what processes say on stderr, up to a size; the last words are kept in memory too."""

    def __init__(self, path: Path, max_bytes: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("ab")
        self._room = max_bytes - self._file.tell()
        self._tail = b""

    def write(self, data: bytes) -> None:
        """Adds to the tail, and to the file while there is room."""
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        if self._room > 0:
            self._file.write(data[: self._room])
            self._room -= len(data)
            if self._room <= 0:
                self._file.write(b"\n[the log is full; the rest is dropped]\n")
            self._file.flush()

    def tail(self) -> str:
        """The last words since `turn_page`."""
        return self._tail.decode(errors="replace").strip()

    def turn_page(self) -> None:
        """A new process starts: its tail is empty."""
        self._tail = b""

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class HarnessProcess(asyncio.SubprocessProtocol):
    """One harness program in a process group of its own, and the jobs it holds.

    It belongs to the event loop that started it. When the process ends, for whatever reason, every job it holds ends
    with an outcome; nothing waits for ever.
    """

    def __init__(self, name: str, log: CappedLog, on_gone: Callable[["HarnessProcess"], None]):
        self.name = name
        self.ending = False
        """True once no new job may be given to it."""
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.last_words = ""
        self._log = log
        self._on_gone = on_gone
        self._jobs: dict[str, asyncio.Future[Outcome]] = {}
        self._abandoned: set[str] = set()
        self._buffer = b""
        self._killed = False
        self._pipes_timer: asyncio.TimerHandle | None = None

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        name: str,
        environment: Mapping[str, str],
        log: CappedLog,
        on_gone: Callable[["HarnessProcess"], None],
    ) -> "HarnessProcess":
        """Starts the program.

        Args:
          command: program and arguments.
          name: what messages call this process.
          environment: all variables the program sees.
          log: takes its stderr.
          on_gone: called once, when the process and its pipes are gone.

        Returns:
          The running process.

        Raises:
          RolloutError: the program cannot be started.
        """
        log.turn_page()
        try:
            _, protocol = await asyncio.get_running_loop().subprocess_exec(
                lambda: cls(name, log, on_gone), *command, env=dict(environment), start_new_session=True
            )
        except OSError as error:
            raise RolloutError(
                f"Harness command {' '.join(command)!r} cannot be started: {error.strerror or error}. "
                "Give a program that exists and may be executed, with its full path."
            ) from error
        return protocol

    @property
    def group(self) -> int:
        """The process group, which is the process's own number."""
        return self._transport.get_pid()

    async def run(self, job: Job, deadline_s: float) -> Outcome:
        """Runs one job to an outcome. Past the deadline the process is killed, with all the jobs it holds."""
        self._jobs[job.job_id] = asyncio.get_running_loop().create_future()
        stdin = cast(asyncio.WriteTransport, self._transport.get_pipe_transport(0))
        stdin.write(job.line())
        try:
            async with asyncio.timeout(deadline_s):
                return await self._jobs[job.job_id]
        except TimeoutError:
            self._end("lost", f"{self.name} was killed because job {job.job_id!r} did not end in {deadline_s:g} s")
            return Outcome(ending="hang", answer=None, detail=f"no result in {deadline_s:g} s; {self.name} was killed")
        except asyncio.CancelledError:
            self._abandoned.add(job.job_id)  # its result, should it still come, is nobody's
            raise
        finally:
            del self._jobs[job.job_id]

    async def close(self, grace_s: float) -> None:
        """Ends the process: by the end of its stdin if it is idle and takes at most `grace_s`, else by force."""
        stdin = self._transport.get_pipe_transport(0)
        if not self._jobs and stdin is not None:
            stdin.close()
            await asyncio.wait([self.gone], timeout=grace_s)
        self._end("lost", f"{self.name} was closed")
        await self.gone

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The process runs."""
        self._transport = cast(asyncio.SubprocessTransport, transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Output has come: results, or words for the log."""
        if fd == STDERR:
            self._log.write(data)
        elif not self._killed:
            self._read(data)

    def process_exited(self) -> None:
        """The process has ended; what it started may live, and hold its pipes."""
        self.ending = True
        self._kill_group()
        self._pipes_timer = asyncio.get_running_loop().call_later(PIPES_GRACE_S, self._transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """The process and its pipes are gone, and all output has been read."""
        self.ending = True
        if self._pipes_timer is not None:
            self._pipes_timer.cancel()
        self._transport.close()
        said = self._log.tail()
        words = f"; it said: {said}" if said else ""
        self.last_words = f"{self.name} {_how(self._transport.get_returncode())}{words}"
        self._settle("crash", self.last_words)
        self._on_gone(self)
        self.gone.set_result(None)

    def _read(self, data: bytes) -> None:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        try:
            for line in lines:
                self._take(line)
            if len(self._buffer) > MAX_LINE_BYTES:
                raise RolloutError(f"The harness printed a line of more than {MAX_LINE_BYTES} bytes to stdout.")
        except RolloutError as error:
            self._end("protocol", str(error))

    def _take(self, line: bytes) -> None:
        job_id, outcome = read_result(line)
        if job_id in self._abandoned:
            self._abandoned.remove(job_id)
            return
        future = self._jobs.get(job_id)
        if future is None or future.done():
            raise RolloutError(f"The harness printed a result for job {job_id!r}, which it was not given or has ended.")
        future.set_result(outcome)

    def _end(self, ending: Any, detail: str) -> None:
        """Kills the process; the jobs it still holds end so."""
        self.ending = self._killed = True
        self._settle(ending, detail)
        self._kill_group()

    def _settle(self, ending: Any, detail: str) -> None:
        for future in self._jobs.values():
            if not future.done():
                future.set_result(Outcome(ending=ending, answer=None, detail=detail))

    def _kill_group(self) -> None:
        if self.gone.done():
            return  # the number may be another process's by now
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, signal.SIGKILL)


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was ended by signal {-code} ({signal.strsignal(-code)})"
    return f"ended with exit code {code}"
