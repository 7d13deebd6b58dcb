"""Our calls through ATIF and back, and what other programs write."""

import copy
import dataclasses
import json
import re
from datetime import datetime

import pytest

from harnessrl_jax.errors import RecordError
from harnessrl_jax.trajectories import LogpKind, Role, Span, ToolCall
from harnessrl_jax.trajectories.interchange import KeptCall, Origin, from_atif, heard, kept, to_atif

ORIGIN = Origin(
    run_id="new", task_id="question", rollout_id="r9", trainable_agents=None,
    logp_kind=LogpKind(mode="raw", temperature=1.0, top_p=1.0, top_k=0), version=4,
)  # fmt: skip


def speak(call):
    return f"says {call.call_id}"


def said(role, content, **more):
    return {"role": role, "content": content} | more


@pytest.fixture
def calls(make_call):
    """A central agent that asks a researcher, whose first try was lost, and then rewrites its history."""
    system, question, noted = said("system", "be brief"), said("user", "Q"), said("assistant", "says c0")
    body = lambda *messages: json.dumps({"messages": messages})
    tool = ToolCall(id="t0", name="ask", arguments='{"who":  "é"}')
    look = body(said("user", "look"))
    sub = dict(agent="researcher", session_id="s1", parent_call_id="c0", request=look)
    more = said("tool", "found", tool_call_id="t0")
    return [
        make_call("c0", [1, 2], [3, 4], tool_calls=(tool,), finish="tool_calls", parse_status="ok",
                  spans=(Span(role=Role.ACTION, start=0, end=1),), request=body(system, question), harness="demo 1.2"),
        make_call("c1", [9], [8], seq=1, delivered=False, logps=None, **sub),
        make_call("c2", [9], [7], seq=2, retry=True, **sub),
        make_call("c3", [1, 2, 3, 4, 5], [6], seq=3, request=body(system, question, noted, more), harness="demo 1.2"),
        make_call("c4", [1, 7], [], seq=4, logps=None, request=body(system, said("user", "sum up"), question)),
        make_call("c5", [5], [5], seq=5, choice=1, agent="lone", session_id="x", request=body(said("user", "hm"))),
    ]  # fmt: skip


@pytest.fixture
def exported(calls, make_rollout):
    keeping = [KeptCall(calls[0], "delivered", {"spliced": []}), *map(kept, calls[1:])]
    return to_atif(keeping, make_rollout(reward=0.25, process_rewards={"c0": 1.0}), speak=speak, listen=heard)


def test_our_own_document_gives_back_equal_records(calls, exported, make_rollout):
    document = json.loads(json.dumps(exported.document, allow_nan=False))
    back = from_atif(document, ORIGIN)
    assert [item.call for item in back.records.calls] == calls
    assert [item.state for item in back.records.calls] == ["delivered", "sampled", *["delivered"] * 4]
    assert back.records.calls[0].notes == {"spliced": []}
    assert back.records.rollouts == (make_rollout(reward=0.25, process_rewards={"c0": 1.0}),)


def test_the_order_of_the_calls_does_not_matter(calls, exported, make_rollout):
    keeping = [*map(kept, calls[:0:-1]), KeptCall(calls[0], "delivered", {"spliced": []})]
    again = to_atif(keeping, make_rollout(reward=0.25, process_rewards={"c0": 1.0}), speak=speak, listen=heard)
    assert again == exported


def test_a_step_is_a_call_with_its_ids(exported):
    step = next(step for step in exported.document["steps"] if step["source"] == "agent")
    assert step["message"] == "says c0"
    assert step["metrics"] == {
        "prompt_tokens": 2, "completion_tokens": 2, "prompt_token_ids": [1, 2], "completion_token_ids": [3, 4],
        "logprobs": [-0.125, -0.25],
    }  # fmt: skip
    assert [(tool["function_name"], tool["arguments"]) for tool in step["tool_calls"]] == [("ask", {"who": "é"})]
    assert exported.document["agent"] == {"name": "demo", "version": "1.2", "extra": {"role": "central"}}
    assert exported.document["final_metrics"]["total_completion_tokens"] == 3


def test_messages_become_steps_once(exported):
    steps = exported.document["steps"]
    heard = [(step["source"], step["message"], step.get("is_copied_context", False)) for step in steps]
    assert heard == [
        ("system", "be brief", False),
        ("user", "Q", False),
        ("agent", "says c0", False),
        ("agent", "says c3", False),
        ("user", "sum up", False),
        ("user", "Q", True),
        ("agent", "says c4", False),
    ]
    assert steps[2]["observation"]["results"][0] == {"content": "found", "source_call_id": "t0"}


