"""The first command, shortened: the bundled model, task and harness, for two steps."""

import json
import subprocess
import sys

import pytest

SHORT = (
    "--steps=2",
    "--rollouts.groups=2",
    "--rollouts.group_size=4",
    "--behaviour.slots=16",
    "--packing.max_rows=16",
    "--evaluation.questions=7",
    "--evaluation.shown=1",
)


@pytest.mark.parametrize("config", ["quickstart", "quickstart_central"])
def test_the_bundled_task_runs_from_any_folder(tmp_path, config):
    command = [sys.executable, "-m", "harnessrl_jax.launch", config, *SHORT]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / f"{config}-0"
    told = json.loads((run / "summary.json").read_text())
    assert told["heldout_questions"] == 7
    assert told["counts"]["rollouts"] == 16
    # The researchers' tokens are targets in joint training, and counted as frozen in central-only training.
    assert ("frozen_agent" in told["dropped"]) is (config == "quickstart_central")
    assert told["counts"]["targets"] + sum(told["dropped"].values()) == told["counts"]["sampled_tokens"]
    page = (run / "report.html").read_text()
    assert "researcher" in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
