"""Two processes are one run; one that fails is heard by the other; options that are refused."""

import contextlib
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

from harnessrl_jax.errors import ConfigError
from harnessrl_jax.gateway import Store
from harnessrl_jax.launch.__main__ import parser
from harnessrl_jax.launch.hosts import join
from harnessrl_jax.monitor import read_metrics


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


MIXTURE = {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "moe_intermediate_size": 16,
}  # fmt: skip


def test_two_processes_train_as_one_with_two_devices(tmp_path, make_game):
    """A whole run of a mixture: its experts are recorded by the first process and replayed by both."""
    game, where = make_game(tmp_path, steps=1, **MIXTURE), address()
    plain = ("--algorithm.routing", "none", "--mesh.cpu_devices")  # CAPO has tests of its own, and compiles slowly
    game.finish("one", *plain, "2")
    pair = (*plain, "1", "--coordinator", where, "--processes", "2", "--process")
    started = [game.start("two", *pair, process) for process in ("0", "1")]
    with ended(started):
        said = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    ((one,), (two,)) = (read_metrics(tmp_path / run) for run in ("one", "two"))
    for name in ("loss", "grad_norm", "entropy", "mismatch_max", "reward", "count/sampled_tokens"):
        np.testing.assert_allclose(two[name], one[name], rtol=1e-4, atol=1e-6, err_msg=name)
    assert two["mismatch_max"] < 1e-4
    assert two["grad_norm"] > 0
    weights = [load_file(tmp_path / run / "model/model.safetensors") for run in ("one", "two")]
    for name, want in weights[0].items():
        np.testing.assert_allclose(weights[1][name], want, atol=1e-5, err_msg=name)
    with Store(tmp_path / "two/calls.sqlite", read_only=True) as store:
        (call, *_) = (kept.call for group in store.groups() for kept in store.calls_of_group(group))
    assert call.experts.shape == (len(call.prompt_ids) + len(call.output_ids) - 1, 2, 2)


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
