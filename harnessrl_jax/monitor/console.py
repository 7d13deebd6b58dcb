"""What a run is going to do, does and did -> a terminal (live) or a log file (one line a step)."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from harnessrl_jax.monitor import names

ROWS = 8  # finished steps that stay in sight
RECENT = 10  # steps that the estimate of the remaining time looks at


@dataclass(frozen=True, kw_only=True)
class Column:
    """One number of the progress table: the metric, its title, and its format."""

    metric: str
    title: str
    format: str


POLICY_COLUMNS = (
    Column(metric=names.STEP_REWARD, title="reward", format=".3f"),
    Column(metric=names.STEP_F1, title="F1", format=".3f"),
    Column(metric=names.LOSS, title="loss", format="+.4f"),
    Column(metric=names.ENTROPY, title="entropy", format=".3f"),
    Column(metric=names.TOKENS_PER_S, title="tokens/s", format=",.0f"),
)
SUPERVISED_COLUMNS = (
    Column(metric=names.LOSS, title="loss", format=".4f"),
    Column(metric=names.ENTROPY, title="entropy", format=".3f"),
    Column(metric=names.TOKENS_PER_S, title="tokens/s", format=",.0f"),
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is told before the work begins.

    Attributes:
      title: name of the run.
      about: what it is going to do, in a sentence or two.
      facts: (name, value) lines: model, task, harness, devices, ...
      run_dir: where everything goes.
      steps: optimiser steps in all.
      done_steps: steps that a resumed run finished before; 0 for a new one.
      expected_s: how long all of it should take, None if nobody has measured it.
    """

    title: str
    about: str
    facts: Sequence[tuple[str, str]]
    run_dir: Path
    steps: int
    done_steps: int = 0
    expected_s: float | None = None


class Progress:
    """Shows one run. Use it as a context manager: whatever happens inside, the terminal is left in order.

    In a terminal the last steps and a bar stay in place and are redrawn; elsewhere each step is one plain line.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        columns: Sequence[Column] = POLICY_COLUMNS,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; nothing is shown before the context is entered.

        Args:
          plan: what is told first.
          columns: numbers to show for each step.
          console: where to; standard output by default.
          clock: seconds that only grow.
        """
        self._plan = plan
        self._columns = columns
        self._console = console or Console(highlight=False)
        self._clock = clock
        self._begun_s = self._step_s = clock()
        self._done = plan.done_steps
        # Tuples, replaced as a whole: the terminal is redrawn by a thread of its own.
        self._recent_s: tuple[float, ...] = ()
        self._rows: tuple[tuple[int, Mapping[str, Any]], ...] = ()
        self._doing = ""
        self._live: Live | None = None

    def __enter__(self) -> Self:
        self._console.print(_plan_panel(self._plan))
        if self._console.is_terminal:
            live = Live(console=self._console, get_renderable=self._picture, refresh_per_second=4)
            live.start()
            self._live = live
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    @contextmanager
    def phase(self, doing: str) -> Iterator[None]:
        """Says what is going on between steps while the body runs, and how long it took.

        Args:
          doing: as in "asking 128 held-out questions".
        """
        begun_s = self._clock()
        if self._live is None:
            self._say(Text(f"{doing} ..."))
        with self.part(doing):
            yield
        # The time of a step is without what stands between steps.
        self._step_s = self._clock()
        self._say(Text(f"{doing}: done in {clock_time(self._step_s - begun_s)}", style="dim"))

    @contextmanager
    def part(self, doing: str) -> Iterator[None]:
        """Names a part of a step while the body runs: seen in a terminal only, nothing of it stays."""
        before, self._doing = self._doing, doing
        try:
            yield
        finally:
            self._doing = before

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Shows a finished step.

        Args:
          step: number of finished steps.
          metrics: as in `MetricsWriter.write`.
        """
        now_s = self._clock()
        # Not every step need be shown: what is measured is the time of one.
        self._recent_s = (*self._recent_s, (now_s - self._step_s) / max(1, step - self._done))[-RECENT:]
        self._step_s, self._done = now_s, step
        self._rows = (*self._rows, (step, metrics))[-ROWS:]
        if self._live is None:
            self._say(Text(self._line(step, metrics)))

    def remaining_s(self) -> float | None:
        """Seconds that the steps to come will take at the pace of the last ones; None before the first."""
        if not self._recent_s:
            return None
        return sum(self._recent_s) / len(self._recent_s) * max(0, self._plan.steps - self._done)

    def _say(self, line: Text) -> None:
        self._console.print(line, soft_wrap=True)

    def _line(self, step: int, metrics: Mapping[str, Any]) -> str:
        digits = len(str(self._plan.steps))
        numbers = [f"{column.title} {_cell(column, metrics)}" for column in self._columns]
        return "  ".join([f"step {step:>{digits}}/{self._plan.steps}", *numbers, *self._times()])

    def _times(self) -> list[str]:
        times = [f"elapsed {clock_time(self._clock() - self._begun_s)}"]
        remaining_s = self.remaining_s()
        return times if remaining_s is None else [*times, f"left {clock_time(remaining_s)}"]

    def _picture(self) -> RenderableType:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
        for title in ("step", *(column.title for column in self._columns)):
            table.add_column(title, justify="right", no_wrap=True)
        for step, metrics in self._rows:
            newest = "bold" if step == self._done else "dim"
            table.add_row(str(step), *(_cell(column, metrics) for column in self._columns), style=newest)
        bar = Table.grid(padding=(0, 2, 0, 0))
        progress = ProgressBar(total=max(1, self._plan.steps), completed=self._done, width=30, complete_style="cyan")
        bar.add_row(f"{self._done}/{self._plan.steps} steps", progress, *self._times())
        doing = [Text(f"{self._doing} ...", style="cyan")] if self._doing else []
        return Group(*([table] if self._rows else []), bar, *doing)


def clock_time(seconds: float) -> str:
    """Time as a clock shows it.

    >>> [clock_time(s) for s in (0.4, 75, 3725)]
    ['0:00', '1:15', '1:02:05']
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _cell(column: Column, metrics: Mapping[str, Any]) -> str:
    return format(float(metrics[column.metric]), column.format) if column.metric in metrics else "-"


def _plan_panel(plan: Plan) -> Panel:
    facts = Table.grid(padding=(0, 3, 0, 0))
    minutes = None if plan.expected_s is None else max(1, round(plan.expected_s / 60))
    time_text = "not measured yet" if minutes is None else f"about {minutes} minute{'s' if minutes > 1 else ''}"
    steps = f"{plan.steps}" + (f", continuing after step {plan.done_steps}" if plan.done_steps else "")
    rows = [*plan.facts, ("steps", steps), ("time", time_text), ("results", str(plan.run_dir))]
    for name, value in rows:
        facts.add_row(Text(name, style="dim"), Text(value))
    body = Group(Text(plan.about), Text(), facts) if plan.about else facts
    return Panel(body, title=Text(plan.title), title_align="left", border_style="cyan")
