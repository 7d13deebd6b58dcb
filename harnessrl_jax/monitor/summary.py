"""The outcome of a run in a few numbers: what `summary.json`, the console and the report all show."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

from harnessrl_jax.errors import MonitorError
from harnessrl_jax.monitor import names
from harnessrl_jax.monitor.metrics import Record, totals


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """What a finished run reached, and what it took.

    Attributes:
      name: of the configuration.
      seed: of the run.
      steps: finished optimiser steps.
      wall_s: seconds from start to end, over all resumes.
      heldout_questions: how many held-out questions were asked, before and after alike.
      heldout_f1_start: mean token F1 on them before training, in [0, 1]; None if they were not asked.
      heldout_f1_end: after training.
      heldout_em_start: share of exact matches before.
      heldout_em_end: after.
      counts: totals of calls, rollouts and targets, by name.
      dropped: sampled tokens that were not trained, by reason.
      time_s: seconds, by part of the loop.
    """

    name: str
    seed: int
    steps: int
    wall_s: float
    heldout_questions: int
    heldout_f1_start: float | None
    heldout_f1_end: float | None
    heldout_em_start: float | None
    heldout_em_end: float | None
    counts: Mapping[str, int]
    dropped: Mapping[str, int]
    time_s: Mapping[str, float]

    @classmethod
    def of_records(cls, records: Sequence[Record], **known: Any) -> Self:
        """Fills `steps`, `counts`, `dropped` and `time_s` from the metrics, so that a resumed run counts no step twice.

        Args:
          records: of the whole run.
          **known: the other fields.
        """
        whole = lambda sums: {name: round(value) for name, value in sums.items()}
        return cls(
            steps=max((record["step"] for record in records), default=0),
            counts=whole(totals(records, names.COUNT)),
            dropped=whole(totals(records, names.DROPPED)),
            time_s=totals(records, names.TIME),
            **known,
        )

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values for `summary.json`; `from_json` reads it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Reads what `to_json` wrote, and ignores what others added. Raises MonitorError if a field is missing."""
        wanted = [field.name for field in dataclasses.fields(cls)]
        if missing := [name for name in wanted if name not in data]:
            raise MonitorError(f"summary: {', '.join(missing)} missing; found {', '.join(data)}. Was the run finished?")
        return cls(**{name: data[name] for name in wanted})
