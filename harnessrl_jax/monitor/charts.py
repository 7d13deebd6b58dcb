"""Numbers -> inline SVG for the report. No script, no network; colours come from the page's style sheet.

Every chart is drawn in its own user units and scales with the column it stands in. Hovering shows values.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 210
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 26
MOST_HOVERS = 150
TINY = 1e-12  # is drawn as 0


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve.

    Attributes:
      label: its name in the legend and in the hover text.
      colour: class of the style sheet, `c1` to `c5` or `rest`.
      steps: horizontal positions, ascending.
      values: as many numbers.
      dots: draw points instead of a noisy line with its running mean.
    """

    label: str
    colour: str
    steps: Sequence[int]
    values: Sequence[float]
    dots: bool = False


def line_chart(lines: Sequence[Line], *, limits: tuple[float, float] | None = None, first_step: int = 0) -> str:
    """Curves over steps: the raw numbers thin, their running mean strong.

    Args:
      lines: at least one, each with at least one point.
      limits: smallest vertical range to show; it grows with the data.
      first_step: left end of the horizontal axis.

    Returns:
      One `<svg>` element.
    """
    values = [value for line in lines for value in line.values]
    low, high = min(values + list(limits or ())), max(values + list(limits or ()))
    ticks = nice_ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    last = max(max(line.steps) for line in lines)
    x = lambda step: LEFT + (WIDTH - LEFT - RIGHT) * (step - first_step) / max(1, last - first_step)
    y = lambda value: HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low)
    parts = [_horizontal(y(tick), number(tick), strong=tick == 0 and low < 0) for tick in ticks]
    steps = [round(tick) for tick in nice_ticks(first_step, max(last, first_step + 1)) if tick == round(tick)]
    parts += [_text(x(step), HEIGHT - 8, str(step), "middle") for step in steps if first_step <= step <= last]
    for line in lines:
        parts += _curve(line, x, y)
    return _svg(WIDTH, HEIGHT, parts, ", ".join(line.label for line in lines))


