"""Numbers of a step -> metrics.jsonl and TensorBoard events, and back; a resumed run never holds a step twice."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np
from tensorboardX import SummaryWriter

from harnessrl_jax.errors import MonitorError

Value: TypeAlias = float | list[float]
"""A number, or one number per layer."""
Record: TypeAlias = dict[str, Any]
"""The metrics of one step: "step" (int), and name -> `Value`."""

_FILE = "metrics.jsonl"


class MetricsWriter:
    """Appends one JSON object per step to `metrics.jsonl`, and the same numbers to TensorBoard events.

    The line has left the process when `write` returns, so a killed process loses no finished step. Names are free;
    those in `monitor.names` are the ones that the console and the report know.
    """

    def __init__(self, run_dir: Path, *, after_step: int | None = None) -> None:
        """Open the files of a run.

        Args:
          run_dir: folder of the run; created if missing.
          after_step: the step that the run was restored to; None for a new run. Later records are of work that was
            lost: they are removed from `metrics.jsonl` and hidden in TensorBoard.

        Raises:
          MonitorError: an existing `metrics.jsonl` is damaged.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / _FILE
        first_step = 0 if after_step is None else after_step + 1
        kept = [record for record in read_metrics(run_dir) if record["step"] < first_step]
        _rewrite(path, kept)
        self._last: Record = kept[-1] if kept else {"step": -1}
        self._file = path.open("a", encoding="utf-8")
        self._events = _open_events(run_dir / "tensorboard", first_step)

    def write(self, step: int, metrics: Mapping[str, float | Sequence[float]]) -> None:
        """Append the metrics of one finished step.

        Args:
          step: number of finished optimiser steps; larger than that of the last call. 0 is before the first.
          metrics: name -> a number or a vector of numbers (one per layer), of Python, NumPy or JAX.

        Raises:
          MonitorError: a number is not finite, or the step does not grow. Nothing was written then.
        """
        if step <= self._last["step"]:
            raise MonitorError(f"metrics of step {step}: step {self._last['step']} is already written; steps must grow")
        record: Record = {"step": step} | {name: self._checked(step, name, value) for name, value in metrics.items()}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        for name in metrics:
            for tag, number in _scalars(name, record[name]):
                self._events.add_scalar(tag, number, step)
        self._events.flush()
        self._last = record

    def close(self) -> None:
        """Close both files; nothing is pending."""
        self._file.close()
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _checked(self, step: int, name: str, value: float | Sequence[float]) -> Value:
        numbers = np.asarray(value, np.float64)
        if numbers.ndim > 1:
            raise MonitorError(
                f"metrics of step {step}: {name!r} has shape {numbers.shape}, a number or vector is wanted"
            )
        if not np.isfinite(numbers).all():
            before = f"; at step {self._last['step']} it was {self._last[name]}" if name in self._last else ""
            raise MonitorError(
                f"metrics of step {step}: {name!r} is {numbers.tolist()}, a finite number is wanted{before}. The run "
                "must not go on from here: resume from the last checkpoint with a lower learning rate or a tighter clip"
            )
        return numbers.tolist()


def read_metrics(run_dir: Path) -> list[Record]:
    """The records of a run in step order; empty if it has written none.

    A last line without its line end is still being written, or belongs to a killed process: it is not a record yet.

    Raises:
      MonitorError: a complete line is not a JSON object with a growing "step".
    """
    path = run_dir / _FILE
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    records: list[Record] = []
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        record = _parse(line)
        if record is None or (records and record["step"] <= records[-1]["step"]):
            raise MonitorError(
                f"{path}, line {number}: an object with a step larger than the last one is wanted, got {line[:60]!r}. "
                "Something else wrote into this file; move it away to go on without it"
            )
        records.append(record)
    return records


def series(records: Sequence[Record], name: str) -> tuple[list[int], list[Any]]:
    """The steps that have the metric, and its value at each of them."""
    found = [record for record in records if name in record]
    return [record["step"] for record in found], [record[name] for record in found]


def totals(records: Sequence[Record], prefix: str) -> dict[str, float]:
    """Sums over all steps of the metrics named `prefix/...`, without the prefix, in order of first appearance."""
    sums: dict[str, float] = {}
    for record in records:
        for name, value in record.items():
            if name.startswith(f"{prefix}/"):
                key = name.removeprefix(f"{prefix}/")
                sums[key] = sums.get(key, 0.0) + value
    return sums


def _parse(line: str) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _open_events(folder: Path, first_step: int) -> SummaryWriter:
    # The name of an event file has the second in it: the suffix keeps a quick restart from writing over the last one.
    # The purge step tells TensorBoard to forget what earlier files of the run hold from that step on.
    number = len(list(folder.glob("events.*")))
    return SummaryWriter(str(folder), purge_step=first_step, filename_suffix=f".{number:03d}")


def _scalars(name: str, value: Value) -> list[tuple[str, float]]:
    if isinstance(value, list):
        return [(f"{name}/layer_{layer:02d}", number) for layer, number in enumerate(value)]
    return [(name, value)]


def _rewrite(path: Path, records: Sequence[Record]) -> None:
    draft = path.with_suffix(".draft")
    with draft.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
