import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harnessrl_jax.monitor.charts import Line, heat_strip, line_chart, nice_ticks, running_mean, stacked_bars


def numbers(path):
    return [float(value) for value in re.findall(r"-?\d+\.\d+", path)]


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6))
def test_ticks_cover_the_range_and_are_few(low, width):
    ticks = nice_ticks(low, low + width)
    assert 2 <= len(ticks) <= 12
    assert ticks == sorted(set(ticks))
    slack = 1e-6 * max(1.0, abs(low), width)
    assert ticks[0] <= low + slack
    assert ticks[-1] >= low + width - slack


def test_points_stand_where_their_values_are():
    # The plot spans x 46..448 for steps 0..2 and y 184..10 for values 0..1.
    line = Line(label="score", colour="c1", steps=[0, 1, 2], values=[0.0, 1.0, 0.5], dots=True)
    root = ElementTree.fromstring(line_chart([line], limits=(0.0, 1.0)))
    assert numbers(root.find("path[@class='c1 line']").get("d")) == [46, 184, 247, 10, 448, 97]
    assert [title.text for title in root.iter("title")] == [
        "score, step 0: 0",
        "score, step 1: 1",
        "score, step 2: 0.5",
    ]


def test_a_noisy_curve_has_its_running_mean():
    line = Line(label="loss", colour="c1", steps=list(range(24)), values=[0.0, 1.0] * 12)
    root = ElementTree.fromstring(line_chart([line]))
    raw = numbers(root.find("path[@class='c1 raw']").get("d"))[1::2]
    mean = numbers(root.find("path[@class='c1 line']").get("d"))[1::2]
    assert max(raw) - min(raw) == 174  # the whole height
    assert mean[1:] == [97.0] * 23  # a window of two: half of it
    assert running_mean([2.0, 4.0], 5) == [2.0, 3.0]


@pytest.mark.parametrize("values", [[0.3], [0.0, 0.0], [-2.0, -2.0], [1e-9, 2e-9]])
def test_few_or_equal_values_are_drawn(values):
    line = Line(label="x", colour="c1", steps=list(range(len(values))), values=values)
    root = ElementTree.fromstring(line_chart([line]))
    for path in root.iter("path"):
        assert all(math.isfinite(value) and -1 < value < 460 for value in numbers(path.get("d")))


def test_hover_points_of_a_long_run_are_bounded():
    line = Line(label="x", colour="c1", steps=list(range(10_000)), values=[0.5] * 10_000)
    assert line_chart([line]).count("<circle") <= 150


def test_a_strip_shows_sign_by_colour_and_size_by_strength():
    root = ElementTree.fromstring(heat_strip([4, 5], [[0.5, -1.0], [None, 0.25]], "layer"))
    cells = {
        cell.find("title").text: (cell.get("class"), cell.get("fill-opacity"))
        for cell in root.iter("rect")
        if cell.get("class") != "frame"
    }
    assert cells == {
        "layer 0, step 4: +0.500": ("warm", "0.50"),
        "layer 0, step 5: -1.000": ("cold", "1.00"),
        "layer 1, step 5: +0.250": ("warm", "0.25"),
    }


def test_bars_share_one_scale_and_their_parts_add_up():
    root = ElementTree.fromstring(stacked_bars(["a", "b"], [("x", "c1", [10, 20]), ("y", "rest", [30, 0])], "units"))
    widths = {cell.find("title").text: float(cell.get("width")) + 1 for cell in root.iter("rect")}
    whole = 460 - 64 - 12  # of the longest bar, 40 units
    assert widths == {
        "a, x: 10 units": pytest.approx(whole / 4, abs=0.1),
        "a, y: 30 units": pytest.approx(whole * 3 / 4, abs=0.1),
        "b, x: 20 units": pytest.approx(whole / 2, abs=0.1),
    }


def test_labels_are_escaped():
    line = Line(label="<b>&", colour="c1", steps=[1], values=[1.0])
    assert "<b>" not in line_chart([line])
    assert "<b>" not in stacked_bars(["<b>"], [("<b>", "c1", [1.0])], "<b>")