def heat_strip(steps: Sequence[int], rows: Sequence[Sequence[float | None]], row_label: str) -> str:
    """One row per layer, one column per step; -1 has the colour `cold`, +1 `warm`, 0 and undefined the page's.

    Args:
      steps: one per column, at least one.
      rows: `rows[layer][column]` in [-1, 1], None where undefined; at least one row.
      row_label: what a row is, such as "layer".

    Returns:
      One `<svg>` element.
    """
    cell_height = max(10, min(34, 150 // len(rows)))
    height = TOP + cell_height * len(rows) + BOTTOM
    width = (WIDTH - LEFT - RIGHT) / len(steps)
    parts = []
    for layer, row in enumerate(rows):
        top = TOP + layer * cell_height
        parts.append(_text(LEFT - 6, top + cell_height / 2 + 4, str(layer), "end"))
        for column, (step, value) in enumerate(zip(steps, row)):
            if value is None:
                continue
            kind = "warm" if value >= 0 else "cold"
            box = f'x="{LEFT + column * width:.1f}" y="{top}" width="{width + 0.3:.1f}" height="{cell_height - 2}"'
            hover = f"<title>{row_label} {layer}, step {step}: {value:+.3f}</title>"
            parts.append(f'<rect class="{kind}" fill-opacity="{min(1.0, abs(value)):.2f}" {box}>{hover}</rect>')
    for column in sorted({0, len(steps) // 2, len(steps) - 1}):
        parts.append(_text(LEFT + (column + 0.5) * width, height - 8, str(steps[column]), "middle"))
    frame = f'x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" height="{cell_height * len(rows) - 2}"'
    return _svg(WIDTH, height, [f'<rect class="frame" {frame}/>', *parts], f"by {row_label} and step")


def stacked_bars(labels: Sequence[str], parts: Sequence[tuple[str, str, Sequence[float]]], unit: str) -> str:
    """Horizontal bars, each divided into named parts; all bars share one scale.

    Args:
      labels: one per bar.
      parts: (name, colour class, one number per bar).
      unit: of the numbers, for the hover text.

    Returns:
      One `<svg>` element.
    """
    bar, gap = (22, 11) if len(labels) <= 5 else (14, 6)
    left = LEFT + 18
    height = TOP + (bar + gap) * len(labels) + 2
    longest = max((sum(values) for values in zip(*(numbers for _, _, numbers in parts))), default=0.0) or 1.0
    scale = (WIDTH - left - RIGHT) / longest
    out = []
    for row, label in enumerate(labels):
        top, at = TOP + row * (bar + gap), float(left)
        out.append(_text(left - 8, top + bar / 2 + 4, label, "end"))
        for name, colour, numbers in parts:
            width = numbers[row] * scale
            hover = f"<title>{escape(label)}, {escape(name)}: {number(numbers[row])} {escape(unit)}</title>"
            if width > 0:
                box = f'x="{at:.1f}" y="{top}" width="{max(width - 1, 0.5):.1f}" height="{bar}"'
                out.append(f'<rect class="{colour} fill" rx="2" {box}>{hover}</rect>')
            if width > 26:
                inside = "inside on-rest" if colour == "rest" else "inside"
                out.append(_text(at + width / 2, top + bar / 2 + 4, number(numbers[row]), "middle", inside))
            at += width
    return _svg(WIDTH, height, out, ", ".join(name for name, _, _ in parts))


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that cover [low, high], about as many as asked.

    >>> nice_ticks(0.0, 0.93)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    >>> nice_ticks(1.0, 1.0)
    [0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3]
    """
    size = max(abs(low), abs(high))
    if size < TINY:
        low, high = -1.0, 1.0
    elif high - low < 1e-9 * size:
        low, high = low - size / 4, high + size / 4
    rough = (high - low) / about
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = 2 - math.floor(math.log10(step))
    return [round(index * step, digits) + 0.0 for index in range(first, last + 1)]


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last `window` values at each point (fewer at the start).

    >>> running_mean([1.0, 2.0, 3.0, 4.0], 2)
    [1.0, 1.5, 2.5, 3.5]
    """
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def number(value: float) -> str:
    """A number for people: thousands separated, as many decimals as its size deserves.

    >>> [number(x) for x in (12345.6, 12.0, 0.25, 0.00012, -0.0)]
    ['12,346', '12', '0.25', '1.2e-04', '0']
    """
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:.3f}".rstrip("0").rstrip(".") if abs(value) < 10 else f"{value:.1f}".removesuffix(".0")


def _curve(line: Line, x: Callable[[float], float], y: Callable[[float], float]) -> list[str]:
    points = [(x(step), y(value)) for step, value in zip(line.steps, line.values)]
    every = -(-len(points) // MOST_HOVERS)
    hover = [
        f'<circle class="hit" cx="{px:.1f}" cy="{py:.1f}" r="5">'
        f"<title>{escape(line.label)}, step {step}: {number(value)}</title></circle>"
        for (px, py), step, value in list(zip(points, line.steps, line.values))[::every]
    ]
    if line.dots or len(points) == 1:
        dots = [f'<circle class="{line.colour} fill" cx="{px:.1f}" cy="{py:.1f}" r="4"/>' for px, py in points]
        return [f'<path class="{line.colour} line" d="{_path(points)}"/>', *dots, *hover]
    mean = running_mean(line.values, max(1, len(points) // 12))
    smooth = [(x(step), y(value)) for step, value in zip(line.steps, mean)]
    return [
        f'<path class="{line.colour} raw" d="{_path(points)}"/>',
        f'<path class="{line.colour} line" d="{_path(smooth)}"/>',
        *hover,
    ]


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + " L".join(f"{px:.1f},{py:.1f}" for px, py in points)


def _horizontal(at: float, label: str, *, strong: bool) -> str:
    kind = "grid zero" if strong else "grid"
    line = f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
    return line + _text(LEFT - 8, at + 4, label, "end")


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(width: float, height: float, parts: Sequence[str], label: str) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
