"""How a run ended -> a terminal: what it reached and what to look at next."""

from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from harnessrl_jax.monitor.console import clock_time
from harnessrl_jax.monitor.summary import Summary


def print_summary(console: Console, summary: Summary, run_dir: Path) -> None:
    """Says what a finished run reached and what to look at next."""
    rows = Table.grid(padding=(0, 3, 0, 0))
    for name, start, end in (
        ("held-out F1", summary.heldout_f1_start, summary.heldout_f1_end),
        ("held-out exact match", summary.heldout_em_start, summary.heldout_em_end),
    ):
        if start is not None and end is not None:
            colour = "green" if end > start else "red"
            rows.add_row(name, Text.assemble(f"{start:.3f} -> {end:.3f}  ", (f"{end - start:+.3f}", f"bold {colour}")))
    rows.add_row("steps", f"{summary.steps:,} in {clock_time(summary.wall_s)}")
    for name, value in summary.counts.items():
        rows.add_row(name.replace("_", " "), f"{value:,}")
    dropped = ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in summary.dropped.items() if value)
    rows.add_row("sampled tokens not trained", dropped or "none")
    console.print(Panel(rows, title=Text(f"{summary.name}: finished"), title_align="left", border_style="green"))
    for what, how in (
        ("Look at the curves and some rollouts:", f"open {run_dir / 'report.html'}"),
        ("See what a rollout did and what of it was trained:", f"python -m harnessrl_jax.launch inspect {run_dir}"),
        ("Browse every metric (needs the tensorboard package):", f"tensorboard --logdir {run_dir / 'tensorboard'}"),
        ("Use the trained model:", str(run_dir / "model")),
    ):
        # Not wrapped: a command must survive being copied.
        console.print(Text(what, style="dim"), soft_wrap=True)
        console.print(Text(f"  {how}"), soft_wrap=True)


def print_stopped(console: Console, step: int, run_dir: Path) -> None:
    """Says that a run was interrupted after a step, and how it goes on."""
    text = f"Stopped after step {step}. Nothing is lost: the same command continues from the last checkpoint in"
    console.print(Text(f"{text} {run_dir}."), soft_wrap=True)
