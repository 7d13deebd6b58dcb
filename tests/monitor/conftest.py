"""A small rollout: a central agent, a retried researcher, a frozen one; ids are code points."""

import json

import numpy as np
import pytest

from harnessrl_jax.monitor import Summary, view
from harnessrl_jax.trajectories.lineage import build_lineage
from harnessrl_jax.trajectories.records import Call, Role, Rollout, Span, Task, ToolCall


def spell(ids):
    return "".join(map(chr, ids))


def code_points(text):
    return np.array([ord(character) for character in text], np.int32)


def make_call(seq, prompt, output, **fields):
    """A central call, unless `fields` says otherwise: 'NAME:ARGUMENT.' with both parts labelled."""
    name, _, argument = output.rstrip(".").partition(":")
    spans = [Span(role=Role.ACTION, start=0, end=len(name))]
    if argument:
        spans.append(Span(role=Role.ARGS, start=len(name) + 1, end=len(name) + 1 + len(argument)))
    tool = ToolCall(id=f"t{seq}", name=name, arguments=json.dumps({"text": argument}))
    values = dict(
        run_id="run", task_id="task", group_id="group", rollout_id="r7", attempt=0, session_id="main", agent="central",
        trainable=True, parent_call_id=None, call_id=f"c{seq}", seq=seq, choice=0, harness="demo", dialect="chat",
        prompt_ids=code_points(prompt), output_ids=code_points(output), logps=None, logp_kind=None, version_start=3,
        version_end=3, finish="tool_calls", parse_status="ok", tool_calls=(tool,), spans=tuple(spans), delivered=True,
        request_digest=f"d{prompt}", retry=False, request="{}", started_s=float(seq), finished_s=seq + 0.5,
    )  # fmt: skip
    return Call(**(values | fields))


def request_body(text):
    return json.dumps({"messages": [{"role": "system", "content": "find"}, {"role": "user", "content": text}]})


@pytest.fixture
def decode():
    return spell


@pytest.fixture
def new_call():
    return make_call


@pytest.fixture
def body():
    return request_body


@pytest.fixture
def hostile():
    """Text that breaks a page, a terminal or a file if it is not made harmless."""
    return "</pre><script>alert(1)</script>\x1b[31m\u202e\ud800"


@pytest.fixture
def calls():
    sub = dict(agent="researcher", session_id="sub-1", request=request_body("highest of Chad"))
    frozen = dict(
        agent="critic", session_id="check", trainable=False, request=request_body("Please judge: highest of Chad!")
    )
    return [
        make_call(0, "Q?", "ask:highest of Chad."),
        make_call(1, "find", "look:Chad.", delivered=False, **sub),
        make_call(2, "find", "look:Chad.", retry=True, **sub),
        make_call(3, "judge", "good:yes.", **frozen),
        make_call(4, "Q?ask:highest of Chad.=Emi>", "say:Emi é."),
    ]


@pytest.fixture
def rollout():
    return Rollout(
        run_id="run", task_id="task", group_id="group", rollout_id="r7", attempt=0, harness="demo", status="completed",
        reward=1.0, process_rewards={"c0": 0.5}, answer="Emi", detail="", version=3, started_s=0.0, finished_s=4.5,
    )  # fmt: skip


@pytest.fixture
def task():
    return Task(
        task_id="task", question="Which is the highest?", answers=("Emi Koussi",), hops=1, chain=(), template="",
        split="heldout",
    )  # fmt: skip


@pytest.fixture
def seen(rollout, calls, task):
    """The view of the rollout, trained."""
    return view(rollout, build_lineage(calls), spell, task=task, advantages={"c0": 0.5, "c2": -0.25, "c4": 1.0})


@pytest.fixture
def summary():
    return Summary(
        name="demo", seed=1, steps=12, wall_s=125.0, heldout_questions=64, heldout_f1_start=0.25, heldout_f1_end=0.625,
        heldout_em_start=0.2, heldout_em_end=0.1, counts={"calls": 1234, "rollouts": 96}, dropped={"too_long": 17},
        time_s={"rollouts": 100.0, "training": 20.0},
    )  # fmt: skip
