"""Short ways to write a call or a rollout in a test: only what the test is about is spelled out."""

import numpy as np
import pytest

from harnessrl_jax.trajectories import Call, LogpKind, Rollout

RAW = LogpKind(mode="raw", temperature=1.0, top_p=1.0, top_k=0)


def call_of(call_id, prompt_ids, output_ids, **changes):
    """A delivered, trainable call of agent "central"; log-prob of output i is -(i + 1) / 8."""
    fields = {
        "run_id": "run", "task_id": "task", "group_id": "group", "rollout_id": "r", "attempt": 0,
        "session_id": changes.get("agent", "central"), "agent": "central", "trainable": True, "parent_call_id": None,
        "call_id": call_id, "seq": 0, "choice": 0, "harness": "h", "dialect": "openai-chat",
        "prompt_ids": prompt_ids, "output_ids": output_ids,
        "logps": -(np.arange(len(output_ids), dtype=np.float32) + 1) / 8, "logp_kind": RAW,
        "version_start": 0, "version_end": 0, "finish": "stop", "parse_status": "none", "tool_calls": (), "spans": (),
        "delivered": True, "request_digest": call_id, "retry": False, "request": "{}",
        "started_s": 0.0, "finished_s": 1.0,
    }  # fmt: skip
    if "logps" in changes and changes["logps"] is None:
        changes = {"logp_kind": None} | changes
    return Call(**(fields | changes))


def rollout_of(rollout_id="r", reward=1.0, **changes):
    """A completed rollout of group "group"."""
    fields = {
        "run_id": "run", "task_id": "task", "group_id": "group", "rollout_id": rollout_id, "attempt": 0,
        "harness": "h", "status": "completed", "reward": reward, "process_rewards": {}, "answer": None, "detail": "",
        "version": 0, "started_s": 0.0, "finished_s": 1.0,
    }  # fmt: skip
    return Rollout(**(fields | changes))


@pytest.fixture(scope="session")
def make_call():
    return call_of


@pytest.fixture(scope="session")
def make_rollout():
    return rollout_of
