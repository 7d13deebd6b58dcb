import dataclasses
import json

import numpy as np
import pytest

from harnessrl_jax.errors import RecordError
from harnessrl_jax.trajectories import Call, LogpKind, Role, Rollout, Span, Task, ToolCall

TASK = Task(
    task_id="t1", question="Which?", answers=("Nile",), hops=2, chain=("p1", "p2"), template="river", split="train"
)


@pytest.fixture
def call(make_call):
    return make_call(
        "c",
        [1, 2, 3],
        [4, 5, 6],
        tool_calls=(ToolCall(id="x", name="find", arguments='{"q": "é"}'),),
        spans=(Span(role=Role.ACTION, start=0, end=1), Span(role=Role.ARGS, start=1, end=2)),
    )


def through_json(record):
    return type(record).from_json(json.loads(json.dumps(record.to_json())))


def test_json_gives_the_same_record_back(call, make_call, make_rollout):
    for record in (call, make_call("d", [1], [], logps=None), make_rollout(process_rewards={"c": 0.5}), TASK):
        assert through_json(record) == record
    assert through_json(call).output_ids.dtype == np.int32
    assert through_json(call).logps.dtype == np.float32


def test_experts_are_kept_of_every_token_that_was_read(make_call):
    experts = np.arange(4 * 2 * 3).reshape(4, 2, 3)
    call = make_call("c", [1, 2, 3], [4, 5], experts=experts)
    assert call != dataclasses.replace(call, experts=experts + 1)
    assert through_json(call) == call
    found = through_json(call).experts
    assert (found.dtype, found.tolist()) == (np.uint8, experts.tolist())
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 0
    assert through_json(make_call("c", [1], [], experts=experts[:1])).experts.shape == (1, 2, 3)
    with pytest.raises(RecordError, match=r"Call 'c' .*: experts has 4 tokens; wanted 3, those of prompt_ids and of"):
        make_call("c", [1, 2, 3], [4], experts=experts)
    with pytest.raises(RecordError, match=r"experts must be numbers from 0 to 255, got 'numbers from 233 to 256'"):
        make_call("c", [1, 2, 3], [4, 5], experts=experts + 233)
    with pytest.raises(RecordError, match=r"experts must be integers \[token, layer, active\], got 'float64\["):
        make_call("c", [1, 2, 3], [4, 5], experts=experts / 2)
    with pytest.raises(RecordError, match=r"a nested field cannot be read: ValueError"):
        Call.from_json(call.to_json() | {"experts": {"shape": [1, 2, 3], "base64": "AAAA"}})


def test_absent_logps_stay_absent(make_call):
    call = make_call("c", [1], [2], logps=None)
    assert call.logps is None
    assert call.to_json()["logps"] is None
    assert through_json(call).logps is None


def test_records_differ_where_a_field_differs(call, make_call):
    assert call != dataclasses.replace(call, output_ids=[4, 5, 7])
    assert call != dataclasses.replace(call, logps=[-0.5, -0.5, -0.5])
    assert call != "c"
    assert len({call, dataclasses.replace(call)}) == 1


