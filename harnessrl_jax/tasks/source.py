"""Where questions come from: the embedded World Factbook, JSON lines, or TensorFlow Datasets, behind one method.

TensorFlow Datasets is the extra `[tfds]`; it is imported only by `TfdsSource`, which needs no TensorFlow.
"""

import importlib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from harnessrl_jax.errors import TaskError
from harnessrl_jax.tasks.questions import Split, heldout_tasks, train_tasks
from harnessrl_jax.trajectories.records import Task


class TaskSource(Protocol):
    """Gives the tasks of each side of a split; the same ones in the same order every time."""

    def tasks(self, split: Split) -> Sequence[Task]:
        """The tasks of one side. Errors are TaskError."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class FactbookSource:
    """The embedded multi-hop questions."""

    def tasks(self, split: Split) -> Sequence[Task]:
        """The default questions of one side; see `questions`."""
        return train_tasks() if split == "train" else heldout_tasks()


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonLinesSource:
    """Files with one question a line: `{"question": "...", "answers": ["...", ...]}`.

    `id`, `hops`, `chain` and `template` may be given and mean what they mean in a Task; `answer` with one text stands
    for `answers`. Other keys are ignored.

    Attributes:
      path: the training questions.
      heldout_path: the questions kept for evaluation, or None if there are none.
    """

    path: str | os.PathLike[str]
    heldout_path: str | os.PathLike[str] | None = None

    def tasks(self, split: Split) -> Sequence[Task]:
        """The questions of one file.

        Raises:
          TaskError: the file is missing or empty, a line is not such an object, or an id is given twice.
        """
        path = self.path if split == "train" else self.heldout_path
        if path is None:
            raise TaskError("JsonLinesSource: no held-out questions; give heldout_path, a file like the training one.")
        if not Path(path).is_file():
            raise TaskError(f"{os.fspath(path)}: no such file; wanted JSON lines with question and answers.")
        with open(path, encoding="utf-8") as lines:
            tasks = [_from_line(os.fspath(path), place, line, split) for place, line in _numbered(lines)]
        return _unique(os.fspath(path), tasks)


@dataclass(frozen=True, kw_only=True, slots=True)
class TfdsSource:
    """A question-answering data set of TensorFlow Datasets, prepared in the `array_record` format.

    Attributes:
      name: the data set, as in `trivia_qa/rc`.
      train_split: the TFDS split to train on.
      heldout_split: the TFDS split to evaluate on, or None.
      question: field of the question; dots go into nested fields.
      answers: field of the accepted answers: one text or several.
      data_dir: where data sets are prepared; None is the TFDS default.
    """

    name: str
    train_split: str = "train"
    heldout_split: str | None = None
    question: str = "question"
    answers: str = "answers"
    data_dir: str | os.PathLike[str] | None = None

    def tasks(self, split: Split) -> Sequence[Task]:
        """The questions of one TFDS split, read without TensorFlow.

        Raises:
          TaskError: the extra is not installed, the data set is not prepared, or a field is missing.
        """
        chosen = self.train_split if split == "train" else self.heldout_split
        if chosen is None:
            raise TaskError(
                f"TfdsSource {self.name!r}: no held-out split; give heldout_split, for example 'validation'."
            )
        if importlib.util.find_spec("tensorflow_datasets") is None:
            raise TaskError(
                f"TfdsSource {self.name!r}: tensorflow-datasets is not installed. pip install 'harnessrl-jax[tfds]'"
            )
        tfds = importlib.import_module("tensorflow_datasets")
        try:
            rows = tfds.builder(self.name, data_dir=self.data_dir).as_data_source(split=chosen)
        except (tfds.core.DatasetNotFoundError, AssertionError, NotImplementedError, ValueError, OSError) as error:
            raise TaskError(
                f"TfdsSource {self.name!r}, split {chosen!r}: cannot be read ({type(error).__name__}: "
                f"{str(error).partition(chr(10))[0]}). Prepare it once with tfds.builder(name, "
                "file_format='array_record').download_and_prepare()."
            ) from error
        return [
            self._task(row, f"{self.name.replace('/', '.')}.{chosen}.{place}", split) for place, row in enumerate(rows)
        ]

    def _task(self, row: Mapping[str, Any], task_id: str, split: Split) -> Task:
        question, answers = (_texts(_field(row, path, task_id)) for path in (self.question, self.answers))
        if len(question) != 1 or not answers:
            raise TaskError(
                f"{task_id}: {len(question)} questions in {self.question!r} and {len(answers)} answers in "
                f"{self.answers!r}; wanted one question and at least one answer."
            )
        return Task(task_id=task_id, question=question[0], answers=answers, hops=1, chain=(), template="", split=split)


def _numbered(lines: Iterator[str]) -> Iterator[tuple[int, str]]:
    return ((place, line) for place, line in enumerate(lines, start=1) if line.strip())


def _from_line(path: str, place: int, line: str, split: Split) -> Task:
    where = f"{path}, line {place}"
    wanted = 'wanted {"question": "...", "answers": ["...", ...]}'
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise TaskError(f"{where}: not JSON ({error}); {wanted}.") from error
    if not isinstance(record, dict):
        raise TaskError(f"{where}: got a JSON {type(record).__name__}; {wanted}.")
    question, given = record.get("question"), record.get("answers", record.get("answer"))
    answers = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    usable = bool(answers) and all(isinstance(answer, str) for answer in answers)
    if not isinstance(question, str) or not question or not usable:
        raise TaskError(f"{where}: got the keys {sorted(record)} with question {question!r}; {wanted}.")
    return Task(
        task_id=str(record.get("id", f"{Path(path).stem}.{place}")),
        question=question,
        answers=tuple(answers),
        hops=record.get("hops", 1),
        chain=tuple(record.get("chain", ())),
        template=record.get("template", ""),
        split=split,
    )


def _unique(path: str, tasks: list[Task]) -> list[Task]:
    if not tasks:
        raise TaskError(f"{path}: no question in it; wanted one JSON object a line.")
    seen: set[str] = set()
    for task in tasks:
        if task.task_id in seen:
            raise TaskError(f"{path}: the id {task.task_id!r} is given twice; ids must be unique.")
        seen.add(task.task_id)
    return tasks


def _field(row: Mapping[str, Any], path: str, where: str) -> Any:
    value: Any = row
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise TaskError(f"{where}: no field {path!r}; the fields are {', '.join(sorted(row))}.")
        value = value[key]
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, bytes):
        return (value.decode("utf-8"),)
    return (value,) if isinstance(value, str) else tuple(text for item in value for text in _texts(item))
