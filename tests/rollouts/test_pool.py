import asyncio
import fcntl
import itertools
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from harnessrl_jax.errors import RolloutError
from harnessrl_jax.rollouts import HarnessPool, Job, minimal_environment

STUB = pathlib.Path(__file__).with_name("stub_harness.py")
PATIENCE_S = 20.0
NUMBERS = itertools.count()


def job(question):
    return Job(job_id=f"j-{next(NUMBERS)}", question=question, base_url="http://127.0.0.1:9/r/x/0", api_key="k")


def in_pool(tmp_path, scenario, **changes):
    """Runs `scenario(pool)` with a pool of stub processes."""
    options = {"workers": 1, "concurrency": 4, "deadline_s": PATIENCE_S, "environment": minimal_environment(os.environ)}
    command = changes.pop("command", (sys.executable, "-I", "-S", str(STUB)))

    async def run():
        async with HarnessPool(command, log_dir=tmp_path, **(options | changes)) as pool:
            return await asyncio.wait_for(scenario(pool), PATIENCE_S)

    return asyncio.run(run())


def lock_is_free(path):
    """Whether every process that held the lock is gone; zombies hold none."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def until(condition):
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_a_process_stays_warm_and_works_on_several_jobs(tmp_path):
    async def scenario(pool):
        first = await pool.run(job("echo a"))
        met = await asyncio.gather(*(pool.run(job("meet 3")) for _ in range(3)))
        return [first, *met], pool.counts

    outcomes, counts = in_pool(tmp_path, scenario)
    assert [outcome.answer for outcome in outcomes] == ["a", "met", "met", "met"]
    assert len({outcome.detail for outcome in outcomes}) == 1
    assert counts == {"processes": 1, "completed": 4}


def test_jobs_beyond_the_concurrency_wait(tmp_path):
    async def scenario(pool):
        return await asyncio.gather(*(pool.run(job("meet 3")) for _ in range(3)))

    # The third is not handed out while the first two wait for it.
    outcomes = in_pool(tmp_path, scenario, concurrency=2, deadline_s=0.4)
    assert {outcome.ending for outcome in outcomes} <= {"hang", "lost"}


def test_jobs_spread_over_the_workers(tmp_path):
    async def scenario(pool):
        return await asyncio.gather(*(pool.run(job("meet 2")) for _ in range(4)))

    outcomes = in_pool(tmp_path, scenario, workers=2)
    assert len({outcome.detail for outcome in outcomes}) == 2


def test_a_crash_fails_its_jobs_and_the_next_process_works(tmp_path):
    async def scenario(pool):
        outcomes = await asyncio.gather(pool.run(job("meet 2")), pool.run(job("crash")))
        return [*outcomes, await pool.run(job("echo again"))], pool.counts

    (neighbour, crash, after), counts = in_pool(tmp_path, scenario)
    assert crash.ending == neighbour.ending == "crash"
    assert crash.detail == "worker-0 ended with exit code 3; it said: the disk is on fire"
    assert after.answer == "again"
    assert counts == {"processes": 2, "crash": 2, "completed": 1}
    assert (tmp_path / "worker-0.log").read_text() == "the disk is on fire\n"


def test_a_hang_kills_the_process_and_names_the_culprit(tmp_path):
    async def scenario(pool):
        hanging = job("meet 9")
        # The neighbour comes later, so that its own deadline is still ahead.
        hang = asyncio.create_task(pool.run(hanging))
        await asyncio.sleep(0.4)
        lost = await pool.run(job("meet 9"))
        return hanging.job_id, await hang, lost, await pool.run(job("echo again"))

    culprit, hang, lost, after = in_pool(tmp_path, scenario, deadline_s=0.8)
    assert (hang.ending, hang.detail) == ("hang", "no result in 0.8 s; worker-0 was killed")
    assert lost.ending == "lost"
    assert lost.detail == f"worker-0 was killed because job {culprit!r} did not end in 0.8 s"
    assert after.answer == "again"


def test_a_job_alone_shares_its_process_with_nobody(tmp_path):
    async def scenario(pool):
        pair = [asyncio.create_task(pool.run(job("meet 2")))]
        crash = await pool.run(job("crash"), alone=True)
        alone = await pool.run(job("echo alone"), alone=True)
        pair.append(asyncio.create_task(pool.run(job("meet 2"))))
        return crash, alone, await asyncio.gather(*pair)

    crash, alone, pair = in_pool(tmp_path, scenario)
    assert crash.detail.startswith("alone-0 ended with exit code 3")
    assert alone.answer == "alone"
    assert [outcome.answer for outcome in pair] == ["met", "met"]
    assert pair[0].detail != alone.detail


@pytest.mark.parametrize("text", ["hello", '{"job": "unknown", "status": "gave_up", "answer": null}'])
def test_a_process_that_prints_something_else_is_stopped(tmp_path, text):
    async def scenario(pool):
        return await pool.run(job(f"print {text}")), await pool.run(job("echo again"))

    bad, after = in_pool(tmp_path, scenario)
    assert bad.ending == "protocol"
    assert text[:20] in bad.detail or "for job 'unknown', which it was not given" in bad.detail
    assert after.answer == "again"


def test_the_result_of_a_cancelled_job_is_nobodys(tmp_path):
    async def scenario(pool):
        cancelled = asyncio.create_task(pool.run(job("meet 2")))
        await asyncio.sleep(0.1)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        return await pool.run(job("meet 2")), await pool.run(job("echo again")), pool.counts["processes"]

    met, after, processes = in_pool(tmp_path, scenario)
    assert (met.answer, after.answer, processes) == ("met", "again", 1)


def test_a_program_that_never_works_is_an_error(tmp_path):
    async def scenario(pool):
        return [await pool.run(job("echo a")) for _ in range(9)]

    command = (sys.executable, "-I", "-S", str(STUB), "--die")
    message = (
        r"4 processes in a row ended without a result\. The last: .* exit code 1; it said: no such model\. Run the"
    )
    with pytest.raises(RolloutError, match=message):
        in_pool(tmp_path, scenario, command=command, max_deaths=3)


def test_only_deaths_in_a_row_count(tmp_path):
    async def scenario(pool):
        return [await pool.run(job(question)) for question in ("crash", "echo a", "crash", "echo b")]

    assert [outcome.answer for outcome in in_pool(tmp_path, scenario, max_deaths=1)] == [None, "a", None, "b"]


def test_a_missing_program_is_an_error(tmp_path):
    with pytest.raises(RolloutError, match=r"'/no/harness --x' cannot be started: No such file .* full path"):
        in_pool(tmp_path, asyncio.sleep, command=("/no/harness", "--x"))


def test_impossible_sizes_are_refused(tmp_path):
    with pytest.raises(RolloutError, match="workers 0, concurrency 4"):
        in_pool(tmp_path, asyncio.sleep, workers=0)


def test_programs_see_no_secrets(tmp_path):
    async def scenario(pool):
        return (await pool.run(job("environment"))).answer.split()

    source = {"PATH": os.environ["PATH"], "OPENAI_API_KEY": "secret", "HTTP_PROXY": "http://proxy", "PYTHONPATH": "/x"}
    seen = in_pool(tmp_path, scenario, environment=minimal_environment(source))
    assert set(seen) <= {"PATH", "LC_CTYPE"}  # Python itself may set LC_CTYPE


def test_the_log_is_capped(tmp_path):
    async def scenario(pool):
        return [await pool.run(job("say 0123456789")) for _ in range(3)]

    in_pool(tmp_path, scenario, max_log_bytes=15_000)
    log = (tmp_path / "worker-0.log").read_text()
    assert 15_000 < len(log) < 15_100
    assert log.endswith("[the log is full; the rest is dropped]\n")


def test_closing_ends_busy_processes_and_their_children(tmp_path):
    lock = tmp_path / "lock"

    async def scenario(pool):
        running = asyncio.create_task(pool.run(job(f"hold {lock}")))
        await asyncio.to_thread(until, lambda: lock.exists() and not lock_is_free(lock))
        return running

    async def closed():
        command = (sys.executable, "-I", "-S", str(STUB))
        environment = minimal_environment(os.environ)
        pool = HarnessPool(command, workers=1, concurrency=1, deadline_s=99, environment=environment, log_dir=tmp_path)
        async with pool:
            running = await scenario(pool)
        with pytest.raises(RolloutError, match="given to a closed pool"):
            await pool.run(job("echo late"))
        return await running

    outcome = asyncio.run(closed())
    assert (outcome.ending, outcome.detail) == ("lost", "worker-0 was closed")
    until(lambda: lock_is_free(lock))


def test_a_child_that_keeps_the_pipes_delays_nothing(tmp_path):
    async def scenario(pool):
        return await pool.run(job("leave-child"))

    started = time.monotonic()
    assert in_pool(tmp_path, scenario).ending == "crash"
    assert time.monotonic() - started < 4.5  # the child sleeps 5


OWNER = """
import asyncio, os, pathlib, sys
from harnessrl_jax.rollouts import HarnessPool, Job, minimal_environment

async def main(stub, lock, log_dir):
    options = {"workers": 1, "concurrency": 1, "deadline_s": 99, "environment": minimal_environment(os.environ)}
    async with HarnessPool((sys.executable, "-I", "-S", stub), log_dir=log_dir, **options) as pool:
        await pool.run(Job(job_id="j", question=f"hold {lock}", base_url="", api_key=""))

asyncio.run(main(sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])))
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_pools_owner(tmp_path, how):
    lock = tmp_path / "lock"
    arguments = [sys.executable, "-c", OWNER, str(STUB), str(lock), str(tmp_path)]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, start_new_session=True) as owner:
        try:
            until(lambda: lock.exists() and not lock_is_free(lock))
            os.killpg(owner.pid, how)
            _, said = owner.communicate(timeout=PATIENCE_S)
        finally:
            owner.kill()
    assert (how == signal.SIGINT) == (b"KeyboardInterrupt" in said)
    until(lambda: lock_is_free(lock))
