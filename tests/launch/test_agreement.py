import asyncio
import contextlib
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from harnessrl_jax import config
from harnessrl_jax.errors import RolloutError, SamplerError
from harnessrl_jax.launch import train
from harnessrl_jax.launch.agreement import check_agreement, check_logp_kinds
from harnessrl_jax.launch.services import Collected
from harnessrl_jax.trajectories import LogpKind, build_lineage
from tests.trajectories.conftest import call_of, rollout_of

GOOD = {"mismatch_mean": 3e-6, "mismatch_correlation": 0.9999, "mismatch_correlation_valid": 1.0}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"mismatch_mean": 0.02},  # bfloat16
        {"mismatch_correlation": 0.0, "mismatch_correlation_valid": 0.0},  # all tokens equally probable
    ],
)
def test_rounding_is_no_disagreement(change):
    check_agreement(GOOD | change)


@pytest.mark.parametrize("change", [{"mismatch_mean": 0.06}, {"mismatch_correlation": 0.9}])
def test_another_model_is_one(change):
    with pytest.raises(SamplerError, match=r"^Before the first update, .* They do not compute the same model: compare"):
        check_agreement(GOOD | change)


RAW = LogpKind(mode="raw", temperature=1.0, top_p=1.0, top_k=0)
COOL = LogpKind(mode="processed", temperature=0.5, top_p=1.0, top_k=0)
WARM = dataclasses.replace(COOL, temperature=1.0)


def call(kind):
    return call_of("c", [1], [2, 3], logp_kind=kind, logps=None if kind is None else np.float32([-1.0, -2.0]))


@pytest.mark.parametrize(("kind", "temperature"), [(RAW, 1.0), (WARM, 1.0), (COOL, 0.5), (None, 0.5)])
def test_log_probabilities_that_training_computes_are_compared(kind, temperature):
    check_logp_kinds([call(kind)], temperature)


@pytest.mark.parametrize(
    ("kind", "temperature"),
    [
        (RAW, 0.5),
        (dataclasses.replace(RAW, temperature=0.5), 1.0),
        (dataclasses.replace(RAW, temperature=0.5), 0.5),
        (WARM, 0.5),
        (COOL, 1.0),
        (dataclasses.replace(WARM, top_p=0.9), 1.0),
        (dataclasses.replace(WARM, top_k=40), 1.0),
        (dataclasses.replace(COOL, min_p=0.1), 0.5),
    ],
)
def test_others_are_refused(kind, temperature):
    with pytest.raises(SamplerError, match=r"Call 'c' of rollout 'r' was sampled with LogpKind\(mode=.*Let the engine"):
        check_logp_kinds([call(None), call(kind)], temperature)


def step_on(monkeypatch, rollouts, lineages=()):
    """A step of training on what was collected, with nothing behind it that could train."""

    async def collect(*_, **__):
        return Collected(tuple(rollouts), tuple(lineages), 0)

    monkeypatch.setattr(train, "collect", collect)
    given = config.parse("name = 'x'\nsteps = 1\n[behaviour]\ntemperature = 0.5\n", "x.toml", [])
    run = SimpleNamespace(config=given, services=None)
    position = SimpleNamespace(step=0, stream=SimpleNamespace(take=lambda count: []))
    progress = SimpleNamespace(part=lambda name: contextlib.nullcontext())
    asyncio.run(train._step(run, None, None, position, progress))


def test_a_step_stops_before_it_trains_on_others(monkeypatch):
    rollouts = [rollout_of("r", 1.0), rollout_of("s", 0.0)]
    sampled = {"logp_kind": WARM, "logps": np.float32([-1.0, -2.0])}
    lineages = [build_lineage([call_of(name, [1], [2, 3], rollout_id=name, **sampled)]) for name in ("r", "s")]
    with pytest.raises(SamplerError, match=r"training computes log-probabilities at behaviour\.temperature = 0\.5"):
        step_on(monkeypatch, rollouts, lineages)


def test_a_step_stops_where_every_rollout_was_lost(monkeypatch):
    lost = {"status": "infra_failure", "detail": "error: no model"}
    with pytest.raises(RolloutError, match=r"All 2 rollouts of 2 tasks failed.*error: no model"):
        step_on(monkeypatch, [rollout_of(name, None, task_id=name, **lost) for name in ("r", "s")])
