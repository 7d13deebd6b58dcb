"""A run's summary, metrics, configuration and rollouts -> report.html: one file, no script, no network."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harnessrl_jax.monitor.charts import number
from harnessrl_jax.monitor.curves import capo_cards, learning_cards
from harnessrl_jax.monitor.metrics import Record, read_metrics
from harnessrl_jax.monitor.page import html_page
from harnessrl_jax.monitor.rollout_page import rollouts_html, text
from harnessrl_jax.monitor.summary import Summary
from harnessrl_jax.monitor.views import RolloutView

SECTIONS = ("Result", "Learning", "CAPO", "Accounting", "Rollouts", "Configuration")


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything the page shows.

    Attributes:
      summary: the outcome.
      records: metrics of each step.
      config: the resolved configuration, as text.
      before: rollouts of the policy before training.
      after: rollouts of the policy after it, best of the same tasks.
      about: what the run was meant to do, in a sentence; "" leaves it out.
    """

    summary: Summary
    records: Sequence[Record]
    config: str
    before: Sequence[RolloutView] = ()
    after: Sequence[RolloutView] = ()
    about: str = ""


def write_report(
    run_dir: Path,
    *,
    summary: Summary,
    config: str,
    before: Sequence[RolloutView] = (),
    after: Sequence[RolloutView] = (),
    about: str = "",
) -> Path:
    """Writes `report.html` into the run's folder, whole or not at all; its metrics come from `metrics.jsonl` there.

    Arguments are those of `Report`.

    Returns:
      The path of the page.

    Raises:
      MonitorError: `metrics.jsonl` is damaged.
    """
    records = read_metrics(run_dir)
    page = render(Report(summary=summary, records=records, config=config, before=before, after=after, about=about))
    path = run_dir / "report.html"
    draft = path.with_suffix(".draft")
    draft.write_text(page, encoding="utf-8")
    draft.replace(path)
    return path


def render(report: Report) -> str:
    """The page as text."""
    title = f"{text(report.summary.name)} · seed {report.summary.seed}"
    bodies = (_result, _learning, _capo, _accounting, _rollouts, _configuration)
    sections = [(name, body(report)) for name, body in zip(SECTIONS, bodies, strict=True)]
    links = "".join(f'<a href="#{name.lower()}">{name}</a>' for name, body in sections if body)
    main = "".join(f'<section id="{name.lower()}">{body}</section>' for name, body in sections if body)
    about = f'<p class="soft">{text(report.about)}</p>' if report.about else ""
    footer = (
        "<footer>Written by harnessrl_jax. TensorBoard shows every metric: "
        "<code>tensorboard --logdir tensorboard</code> in the run's folder.</footer>"
    )
    return html_page(title, f"{about}<nav>{links}</nav>", main + footer)


def _result(report: Report) -> str:
    summary = report.summary
    questions = f"{summary.heldout_questions:,} held-out questions"
    scores = _score("Token F1", questions, summary.heldout_f1_start, summary.heldout_f1_end)
    scores += _score("Exact match", questions, summary.heldout_em_start, summary.heldout_em_end)
    tiles = [(number(summary.steps), "optimiser steps"), (duration(summary.wall_s), "wall time")]
    tiles += [(f"{value:,}", name.replace("_", " ")) for name, value in summary.counts.items()]
    shown = "".join(
        f'<div class="card tile"><b>{text(value)}</b><span>{text(name)}</span></div>' for value, name in tiles
    )
    return (f'<div class="hero">{scores}</div>' if scores else "") + f'<div class="tiles">{shown}</div>'


def _score(name: str, questions: str, start: float | None, end: float | None) -> str:
    if start is None or end is None:
        return ""
    change = end - start
    kind = "up" if change > 0.0005 else "down" if change < -0.0005 else "flat"
    widths = sorted(((start, "before"), (end, "after")), reverse=True)  # the longer bar lies below
    bars = "".join(f'<i class="{label}" style="width:{100 * value:.1f}%"></i>' for value, label in widths)
    return (
        f'<div class="card"><h3>{name}</h3><span class="soft">{questions}, before and after training</span>'
        f'<div class="score"><span class="from">{start:.3f} →</span><b>{end:.3f}</b>'
        f'<span class="delta {kind}">{change:+.3f}</span></div><div class="track">{bars}</div></div>'
    )


def _learning(report: Report) -> str:
    cards = learning_cards(report.records)
    note = '<p class="note">Thin: each step. Strong: running mean. Hover for values.</p>'
    return f'<h2>Learning</h2>{note}<div class="grid">{cards}</div>' if cards else ""


def _capo(report: Report) -> str:
    cards = capo_cards(report.records)
    note = (
        '<p class="note">CAPO sends the gradient of action tokens and that of argument tokens to the MLP units that '
        "serve them. A negative cosine means that the two pull against each other; an overlap above about 0.8 means "
        "that routing changes little.</p>"
    )
    return f'<h2>Conflict-Aware Policy Optimization</h2>{note}<div class="grid">{cards}</div>' if cards else ""


def _accounting(report: Report) -> str:
    summary = report.summary
    cards = [
        ("Sampled tokens that were not trained", _table(summary.dropped, "c2", "nothing was dropped"), "by reason"),
        ("Where the time went", _table(summary.time_s, "c1", "not measured", as_time=True), "seconds, all steps"),
    ]
    shown = "".join(
        f'<div class="card"><h3>{title}</h3><span class="soft">{unit}</span>{table}</div>'
        for title, table, unit in cards
    )
    note = '<p class="note">Every sampled token is trained exactly once, or counted here.</p>'
    return f'<h2>Accounting</h2>{note}<div class="grid">{shown}</div>'


def _table(values: Mapping[str, float], colour: str, empty: str, *, as_time: bool = False) -> str:
    if not values:
        return f'<p class="note">{empty}</p>'
    longest, whole = max(values.values()) or 1.0, sum(values.values()) or 1.0
    rows = []
    for name, value in sorted(values.items(), key=lambda item: -item[1]):
        shown = duration(value) if as_time else f"{value:,}"
        bar = f'<i class="{colour} fill" style="width:{100 * value / longest:.1f}%"></i>'
        rows.append(
            f'<tr><td>{text(name.replace("_", " "))}</td><td class="bar">{bar}</td><td class="n">{shown}</td>'
            f'<td class="n soft">{percent(value / whole)}</td></tr>'
        )
    return f"<table>{''.join(rows)}</table>"


def _rollouts(report: Report) -> str:
    if not report.before and not report.after:
        return ""
    note = (
        '<p class="note">The sessions of a rollout as a forest: the session of a sub-agent stands below the call that '
        "opened it. Open a prompt to see what a call read.</p>"
    )
    return f"<h2>Rollouts</h2>{note}{rollouts_html(report.before, report.after)}"


def _configuration(report: Report) -> str:
    return (
        '<h2>Configuration</h2><div class="card"><details><summary>Every setting of this run, defaults included'
        f"</summary><pre>{text(report.config)}</pre></details></div>"
    )


def percent(share: float) -> str:
    """A share for people.

    >>> [percent(share) for share in (0, 0.004, 0.756)]
    ['0 %', '<1 %', '76 %']
    """
    return "<1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def duration(seconds: float) -> str:
    """Time for people.

    >>> [duration(s) for s in (0.42, 59.7, 61, 3725)]
    ['0.4 s', '59.7 s', '1 min 01 s', '1 h 02 min']
    """
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
