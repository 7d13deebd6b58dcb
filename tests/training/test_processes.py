"""Two real processes of four devices: the same step as one process, and a checkpoint that any mesh goes on from."""

import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from harnessrl_jax.checkpoints import Checkpoints


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """The folder that two processes left behind."""
    folder = tmp_path_factory.mktemp("processes")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    script = str(Path(__file__).parent / "one_host.py")
    run = lambda process: subprocess.Popen(
        [sys.executable, script, str(process), "2", port, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    started = [run(0), run(1)]
    said = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)
    return folder


def close(got, want):
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def test_two_processes_train_like_one_and_resume_on_another_mesh(decoder_job, two_processes):
    job = decoder_job.job((1, 2, 2, 2))
    metrics = job.run([0, 1])
    for name, value in np.load(two_processes / "metrics.npz").items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-3, atol=1e-5, err_msg=name)
    with Checkpoints(two_processes / "checkpoints", keep=2, read_only=True) as checkpoints:
        restored, extra = checkpoints.restore(2, job.state)
    assert extra == {"process": 0}
    where = lambda state: jax.tree.map(lambda leaf: leaf.sharding, state)
    assert where(restored) == where(job.state)
    close(jax.tree.leaves(restored), jax.tree.leaves(job.state))
    job.state = restored
    job.run([2])
    close(jax.tree.leaves(job.state), np.load(two_processes / "state.npz").values())


def test_hosts_that_hold_different_partitions_stop(two_processes):
    (first, said), (second, also_said) = (
        (two_processes / f"agreement-{process}.txt").read_text().split("\n", 1) for process in (0, 1)
    )
    assert first == second
    assert said == also_said
    assert "CAPO: 8 devices hold different partitions" in said
    assert f"{first} on 4" in said
