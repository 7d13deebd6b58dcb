import json

import pytest

from harnessrl_jax.errors import MonitorError
from harnessrl_jax.monitor import Summary


def test_totals_come_from_the_records():
    records = [
        {"step": 1, "count/calls": 10.0, "dropped/too_long": 1.0, "time/rollouts": 1.5, "loss": 0.1},
        {"step": 2, "count/calls": 12.0, "count/rollouts": 4.0, "time/rollouts": 2.0},
    ]
    known = dict.fromkeys(("heldout_f1_start", "heldout_f1_end", "heldout_em_start", "heldout_em_end"))
    summary = Summary.of_records(records, name="demo", seed=0, wall_s=9.5, heldout_questions=0, **known)
    assert (summary.steps, summary.counts, summary.dropped) == (2, {"calls": 22, "rollouts": 4}, {"too_long": 1})
    assert summary.time_s == {"rollouts": 3.5}


def test_a_summary_comes_back_from_json(summary):
    data = json.loads(json.dumps(summary.to_json() | {"added": "by another"}))
    assert Summary.from_json(data) == summary
    del data["wall_s"], data["seed"]
    with pytest.raises(MonitorError, match=r"summary: seed, wall_s missing; found name, steps"):
        Summary.from_json(data)
