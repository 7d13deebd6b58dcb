import json

import pytest

from harnessrl_jax.errors import RolloutError
from harnessrl_jax.rollouts import Job, Outcome, read_result


def result(**changes):
    return json.dumps({"job": "s-1", "status": "completed", "answer": "Bern", "detail": ""} | changes).encode()


def test_a_job_is_one_line_and_hides_its_key():
    job = Job(job_id="1-t-0/0", question="Where\nis it?", base_url="http://127.0.0.1:1/r/1-t-0/0", api_key="secret")
    line = job.line()
    assert line.count(b"\n") == 1
    assert json.loads(line) == {
        "job": "1-t-0/0",
        "question": "Where\nis it?",
        "base_url": "http://127.0.0.1:1/r/1-t-0/0",
        "api_key": "secret",
    }
    assert "secret" not in repr(job)


def test_a_result_is_read():
    assert read_result(result()) == ("s-1", Outcome(ending="completed", answer="Bern", detail=""))
    gave_up = read_result(result(status="gave_up", answer=None, detail="no calls left"))
    assert gave_up == ("s-1", Outcome(ending="gave_up", answer=None, detail="no calls left"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            b"Loading model...",
            r"printed 'Loading model\.\.\.', which is not a result line: not JSON .* everything else",
        ),
        (b'"text"', "not a JSON object"),
        (result(job=7), '"job" must be the id of a job'),
        (result(status="crash"), '"status" must be one of completed, gave_up, truncated, error'),
        (result(detail=None), '"detail" must be a text'),
        (result(answer=None), '"answer" must be a text if the status is completed'),
        (result(status="gave_up"), '"answer" must be a text if the status is completed, and null otherwise'),
        (b"x" * 5000, "printed '" + "x" * 200 + "', which"),
    ],
)
def test_a_line_that_is_no_result_is_refused(line, message):
    with pytest.raises(RolloutError, match=message):
        read_result(line)


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("completed", "completed"),
        ("gave_up", "policy_failure"),
        ("truncated", "truncated"),
        *((machine, "infra_failure") for machine in ("error", "crash", "hang", "lost", "protocol")),
    ],
)
def test_every_ending_has_one_to_blame(ending, status):
    assert Outcome(ending=ending, answer=None, detail="").status == status
