"""Cells of an ablation -> paired differences, confidence intervals and Markdown tables. Pure functions."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

Line = Mapping[str, Any]


class Interval(NamedTuple):
    """A mean and its confidence interval; the bounds are NaN where one value leaves them open."""

    mean: float
    low: float
    high: float
    count: int

    def excludes_zero(self) -> bool:
        """Whether all of the interval lies on one side."""
        return self.low > 0 or self.high < 0


def interval(values: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Student's t interval of the mean.

    Examples:
      >>> interval([1.0, 2.0, 3.0])
      Interval(mean=2.0, low=-0.4841377118210756, high=4.484137711821076, count=3)
    """
    count, mean = len(values), float(np.mean(values))
    if count < 2:
        return Interval(mean, math.nan, math.nan, count)
    half = stats.t.ppf((1 + confidence) / 2, count - 1) * np.std(values, ddof=1) / math.sqrt(count)
    return Interval(mean, float(mean - half), float(mean + half), count)


def by_seed(lines: Iterable[Line], arm: str, value: str) -> dict[int, float]:
    """An arm's value for each seed that has one.

    Raises:
      ValueError: two lines of the same arm and seed: cells of two settings were mixed, or one ran twice.
    """
    found: dict[int, float] = {}
    for line in lines:
        if line["arm"] == arm and value in line:
            if line["seed"] in found:
                raise ValueError(f"by_seed: {arm!r} has two lines for seed {line['seed']}; select one setting first")
            found[line["seed"]] = float(line[value])
    return found


def paired(lines: Sequence[Line], arm: str, control: str, value: str) -> Interval | None:
    """The arm minus its control, seed by seed, over the seeds that both have; None if there is none."""
    ours, theirs = by_seed(lines, arm, value), by_seed(lines, control, value)
    both = sorted(ours.keys() & theirs.keys())
    return interval([ours[seed] - theirs[seed] for seed in both]) if both else None


def shown(found: Interval | None, digits: int = 3) -> str:
    """An interval as a cell of a table; bold where it excludes 0."""
    if found is None:
        return ""
    text = f"{found.mean:+.{digits}f}"
    if found.count > 1:
        text += f" [{found.low:+.{digits}f}, {found.high:+.{digits}f}]"
    return f"**{text}**" if found.excludes_zero() else text


def mean_shown(lines: Sequence[Line], arm: str, value: str, digits: int = 3) -> str:
    """The mean over seeds, empty where no line has the value."""
    found = list(by_seed(lines, arm, value).values())
    return f"{np.mean(found):.{digits}f}" if found else ""


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table: the first column is text, the others numbers."""
    written = [f"| {' | '.join(row)} |" for row in rows]
    rule = "|".join(["---", *["---:"] * (len(header) - 1)])
    return "\n".join([f"| {' | '.join(header)} |", f"|{rule}|", *written])


def arms_of(lines: Iterable[Line]) -> list[str]:
    """The arms in the order in which they first appear."""
    return list(dict.fromkeys(line["arm"] for line in lines))


def table(
    lines: Sequence[Line],
    arms: Sequence[str],
    *,
    means: Mapping[str, str],
    against: Mapping[str, Callable[[str], str | None]],
    value: str,
) -> str:
    """One row an arm: means over seeds, then the paired difference of `value` to each control.

    Args:
      lines: cells of one setting.
      arms: the rows, in order; arms without a cell are left out.
      means: heading -> name of the value.
      against: heading -> the control of an arm, or None where it has none.
      value: what is compared.
    """
    rows = []
    for arm in (arm for arm in arms if by_seed(lines, arm, value)):
        row = [arm, str(len(by_seed(lines, arm, value))), *(mean_shown(lines, arm, name) for name in means.values())]
        for control in against.values():
            other = control(arm)
            row.append(shown(paired(lines, arm, other, value)) if other is not None and other != arm else "")
        rows.append(row)
    return markdown(["arm", "seeds", *means, *against], rows)


def read(file: Path) -> list[dict[str, Any]]:
    """The cells of a results file; none if it does not exist."""
    return [json.loads(text) for text in file.read_text().splitlines()] if file.exists() else []


def append(file: Path, line: Line) -> None:
    """Adds one cell, so that a run that ends early keeps what it has."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.write(json.dumps(dict(line)) + "\n")
