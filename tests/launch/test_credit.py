"""What the [credit] section says is what the calls get."""

import dataclasses
import json
import math
import pathlib

import numpy as np
import pytest

from harnessrl_jax import config
from harnessrl_jax.launch.credit import credited_calls, estimator
from harnessrl_jax.trajectories import Call, Drop, Rollout, build_lineage

DATA = json.loads((pathlib.Path(__file__).parents[1] / "data" / "rollout.json").read_text())
WITHOUT_PROCESS = ["--credit.process_weight", "0.0"]
STD = ["--credit.baseline", "group_std", "--credit.std_floor", "1e-9", "--credit.std_unbiased"]


def section(*overrides):
    return config.parse("name = 'x'\nsteps = 1\n", "x.toml", overrides).credit


@pytest.mark.parametrize(
    ("overrides", "want"),
    [
        ([], [2 / 3, -1 / 3, -1 / 3]),
        (["--credit.baseline", "group_mean"], [4 / 9, -2 / 9, -2 / 9]),
        ([*STD, "false"], [math.sqrt(2), -math.sqrt(0.5), -math.sqrt(0.5)]),
        ([*STD, "true"], [2 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3)]),
        (["--credit.baseline", "max_rl"], [0.8, -0.4, -0.4]),
    ],
)
def test_the_baseline_is_the_one_that_is_named(overrides, want):
    reward = np.array([1.0, 1 / 3, 1 / 3])
    got = estimator(section(*overrides))(reward, np.zeros(3, int), np.ones(3, bool))
    np.testing.assert_allclose(got, want, rtol=1e-6)


def golden(*overrides, **changes):
    """Credit of the golden rollouts A (reward 1) and B (reward 0), with changes to B."""
    strip = lambda record: {key: value for key, value in record.items() if key != "what"}
    calls = [Call.from_json(DATA["call_defaults"] | strip(call)) for call in DATA["calls"]]
    a, b, c = (Rollout.from_json(DATA["rollout_defaults"] | rollout) for rollout in DATA["rollouts"])
    lineages = [build_lineage([call for call in calls if call.rollout_id == name]) for name in "ABC"]
    return credited_calls(section(*overrides), [a, dataclasses.replace(b, **changes), c], lineages)


def test_the_defaults_are_leave_one_out_and_a_tenth_of_the_process_reward():
    process = 0.1 * 0.5 / 0.500001
    want = {"A0": 1 + process, "A1": 1, "A2": 1, "A3": 1, "B1": -1 - process, "B2": -1}
    assert golden().advantages() == pytest.approx(want, rel=1e-15)


def test_every_key_reaches_the_credit():
    assert golden("--credit.process_weight", "0.0").advantages()["A0"] == 1
    other = golden(*WITHOUT_PROCESS, "--credit.compared", "harness", harness="codex")
    assert set(other.advantages().values()) == {0}
    alone = golden(*WITHOUT_PROCESS, "--credit.compared", "agent").advantages()
    assert (alone["A0"], alone["A1"]) == (1, 0)  # B has no researcher
    assert golden("--credit.truncated", "mask", status="truncated").dropped["truncated_rollout"].tokens == 6
    flat = golden(*WITHOUT_PROCESS, "--credit.flat_groups", "drop", reward=1.0)
    assert flat.dropped["flat_group"] == Drop(calls=6, tokens=24)