def test_a_record_does_not_change_with_the_buffer_it_came_from(make_call):
    ids = np.array([7, 8], np.int64)
    call = make_call("c", ids, [1])
    ids[0] = 0
    assert call.prompt_ids.tolist() == [7, 8]
    with pytest.raises(ValueError, match="read-only"):
        call.prompt_ids[0] = 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": []}, r"Call 'c' of rollout 'r': prompt_ids must be at least one, which predicts the first"),
        ({"prompt_ids": [[1]]}, r"prompt_ids must be a flat sequence of integers, got 'int64\[1, 1\]'"),
        ({"output_ids": [1.0, 2.0, 3.0]}, r"output_ids must be a flat sequence of integers, got 'float64\[3\]'"),
        ({"output_ids": [1, -1, 2]}, r"output_ids must be ids from 0 to 2\*\*31 - 1, got 'ids from -1 to 2'"),
        ({"logps": [-1.0, -1.0]}, r"logps has shape \[2\] for 3 output_ids.*or None if the sampler gave none"),
        ({"logps": [-1.0, float("nan"), -1.0]}, r"logps must be finite and at most 0, got \[nan\]"),
        ({"logps": [-1.0, 0.5, -1.0]}, r"logps must be finite and at most 0, got \[0\.5\]"),
        ({"logps": [-1.0, None, -1.0]}, r"logps must be"),
        ({"logps": ["a", "b", "c"]}, r"logps must be numbers"),
        ({"logps": None}, r"logps and logp_kind go together, got no logps and logp_kind"),
        ({"logp_kind": None}, r"logps and logp_kind go together, got logps and no logp_kind"),
        ({"finish": "eos"}, r"finish must be one of stop, length, tool_calls, aborted, error, got 'eos'"),
        ({"parse_status": "bad"}, r"parse_status must be one of none, ok, malformed, truncated, got 'bad'"),
        ({"attempt": True}, r"attempt must be an integer of at least 0, got True"),
        ({"seq": -1}, r"seq must be an integer of at least 0, got -1"),
        ({"version_start": 3, "version_end": 2}, r"version_end must be an integer of at least 3, got 2"),
        ({"agent": ""}, r"agent must be a non-empty string, got ''"),
        ({"spans": (Span(role=Role.ARGS, start=1, end=4),)}, r"spans must be ascending, disjoint, inside 0\.\.3"),
        (
            {"spans": (Span(role=Role.ARGS, start=1, end=3), Span(role=Role.ACTION, start=2, end=3))},
            r"spans must be ascending, disjoint",
        ),
        ({"spans": (Span(role=Role.NONE, start=0, end=1),)}, r"spans must be of role ACTION, ARGS or OTHER"),
    ],
)
def test_a_bad_call_says_what_and_where(call, change, message):
    with pytest.raises(RecordError, match=message):
        dataclasses.replace(call, **change)


def test_a_rounded_log_probability_just_above_zero_is_accepted(make_call):
    assert make_call("c", [1], [2], logps=[1e-7]).logps[0] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": float("inf")}, r"Rollout 'r': reward must be a finite number, got inf"),
        ({"reward": True}, r"reward must be a finite number, got True"),
        ({"process_rewards": {"c": "1"}}, r"process_rewards\['c'\] must be a finite number, got '1'"),
        ({"status": "crashed"}, r"status must be one of completed, truncated, policy_failure, infra_failure"),
    ],
)
def test_a_bad_rollout_says_what_and_where(make_rollout, change, message):
    with pytest.raises(RecordError, match=message):
        make_rollout(**change)


def test_headers_are_kept_by_lower_case_name(call):
    kept = dataclasses.replace(call, headers={"thread-id": "t"})
    assert Call.from_json(kept.to_json()) == kept != call
    with pytest.raises(RecordError, match=r"headers must be named in lower case, got 'Thread-Id'"):
        dataclasses.replace(call, headers={"Thread-Id": "t"})
    with pytest.raises(RecordError, match=r"headers\['thread-id'\] must be a string, got 3"):
        dataclasses.replace(call, headers={"thread-id": 3})
    without = {name: value for name, value in call.to_json().items() if name != "headers"}
    with pytest.raises(RecordError, match="missing field headers"):
        Call.from_json(without)


def test_bad_small_records_say_what_and_where():
    with pytest.raises(RecordError, match=r"Span: start, end must be 0 <= start < end, got \(2, 2\)"):
        Span(role=Role.ARGS, start=2, end=2)
    with pytest.raises(RecordError, match=r"LogpKind: temperature must be > 0, got 0\.0"):
        LogpKind(mode="raw", temperature=0.0, top_p=1.0, top_k=0)
    with pytest.raises(RecordError, match=r"LogpKind: top_p must be in \(0, 1\], got 0"):
        LogpKind(mode="raw", temperature=1.0, top_p=0, top_k=0)
    with pytest.raises(RecordError, match=r"Task 't1': answers must be at least one, got 'none'"):
        dataclasses.replace(TASK, answers=())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, r"Call\.from_json: got schema 2, this version reads schema 3"),
        ({"ouput_ids": []}, r"unknown field 'ouput_ids'\. Did you mean 'output_ids'\?"),
        ({"spans": [["ACTION", 0]]}, r"a nested field cannot be read"),
        ({"spans": [["LABEL", 0, 1]]}, r"a nested field cannot be read: KeyError\('LABEL'\)"),
        ({"logp_kind": {"mode": "raw"}}, r"a nested field cannot be read"),
    ],
)
def test_bad_json_says_what_and_where(call, change, message):
    with pytest.raises(RecordError, match=message):
        Call.from_json(call.to_json() | change)


def test_a_missing_field_is_named(make_rollout):
    data = make_rollout().to_json()
    del data["reward"], data["detail"]
    with pytest.raises(RecordError, match=r"Rollout\.from_json: missing field reward, detail\."):
        Rollout.from_json(data)