def test_a_sub_agent_stands_below_the_call_that_opened_it(exported):
    researcher, lone = exported.document["subagent_trajectories"]
    assert [researcher["agent"]["extra"]["role"], lone["agent"]["extra"]["role"]] == ["researcher", "lone"]
    opener = next(step for step in exported.document["steps"] if step["message"] == "says c0")
    (reference,) = [r for r in opener["observation"]["results"] if "subagent_trajectory_ref" in r]
    assert reference["subagent_trajectory_ref"][0]["trajectory_id"] == researcher["trajectory_id"]
    assert exported.notes["conversations without a known opener, which stand below the first"] == 1


def test_an_opener_that_comes_later_opens_nothing(make_call):
    calls = [
        make_call("a", [1], [2]),
        make_call("b", [3], [4], seq=1, agent="b", session_id="b", parent_call_id="c"),
        make_call("c", [5], [6], seq=2, agent="c", session_id="c", parent_call_id="b"),
    ]
    document, notes = to_atif([kept(call) for call in calls], None, speak=speak, listen=heard)
    assert notes["conversations without a known opener, which stand below the first"] == 1
    (below,) = document["subagent_trajectories"]
    assert [sub["agent"]["extra"]["role"] for sub in below["subagent_trajectories"]] == ["c"]
    assert [item.call for item in from_atif(document, ORIGIN).records.calls] == calls


def test_what_atif_cannot_say_is_counted(calls, exported, make_call):
    assert exported.notes["sampled calls, which are steps like the others"] == 1
    assert exported.notes["further choices of a request, which are steps of their own"] == 1
    assert sum(number for note, number in exported.notes.items() if note.startswith("calls whose weights")) == 6
    broken = make_call("b", [1], [2], tool_calls=(ToolCall(id="t", name="f", arguments='{"a":'),))
    document, notes = to_atif([kept(broken)], None, speak=speak, listen=lambda call: None)
    assert notes["tool calls whose arguments are no JSON object; their text stands in `extra`"] == 1
    assert notes["requests that could not be read: their messages are missing"] == 1
    assert document["steps"][0]["tool_calls"][0]["arguments"] == {}
    assert from_atif(document, ORIGIN).records.calls[0].call == broken
    with pytest.raises(RecordError, match="no trajectory without a step"):
        to_atif([], None, speak=speak, listen=heard)


def check_document(document, seen):
    """The rules of RFC 0001, v1.7, that a document must keep."""
    known = {
        *("schema_version", "session_id", "trajectory_id", "agent", "steps", "notes", "final_metrics"),
        *("continued_trajectory_ref", "extra", "subagent_trajectories"),
    }
    assert set(document) <= known
    assert re.fullmatch(r"ATIF-v1\.7", document["schema_version"])
    assert {"name", "version"} <= set(document["agent"]) <= {"name", "version", "model_name", "extra"}
    assert document["trajectory_id"] not in seen
    seen.add(document["trajectory_id"])
    assert [step["step_id"] for step in document["steps"]] == [*range(1, len(document["steps"]) + 1)]
    below = {sub["trajectory_id"] for sub in document.get("subagent_trajectories", [])}
    for step in document["steps"]:
        assert isinstance(step["message"], str)
        agent_only = {"model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics", "llm_call_count"}
        assert step["source"] == "agent" or not agent_only & set(step)
        if "timestamp" in step:
            datetime.fromisoformat(step["timestamp"])
        tools = {tool["tool_call_id"] for tool in step.get("tool_calls", [])}
        for result in step.get("observation", {}).get("results", []):
            assert result.get("source_call_id", next(iter(tools), None)) in {*tools, None}
            assert all(reference["trajectory_id"] in below for reference in result.get("subagent_trajectory_ref", []))
    for sub in document.get("subagent_trajectories", []):
        check_document(sub, seen)


def test_the_document_keeps_the_rules_of_the_format(exported):
    check_document(exported.document, set())


