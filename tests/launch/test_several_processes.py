"""Two processes that carry out orders: one that fails is heard by the other; options that are refused."""

import contextlib
import pathlib
import socket
import subprocess
import sys

import pytest

from harnessrl_jax.errors import ConfigError
from harnessrl_jax.launch.__main__ import parser
from harnessrl_jax.launch.hosts import join


def address():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


@contextlib.contextmanager
def ended(processes):
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_process_that_fails_says_why_to_the_first():
    script, where = str(pathlib.Path(__file__).parent / "one_of_two.py"), address()
    started = [
        subprocess.Popen([sys.executable, script, process, where], stdout=subprocess.PIPE, text=True)
        for process in ("0", "1")
    ]
    with ended(started):
        said = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert "HostError: Process 1 stopped. TaskError: no such file on this host" in said[0]
    assert "save 7\nTaskError: no such file on this host" in said[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--processes", "2", "--process", "0"), "both need --coordinator HOST:PORT"),
        (("--coordinator", "here:1", "--processes", "2"), "give --processes N and --process I"),
        (("--coordinator", "here:1", "--processes", "2", "--process", "2"), "with 0 <= I < N too, got 2 and 2"),
    ],
)
def test_options_that_do_not_belong_together_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        join(parser().parse_args(["train", "quickstart", *options]))
