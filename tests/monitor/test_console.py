import io
from pathlib import Path

import pytest
from rich.console import Console

from harnessrl_jax.monitor import SUPERVISED_COLUMNS, Plan, Progress, print_stopped, print_summary

PLAN = Plan(
    title="demo [1]", about="Learns [a little].", facts=[("model", "tiny [x]")], run_dir=Path("runs/demo-0"), steps=20,
    expected_s=130.0,
)  # fmt: skip


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def console(**options):
    return Console(file=io.StringIO(), width=100, highlight=False, **options)


def written(console):
    return console.file.getvalue()


def test_the_plan_says_what_how_long_and_where():
    out = console()
    with Progress(PLAN, console=out, clock=Clock()):
        pass
    for shown in ("demo [1]", "Learns [a little].", "tiny [x]", "20", "about 2 minutes", "runs/demo-0"):
        assert shown in written(out)


@pytest.mark.parametrize(
    ("steps", "shown"), [(dict(done_steps=7), "continuing after step 7"), (dict(expected_s=None), "not measured yet")]
)
def test_the_plan_of_other_runs(steps, shown):
    values = dict(title="t", about="", facts=[], run_dir=Path("r"), steps=9)
    out = console()
    with Progress(Plan(**(values | steps)), console=out, clock=Clock()):
        pass
    assert shown in written(out)


def test_without_a_terminal_each_step_is_one_plain_line():
    out, clock = console(), Clock()
    with Progress(PLAN, console=out, clock=clock) as progress:
        before = len(written(out))
        assert progress.remaining_s() is None
        with progress.phase("asking 8 questions"):
            clock.now += 12
        clock.now += 4
        progress.step(1, {"reward": 0.5, "f1": 0.25, "loss": -0.01, "entropy": 1.5, "tokens_per_s": 1234.6})
        with progress.part("training"):
            clock.now += 6
        progress.step(2, {"reward": 0.5})
    assert written(out)[before:].splitlines() == [
        "asking 8 questions ...",
        "asking 8 questions: done in 0:12",
        "step  1/20  reward 0.500  F1 0.250  loss -0.0100  entropy 1.500  tokens/s 1,235  elapsed 0:16  left 1:16",
        "step  2/20  reward 0.500  F1 -  loss -  entropy -  tokens/s -  elapsed 0:22  left 1:30",
    ]


def test_the_estimate_is_of_the_last_steps_without_the_phases_between():
    clock = Clock()
    with Progress(PLAN, console=console(), clock=clock) as progress:
        for step in range(1, 11):  # slow: compilation
            clock.now += 50
            progress.step(step, {})
        for step in range(11, 21):
            with progress.phase("asking"):
                clock.now += 1000
            clock.now += 3
            progress.step(step, {})
            assert progress.remaining_s() == pytest.approx((20 - step) * (3 * (step - 10) + 50 * (20 - step)) / 10)


def test_in_a_terminal_the_last_steps_stay_in_sight_and_the_cursor_comes_back():
    out, clock = console(force_terminal=True), Clock()
    progress = Progress(PLAN, columns=SUPERVISED_COLUMNS, console=out, clock=clock)

    def work():
        with progress:
            for step in range(1, 13):
                clock.now += 1
                progress.step(step, {"loss": step})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    last = written(out).rsplit("step", 1)[1]
    picture = console()
    picture.print(progress._picture())
    lines = [line.split() for line in written(picture).splitlines()]
    assert lines[0] == ["step", "loss", "entropy", "tokens/s"]
    assert [line[0] for line in lines[1:]] == ["5", "6", "7", "8", "9", "10", "11", "12", "12/20"]
    assert lines[8] == ["12", "12.0000", "-", "-"]
    assert lines[9][-4:] == ["elapsed", "0:12", "left", "0:08"]
    assert written(out).count("\x1b[?25l") == written(out).count("\x1b[?25h") == 1
    assert last.endswith("\x1b[?25h")


def test_the_end_says_what_was_reached_and_what_to_look_at(summary):
    out = console()
    print_summary(out, summary, Path("a-folder-with-a-long-name" * 4))
    text = written(out)
    for shown in ("0.250 -> 0.625", "+0.375", "0.200 -> 0.100", "-0.100", "12 in 2:05", "1,234", "17 too long"):
        assert shown in text
    # A command must survive being copied: it stands on one line, however long.
    assert f"  python -m harnessrl_jax.launch inspect {'a-folder-with-a-long-name' * 4}\n" in text
    print_stopped(out, 5, Path("runs/demo-0"))
    assert written(out).endswith("the same command continues from the last checkpoint in runs/demo-0.\n")
