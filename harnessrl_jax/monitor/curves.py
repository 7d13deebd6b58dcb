"""Metrics of all steps -> the report's cards of curves: learning, and CAPO's diagnostics."""

from collections.abc import Sequence
from html import escape
from typing import Any

from harnessrl_jax.monitor import names
from harnessrl_jax.monitor.charts import Line, heat_strip, line_chart, number, stacked_bars
from harnessrl_jax.monitor.metrics import Record

PARTS = (
    ("action only", "c2", names.ACTION_ONLY_LAYER),
    ("shared", "c4", names.SHARED_LAYER),
    ("arguments only", "c1", names.ARGS_ONLY_LAYER),
    ("neither", "rest", names.NEITHER_LAYER),
)
COLOURS = ("c1", "c2", "c3", "c4", "c5", "rest")
MOST_LINES = 6
MOST_COLUMNS = 160


def learning_cards(records: Sequence[Record]) -> str:
    """Reward, held-out score, loss, entropy, KL and gradient norm; a card for each that was measured."""
    line = lambda name, label, colour, dots=False: _line(records, name, label, colour, dots=dots)
    scores = [line(names.STEP_REWARD, "reward", "c1"), line(names.STEP_F1, "F1", "c3")]
    if scores[0].values == scores[1].values:  # the reward is the F1: one curve says it
        scores = [line(names.STEP_F1, "F1, the reward", "c1")]
    heldout = [line(names.HELDOUT_F1, "F1", "c1", True), line(names.HELDOUT_EM, "exact match", "c3", True)]
    return (
        _curves("Training questions: mean of each step's rollouts", scores, (0.0, 1.0))
        + _curves("Held-out questions", heldout, (0.0, 1.0))
        + _curves("Loss", [line(names.LOSS, "loss", "c1")])
        + _curves("Entropy of the policy, nats", [line(names.ENTROPY, "entropy", "c3")], (0.0, 0.0))
        + _curves("KL from the sampling policy, nats", [line(names.KL, "KL", "c4")])
        + _curves("Gradient norm before clipping", [line(names.GRADIENT_NORM, "norm", "c2")], (0.0, 0.0))
    )


def capo_cards(records: Sequence[Record]) -> str:
    """Conflict over steps and by layer, what routing keeps, and the partitions: sizes and overlap by layer."""
    cosine = [_line(records, names.COSINE, "cosine", "c2")]
    mass = [_line(records, names.MASS, "mass", "c2")]
    kept = [
        _line(records, names.RETAINED_ACTION, "action", "c2"),
        _line(records, names.RETAINED_ARGS, "arguments", "c1"),
    ]
    return (
        _curves("Conflict: cosine of action and argument gradients", cosine, (-0.25, 0.25))
        + _curves("Conflict mass: what layers of opposite gradients add to the cosine", mass, (-0.25, 0.0))
        + _strip("Conflict by layer", records, names.COSINE_LAYER)
        + _curves("Share of each role's squared gradient that its partition keeps", kept, (0.0, 1.0))
        + _partitions(records)
        + _overlap(records)
    )


def _line(records: Sequence[Record], name: str, label: str, colour: str, *, dots: bool = False) -> Line:
    """One curve; points that a `..._valid` metric calls undefined are left out."""
    found = [record for record in records if name in record and record.get(name + names.VALID, 1)]
    steps, values = [record["step"] for record in found], [record[name] for record in found]
    return Line(label=label, colour=colour, steps=steps, values=values, dots=dots)


def _curves(title: str, lines: Sequence[Line], limits: tuple[float, float] | None = None) -> str:
    shown = [line for line in lines if line.steps]
    if not shown:
        return ""
    now = f"last {number(shown[0].values[-1])}" if len(shown) == 1 else ""
    chart = line_chart(shown, limits=limits)
    return _card(title, chart, legend=[(line.label, line.colour) for line in shown] if len(shown) > 1 else [], now=now)


def _vectors(records: Sequence[Record], name: str) -> tuple[list[int], list[list[float | None]]]:
    """Steps, and per layer one value a step, None where undefined."""
    found = [record for record in records if record.get(name)]
    columns = []
    for record in found:
        valid = record.get(name + names.VALID, [1] * len(record[name]))
        columns.append([value if good else None for value, good in zip(record[name], valid)])
    return [record["step"] for record in found], [list(layer) for layer in zip(*columns)]


def _strip(title: str, records: Sequence[Record], name: str, lowest: str = "-1") -> str:
    steps, layers = _vectors(records, name)
    if not layers:
        return ""
    width = -(-len(steps) // MOST_COLUMNS)
    layers = [[_mean(layer[at : at + width]) for at in range(0, len(layer), width)] for layer in layers]
    kind = "ramp" if lowest == "-1" else "ramp half"
    rows = "rows: layers, columns: " + ("steps" if width == 1 else f"means of {width} steps")
    ramp = f'<div class="legend"><span>{lowest}<i class="{kind}"></i>1</span><span>{rows}</span></div>'
    return _card(title, ramp + heat_strip(steps[::width], layers, "layer"))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _partitions(records: Sequence[Record]) -> str:
    last: dict[str, Any] = next((record for record in reversed(records) if PARTS[0][2] in record), {})
    if not all(name in last for _, _, name in PARTS):
        return ""
    layers = [f"layer {layer}" for layer in range(len(last[PARTS[0][2]]))]
    bars = stacked_bars(layers, [(label, colour, last[name]) for label, colour, name in PARTS], "units")
    legend = [(label, colour) for label, colour, _ in PARTS]
    return _card("Units of each layer by partition", bars, legend=legend, now=f"after step {last['step']}")


def _overlap(records: Sequence[Record]) -> str:
    title = "Overlap of the two partitions (Jaccard index)"
    steps, layers = _vectors(records, names.JACCARD_LAYER)
    if len(layers) > MOST_LINES:
        return _strip(title, records, names.JACCARD_LAYER, lowest="0")
    lines = []
    for layer, values in enumerate(layers):
        known = [(step, value) for step, value in zip(steps, values) if value is not None]
        at, numbers = zip(*known) if known else ((), ())
        lines.append(Line(label=f"layer {layer}", colour=COLOURS[layer], steps=at, values=numbers))
    return _curves(title, lines, (0.0, 1.0))


def _card(title: str, body: str, *, legend: Sequence[tuple[str, str]] = (), now: str = "") -> str:
    keys = "".join(f'<span><i class="{colour} fill"></i>{escape(label)}</span>' for label, colour in legend)
    head = f'<span class="now">{escape(now)}</span><h3>{escape(title)}</h3>'
    legend_line = f'<div class="legend">{keys}</div>' if keys else ""
    return f'<div class="card">{head}{legend_line}{body}</div>'