FOREIGN = {
    "schema_version": "ATIF-v1.6",
    "session_id": "s-1",
    "agent": {"name": "openhands", "version": "0.9"},
    "steps": [
        {"step_id": 1, "source": "user", "message": "List it"},
        {
            "step_id": 2, "source": "agent", "message": "ls", "reasoning_content": "hm",
            "tool_calls": [{"tool_call_id": "t1", "function_name": "bash", "arguments": {"command": "ls"}}],
            "observation": {"results": [
                {"source_call_id": "t1", "content": "a"}, {"subagent_trajectory_ref": [{"trajectory_id": "sub"}]},
                {"subagent_trajectory_ref": [{"session_id": "z", "trajectory_path": "z.json"}]}]},
            "metrics": {"prompt_token_ids": [1, 2], "completion_token_ids": [3], "logprobs": [-0.5]},
        },
        {"step_id": 3, "source": "agent", "message": "no ids", "metrics": {"prompt_tokens": 5}},
        {"step_id": 4, "source": "agent", "message": "old", "is_copied_context": True,
         "metrics": {"prompt_token_ids": [1], "completion_token_ids": [2]}},
        {"step_id": 5, "source": "agent", "message": "two calls", "llm_call_count": 2,
         "metrics": {"prompt_token_ids": [1], "completion_token_ids": [2]}},
    ],
    "subagent_trajectories": [
        {"schema_version": "ATIF-v1.6", "trajectory_id": "sub", "agent": {"name": "helper", "version": "1"},
         "steps": [{"step_id": 1, "source": "agent", "message": "x",
                    "metrics": {"prompt_token_ids": [7], "completion_token_ids": []}}]},
    ],
}  # fmt: skip


def test_another_programs_steps_with_ids_are_calls():
    (first, helper), rollouts = from_atif(FOREIGN, ORIGIN).records
    call = first.call
    assert (call.prompt_ids.tolist(), call.output_ids.tolist(), call.logps.tolist()) == ([1, 2], [3], [-0.5])
    assert (call.agent, call.harness, call.session_id, call.finish) == (
        "openhands",
        "openhands 0.9",
        "s-1",
        "tool_calls",
    )
    assert call.tool_calls == (ToolCall(id="t1", name="bash", arguments='{"command": "ls"}'),)
    assert (call.run_id, call.task_id, call.rollout_id, call.version_start) == ("new", "question", "r9", 4)
    assert (helper.call.agent, helper.call.parent_call_id, helper.call.seq) == ("helper", call.call_id, 1)
    assert rollouts == ()


def test_everything_assumed_or_passed_over_is_counted():
    notes = from_atif(FOREIGN, ORIGIN).notes
    assert sorted(notes.values()) == [1, 1, 1, 1, 1, 2]
    for word in ("without token ids", "copied for context", "several model calls", "without a reward", "of their own"):
        assert sum(number for note, number in notes.items() if word in note) == 1, word
    assert sum(number for note, number in notes.items() if "are assumed" in note) == 2


def test_log_probabilities_of_an_unknown_kind_are_absent_not_zero():
    imported = from_atif(FOREIGN, ORIGIN._replace(logp_kind=None))
    assert imported.records.calls[0].call.logps is None
    assert sum(number for note, number in imported.notes.items() if "log-probabilities are left out" in note) == 1


def test_agents_to_train_are_chosen():
    calls = from_atif(FOREIGN, ORIGIN._replace(trainable_agents=["helper"])).records.calls
    assert [item.call.trainable for item in calls] == [False, True]


def broken(*path, value):
    document = copy.deepcopy(FOREIGN)
    *there, last = path
    place = document
    for step in there:
        place = place[step]
    place[last] = value
    return document


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (broken("schema_version", value="ATIF-v2.0"), r"ATIF-v1\.0 to ATIF-v1\.8 can be read"),
        (broken("schema_version", value=None), r"schema_version is None"),
        (broken("steps", 1, "step_id", value=7), r"steps\[1\]\.step_id is 7, wanted 2"),
        (broken("steps", value="x"), r"steps: a list of objects is wanted, got 'x'"),
        (broken("steps", 1, "metrics", "logprobs", value=[-1, -2]), r"steps\[1\]: .*logps has shape \[2\] for 1"),
        (broken("steps", 1, "metrics", value=[1]), r"steps\[1\]\.metrics: an object is wanted, got list"),
        (broken("steps", 1, "tool_calls", 0, "arguments", value="{}"), r"steps\[1\]\.tool_calls: wanted tool_call_id"),
        (broken("subagent_trajectories", 0, "trajectory_id", value=None), r"needs one of its own"),
        (broken("subagent_trajectories", 0, "steps", 0, "step_id", value=2), r"subagent_trajectories\[0\]\.steps\[0\]"),
    ],
)
def test_a_document_that_breaks_the_format_is_named(document, message):
    with pytest.raises(RecordError, match=message):
        from_atif(document, ORIGIN)


def test_a_document_of_ours_that_lost_its_extras_is_read_as_anothers(exported):
    document = json.loads(re.sub(r'"harnessrl_jax"', '"gone"', json.dumps(exported.document)))
    calls = from_atif(document, ORIGIN).records.calls
    assert [item.call.output_ids.tolist() for item in calls] == [[3, 4], [6], [], [8], [7], [5]]
    assert dataclasses.replace(calls[0].call).harness == "demo 1.2"
