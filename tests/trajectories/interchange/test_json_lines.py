import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harnessrl_jax.errors import RecordError
from harnessrl_jax.trajectories import Role, Span, ToolCall
from harnessrl_jax.trajectories.interchange import KeptCall, Records, from_lines, kept, to_lines

TEXT = st.text(st.characters(codec="utf-8") | st.just("\ud800"), max_size=8)


def test_records_come_back_as_they_were(make_call, make_rollout):
    spans, tools = (Span(role=Role.ACTION, start=0, end=1),), (ToolCall(id="t", name="é", arguments='{"a": 1.0}'),)
    first = make_call("a", [1, 2], [3, 4], spans=spans, tool_calls=tools, request='{"x": "\ud800 \u2028"}')
    second = make_call("b", [2**31 - 1], [], logps=None, delivered=False, parent_call_id="a")
    noted = KeptCall(second, "late", {"spliced": ["a"], "asked": {"top_p": 0.5}})
    records = Records((kept(first), noted), (make_rollout(reward=0.1), make_rollout("s", None, answer="\n")))
    lines = list(to_lines(*records))
    assert all("\n" not in line for line in lines)
    assert from_lines(lines) == records
    assert from_lines([line + "\n" for line in lines] + ["\n"]) == records


@settings(max_examples=30)
@given(st.lists(st.floats(-100, 0, width=32), min_size=1, max_size=5), TEXT.filter(bool), TEXT)
def test_every_number_and_letter_survives(make_call, make_rollout, logps, name, request):
    call = make_call("a", [1], range(len(logps)), logps=np.array(logps, np.float32), agent=name, request=request)
    records = Records((kept(call),), (make_rollout(reward=logps[0], answer=request),))
    assert from_lines(to_lines(*records)) == records


def lines_of(make_call, **changes):
    head, line = to_lines([kept(make_call("a", [1], [2]))], [])
    return head, json.dumps(json.loads(line) | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 9}, r"line 2: Call\.from_json: got schema 9"),
        ({"record": "task"}, r"line 2: record is 'task'; wanted 'call' or 'rollout'"),
        ({"state": "done"}, r"line 2: state is 'done', wanted one of sampled, delivered"),
        ({"notes": []}, r"notes is \[\], wanted an object"),
        ({"delivered": False}, r"line 2: call 'a' has delivered = False and state 'delivered', which differ"),
        ({"colour": 1}, r"line 2: .*unknown field 'colour'"),
    ],
)
def test_a_line_that_is_no_record_is_named(make_call, changes, message):
    with pytest.raises(RecordError, match=message):
        from_lines(lines_of(make_call, **changes))


def test_a_file_that_is_no_file_of_calls(make_call):
    head, line = lines_of(make_call)
    for lines, message in (
        ([], r"line 1: the file is empty"),
        ([line], r"line 1: format is None, wanted 'harnessrl_jax\.calls'"),
        ([head.replace("1}", "2}"), line], r"line 1: version 2 of the format, this version of the library reads 1"),
        ([head, line[:-9]], r"line 2: not JSON .* the file was cut; export it again"),
        ([head, "[1]"], r"line 2: a JSON object is wanted, got list"),
    ):
        with pytest.raises(RecordError, match=message):
            from_lines(lines)
