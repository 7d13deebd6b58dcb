"""A job -> the line a harness program reads; the line it prints -> an outcome. Pure.

The contract of a harness program: it reads one JSON object a line on stdin,
`{"job", "question", "base_url", "api_key"}`, may work on many at once, and prints one JSON object a line on stdout for
each, in any order: `{"job", "status", "answer", "detail"}`. Everything else it has to say belongs on stderr. It ends
when stdin ends.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, get_args

from harnessrl_jax.errors import RolloutError
from harnessrl_jax.trajectories.records import RolloutStatus

Reported = Literal["completed", "gave_up", "truncated", "error"]
"""What a harness may say: it answered; its agents found no answer; a context or call limit cut it; it failed."""

Ending = Literal["completed", "gave_up", "truncated", "error", "crash", "hang", "lost", "protocol"]
"""How a job ended. Beside what a harness reports: its process ended, it took too long, its process was killed because
of another job, it printed something else than results."""

STATUS: Mapping[Ending, RolloutStatus] = MappingProxyType(
    {
        "completed": "completed",
        "gave_up": "policy_failure",
        "truncated": "truncated",
        "error": "infra_failure",
        "crash": "infra_failure",
        "hang": "infra_failure",
        "lost": "infra_failure",
        "protocol": "infra_failure",
    }
)
"""Who is to blame: the policy keeps its reward, the machine is in neither the loss nor the baseline."""

SHOWN_BYTES = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One question for a harness, with the endpoint that answers its model calls."""

    job_id: str
    question: str
    base_url: str
    api_key: str = field(repr=False)

    def line(self) -> bytes:
        """The job as one line of JSON."""
        names = {"job": self.job_id, "question": self.question, "base_url": self.base_url, "api_key": self.api_key}
        return json.dumps(names).encode() + b"\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a job ended; `answer` is a text exactly if it was completed."""

    ending: Ending
    answer: str | None
    detail: str

    @property
    def status(self) -> RolloutStatus:
        """The class of this ending."""
        return STATUS[self.ending]


def read_result(line: bytes) -> tuple[str, Outcome]:
    """The job id and outcome in one line of a harness's output.

    Raises:
      RolloutError: the line is not a result.
    """
    try:
        data = json.loads(line)
    except ValueError as error:
        raise _refusal(line, f"not JSON ({error})") from error
    if not isinstance(data, dict):
        raise _refusal(line, "not a JSON object")
    status: Any = data.get("status")
    answer, detail = data.get("answer"), data.get("detail", "")
    if not isinstance(data.get("job"), str):
        raise _refusal(line, '"job" must be the id of a job, a text')
    if status not in get_args(Reported):
        raise _refusal(line, f'"status" must be one of {", ".join(get_args(Reported))}')
    if not isinstance(detail, str):
        raise _refusal(line, '"detail" must be a text')
    if (status == "completed") != isinstance(answer, str):
        raise _refusal(line, '"answer" must be a text if the status is completed, and null otherwise')
    return data["job"], Outcome(ending=status, answer=answer, detail=detail)


def _refusal(line: bytes, why: str) -> RolloutError:
    shown = line[:SHOWN_BYTES].decode(errors="replace")
    return RolloutError(
        f"The harness printed {shown!r}, which is not a result line: {why}. "
        "Print results alone to stdout and everything else to stderr."
    )
