"""The configuration that makes the bundled model, shortened: the expert's rollouts, training, the examination."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from harnessrl_jax.gateway import Store
from harnessrl_jax.launch.supervised import over
from harnessrl_jax.monitor import read_metrics
from tests.trajectories.conftest import rollout_of

SHORT = (
    "--steps=4",
    "--task.invented_countries=40",
    "--task.invented_per_template=20",
    "--algorithm.rollouts=12",
    "--algorithm.rollouts_per_step=4",
    "--optimizer.warmup_steps=1",
    "--packing.max_rows=8",
    "--evaluation.questions=3",
    "--checkpoint.every_steps=1",
)


def command(run):
    return [sys.executable, "-m", "harnessrl_jax.launch", "quickstart_warmstart", "--run-dir", str(run), *SHORT]


def environment(run):
    """Compiled steps are kept beside the runs: most of the time of a run this small is compilation."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(run.parent / "compiled")}
    return os.environ | cache | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


def finish(run):
    done = subprocess.run(command(run), capture_output=True, text=True, timeout=600, env=environment(run), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def numbers(run):
    """The metrics of a run without those that measure time."""
    timed = ("time/", "tokens_per_s")
    return [{k: v for k, v in record.items() if not k.startswith(timed)} for record in read_metrics(run)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = tmp_path_factory.mktemp("warm") / "run"
    finish(run)
    return run


def test_it_leaves_a_model_and_what_it_was_made_of(run):
    told = json.loads((run / "summary.json").read_text())
    assert (told["steps"], told["heldout_questions"]) == (4, 3)
    assert 0.0 <= told["heldout_f1_end"] <= 1.0
    assert (run / "model" / "model.safetensors").stat().st_size > 4_000_000
    with Store(run / "calls.sqlite") as store:
        rollouts = [rollout for rollout in store.rollouts() if rollout.rollout_id.startswith("expert")]
        calls = [stored.call for r in rollouts for stored in store.calls(r.rollout_id, r.attempt)]
    assert len(rollouts) == 12
    # Every sampled token of the expert is a target once an epoch of 3 steps; nothing is dropped.
    records = read_metrics(run)
    assert sum(record["count/targets"] for record in records[:3]) == sum(len(call.output_ids) for call in calls)
    assert told["dropped"] == {}


def test_a_rollout_that_was_killed_before_its_next_try_is_not_over():
    failed = {"status": "infra_failure"}
    rollouts = [
        rollout_of("a", 1.0, group_id="answered"),
        rollout_of("b", None, group_id="failed", **failed),
        rollout_of("c", None, group_id="tried again", **failed),
        rollout_of("c", 0.5, group_id="tried again", attempt=1),
        rollout_of("d", None, group_id="given up", **failed),
        rollout_of("d", None, group_id="given up", attempt=1, **failed),
    ]
    assert over(rollouts, 2) == {"answered", "tried again", "given up"}
    assert over(rollouts[:2], 1) == {"answered", "failed"}


def test_the_loss_falls(run):
    losses = [record["loss"] for record in read_metrics(run)]
    assert losses[-1] < losses[0]


def test_a_killed_warm_start_goes_on_with_the_same_numbers(run):
    killed, quiet = run.parent / "killed", subprocess.DEVNULL
    with subprocess.Popen(command(killed), stdout=quiet, stderr=quiet, env=environment(run)) as process:
        while not (killed / "checkpoints" / "2").exists():
            assert process.poll() is None, "it ended before it was killed"
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    finish(killed)
    assert numbers(killed) == numbers(run)
