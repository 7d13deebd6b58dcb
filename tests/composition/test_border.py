"""What crosses the border: importing and using the parts loads no edge, and the guide's signatures are the code's."""

import inspect
import pathlib
import re
import subprocess
import sys

import pytest

from harnessrl_jax import losses

GUIDE = pathlib.Path(__file__).parents[2] / "docs/guides/compose.md"
USE = """
import sys
import numpy as np
from harnessrl_jax import capo, losses, trajectories
total, weight = losses.reinforce(np.zeros(2), np.ones(2), np.ones(2))
trajectories.leave_one_out(np.ones(2), np.zeros(2, int), np.ones(2, bool))
capo.UnitMap(1, (capo.UnitSlice("w", 0),)).units({"w": np.ones(3)})
print(*{name.split(".")[1] for name in sys.modules if name.startswith("harnessrl_jax.")})
"""
EDGES = {"launch", "gateway", "sampler", "config", "rollouts", "monitor", "weights", "checkpoints"}


def loaded(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_no_edge_is_loaded():
    found = loaded(USE)
    assert {"capo", "losses", "trajectories"} <= found
    assert not found & EDGES


def test_a_loaded_edge_is_seen():
    assert "config" in loaded("import harnessrl_jax.config\n" + USE)


ROWS = re.findall(r"^\| (`\w+\(.*?\)`(?:, `\w+\(.*?\)`)*) \|", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
SIGNATURES = [signature for row in ROWS for signature in re.findall(r"`(\w+)\((.*?)\)`", row)]


@pytest.mark.parametrize(("name", "arguments"), SIGNATURES, ids=[name for name, _ in SIGNATURES])
def test_a_loss_of_the_guide_has_the_signature_it_says(name, arguments):
    bare = [
        each.replace(annotation=inspect.Parameter.empty)
        for each in inspect.signature(getattr(losses, name)).parameters.values()
    ]
    assert str(inspect.Signature(bare)) == f"({arguments})"


def test_the_guide_names_every_loss():
    summed = {
        name
        for name in losses.__all__
        if inspect.isfunction(loss := getattr(losses, name)) and inspect.signature(loss).return_annotation is losses.Sum
    }
    assert {name for name, _ in SIGNATURES} == summed - {"weighted_sum"}
