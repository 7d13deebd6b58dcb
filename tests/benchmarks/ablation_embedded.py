"""Stage 2 of the ablation: the main arms as runs of the launcher on the embedded task, a cell (arm, seed) at a time.

Every cell is `python -m harnessrl_jax.launch` with the quick start's configuration and the overrides below: the same
warm start, questions, rollouts, steps and learning rate. `ffn` trains the MLP alone, with the gradient of all tokens;
`random` and `contrast` route by role, with partitions of equal size. The plain gradient trains every parameter.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

STEPS = 22
LAST = 5
"""Steps at the end over which training reward is averaged."""
SHORT = ("--steps", str(STEPS), "--optimizer.warmup_steps", "4")
JOINT, CENTRAL = "quickstart", "quickstart_central"


class Arm(NamedTuple):
    """A bundled configuration and what is changed in it."""

    config: str
    overrides: tuple[str, ...]


PLAIN = ("--algorithm.routing", "none")
FFN = (
    *("--algorithm.top_fraction", "1.0", "--algorithm.ungated", "frozen", "--algorithm.denominator", "shared"),
    *("--algorithm.warmup", "probe", "--algorithm.warmup_steps", "1"),
)
RANDOM = ("--algorithm.score", "random")
ARMS = {
    "plain": Arm(JOINT, PLAIN),
    "ffn": Arm(JOINT, FFN),
    "random": Arm(JOINT, RANDOM),
    "contrast": Arm(JOINT, ()),
    "plain, central only": Arm(CENTRAL, PLAIN),
    "contrast, central only": Arm(CENTRAL, ()),
}


def run_cell(arm: str, seed: int, folder: Path) -> dict[str, Any]:
    """Trains one arm with one seed, or goes on with the run that was begun in the folder, and reads what it reached."""
    chosen = ARMS[arm]
    command = [sys.executable, "-m", "harnessrl_jax.launch", chosen.config, *SHORT, *chosen.overrides]
    log = folder.with_suffix(".log")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as out:
        subprocess.run([*command, "--seed", str(seed), "--run-dir", str(folder)], check=True, stdout=out, stderr=out)
    summary = json.loads((folder / "summary.json").read_text())
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return outcome(summary, records)


def outcome(summary: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The numbers of one cell: held-out scores, the reward curve, and CAPO's diagnostics where there are some."""
    reward = [record["reward"] for record in records]
    found = {
        "before": summary["heldout_f1_start"],
        "after": summary["heldout_f1_end"],
        "exact_before": summary["heldout_em_start"],
        "exact_after": summary["heldout_em_end"],
        "reward_area": float(np.mean(reward)),
        "reward_last": float(np.mean(reward[-LAST:])),
        "steps": summary["steps"],
        "rollouts": summary["counts"]["rollouts"],
        "training_s": summary["time_s"]["training"],
        "wall_s": summary["wall_s"],
    }
    for name in ("capo/cosine", "capo/mass", "capo/retained_action", "capo/retained_args"):
        if values := [record[name] for record in records if name in record]:
            found[name] = float(np.mean(values))
    if layers := [record["capo/jaccard_layer"] for record in records if record.get("capo/active")]:
        found["capo/jaccard"] = float(np.mean(layers[-1]))
    return found
