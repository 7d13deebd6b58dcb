"""Whole runs, as real processes: learning, resuming after kill -9, failing harnesses, the other commands."""

import contextlib
import itertools
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time

import openai
import pytest

from harnessrl_jax.gateway import Store
from harnessrl_jax.launch.doctor import audit
from harnessrl_jax.monitor import read_metrics

TIMES = ("time/", "tokens_per_s")


def numbers(run):
    """The metrics of a run without those that measure time."""
    return [{k: v for k, v in record.items() if not k.startswith(TIMES)} for record in read_metrics(run)]


def summary(run):
    return json.loads((run / "summary.json").read_text())


@pytest.fixture(scope="module")
def reference(tmp_path_factory, make_game):
    """A game and its uninterrupted run."""
    game = make_game(tmp_path_factory.mktemp("game"))
    return game, game.folder / "whole", game.finish(game.folder / "whole")


def test_a_run_leaves_everything_a_user_needs(reference):
    _, run, shown = reference
    wanted = "config.toml metrics.jsonl tensorboard checkpoints calls.sqlite model report.html summary.json"
    assert {path.name for path in run.iterdir()} >= set(wanted.split())
    told = summary(run)
    assert {"heldout_f1_start", "heldout_f1_end", "heldout_em_start", "heldout_em_end", "wall_s"} <= told.keys()
    assert (told["steps"], told["seed"], told["counts"]["rollouts"], told["counts"]["calls"]) == (4, 0, 24, 48)
    assert told["counts"]["targets"] == told["counts"]["sampled_tokens"] - sum(told["dropped"].values())
    assert "step 4/4" in shown.stdout
    assert "report.html" in shown.stdout
    assert "Warning" not in shown.stdout + shown.stderr


def test_a_run_trains(reference):
    _, run, _ = reference
    records = read_metrics(run)
    assert all(record["applied"] == 1 and record["finite"] == 1 for record in records if record["advantage_abs"] > 0)
    assert any(record["advantage_abs"] > 0 for record in records)
    assert all(record["compilations"] == 1 for record in records)  # one bucket, so one compiled step
    # The trainer sees what the sampler saw, at every step: the ratio is 1 before an update.
    assert max(record["mismatch_max"] for record in records) < 1e-4


def test_a_finished_run_says_so(reference):
    game, run, _ = reference
    before = (run / "metrics.jsonl").read_bytes()
    again = game.finish(run)
    assert "game: finished" in again.stdout
    assert (run / "metrics.jsonl").read_bytes() == before


def test_seeds_differ_and_repeat(reference):
    game, run, _ = reference
    other = game.folder / "other"
    game.finish(other, "--seed", "1")
    assert numbers(other)[0] != numbers(run)[0]


def wait_for(condition, process, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.005)


def steps_done(run):
    return len((run / "metrics.jsonl").read_text().splitlines()) if (run / "metrics.jsonl").exists() else 0


def calls_of_step(run, step):
    try:
        with contextlib.closing(sqlite3.connect(f"file:{run / 'calls.sqlite'}?mode=ro", uri=True)) as store:
            return store.execute("SELECT count(*) FROM calls WHERE rollout_id LIKE ?", (f"{step:05d}-%",)).fetchone()[0]
    except sqlite3.OperationalError:
        return 0


def saving(run):
    folder = run / "checkpoints"
    return folder.exists() and any("tmp" in path.name for path in folder.iterdir())


def versions(run):
    """Step or examination -> versions of the weights that sampled its calls."""
    with Store(run / "calls.sqlite", read_only=True) as store:
        calls = [kept.call for r in store.rollouts() for kept in store.calls(r.rollout_id, r.attempt)]
    return sorted({(call.rollout_id.partition("-")[0], call.version_start, call.version_end) for call in calls})


@pytest.mark.parametrize("moment", ["in the middle of a step", "in the middle of a checkpoint"])
def test_a_killed_run_goes_on_with_the_same_numbers(reference, moment):
    game, whole, _ = reference
    run = game.folder / moment.split()[-1]
    process = game.start(run)
    if moment.endswith("step"):
        wait_for(lambda: steps_done(run) >= 2 and calls_of_step(run, 2) >= 3, process)
    else:
        wait_for(lambda: steps_done(run) >= 2 and saving(run), process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (run / "summary.json").exists()
    game.finish(run)
    assert numbers(run) == numbers(whole)
    # Every step was sampled by its own weights, also the first one after the restart.
    steps = [(f"{step:05d}", step, step) for step in range(4)]
    assert versions(run) == [*steps, ("after", 4, 4), ("before", 0, 0)]
    assert audit(run).findings == ()
    told, wanted = summary(run), summary(whole)
    for name in ("heldout_f1_start", "heldout_f1_end", "counts", "dropped"):
        assert told[name] == wanted[name]


def test_ctrl_c_is_clean(reference):
    game, _, _ = reference
    run = game.folder / "stopped"
    process = game.start(run)
    wait_for(lambda: steps_done(run) >= 1, process)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + signal.SIGINT
    assert "Nothing is lost" in said
    assert "Traceback" not in said


def test_a_crash_and_a_hang_are_counted_and_tried_again(tmp_path, make_game):
    game = make_game(tmp_path, questions=("crash", "hang"), steps=1)
    run = tmp_path / "run"
    game.finish(run, "--harness.deadline_s", "3", "--evaluation.questions", "0")
    store = Store(run / "calls.sqlite", read_only=True)
    failed = [r for r in store.rollouts() if r.status == "infra_failure"]
    store.close()
    assert {rollout.detail.partition(":")[0] for rollout in failed} >= {"crash", "hang"}
    assert all(rollout.reward is None for rollout in failed)
    assert summary(run)["counts"]["rollouts"] == 6


def test_inspect_lists_and_shows(reference):
    _, run, _ = reference
    assert "00000-three-0" in launch("inspect", run)
    shown = launch("inspect", run, "--rollout", "00000-three-0")
    assert "session one" in shown
    assert "Sure?" in shown


def launch(*arguments):
    command = [sys.executable, "-m", "harnessrl_jax.launch", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def test_eval_scores_the_trained_model(reference):
    game, run, _ = reference
    scored = launch("eval", game.folder / "game.toml", "--model.path", run / "model", "--model.init", "pretrained",
                    "--run-dir", game.folder / "eval")  # fmt: skip
    assert re.search(r"F1 \d\.\d{3}   exact match \d\.\d{3}   \(2 questions", scored)


def test_serve_answers_a_harness_of_ones_own(reference):
    game, _, _ = reference
    folder = game.folder / "serve"
    command = [sys.executable, "-m", "harnessrl_jax.launch", "serve", str(game.folder / "game.toml")]
    process = subprocess.Popen(
        [*command, "--run-dir", str(folder), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    said = "".join(itertools.takewhile(lambda line: "Every call" not in line, process.stdout))
    values = dict(re.findall(r"OPENAI_(BASE_URL|API_KEY)=(\S+)", said))
    client = openai.OpenAI(base_url=values["BASE_URL"], api_key=values["API_KEY"])
    reply = client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "Hello"}], max_tokens=4
    )
    assert reply.usage.completion_tokens in range(1, 5)
    client.close()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Hello" in launch("inspect", folder, "--rollout", "served")
