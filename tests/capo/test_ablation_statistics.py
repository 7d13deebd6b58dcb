"""The statistics of the ablation: pairs by seed, intervals by hand, and mixed settings refused."""

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from ablation_statistics import append, interval, markdown, mean_shown, paired, read, shown, table


def line(arm, seed, after):
    return {"arm": arm, "seed": seed, "after": after}


LINES = [line("a", 0, 0.5), line("a", 1, 0.9), line("a", 2, 0.1), line("b", 1, 0.5), line("b", 0, 0.3)]


def test_an_interval_by_hand():
    # Four values: s = sqrt(5/3), t(0.975, 3) = 3.182446, half width t s / 2.
    found = interval([1.0, 2.0, 3.0, 4.0])
    half = 3.182446305 * math.sqrt(5 / 3) / 2
    assert found.count == 4
    assert found[:3] == pytest.approx((2.5, 2.5 - half, 2.5 + half))
    assert interval([1.0, 2.0, 3.0, 4.0], confidence=0.9).high < found.high


def test_one_value_has_no_interval():
    found = interval([0.25])
    assert found.mean == 0.25
    assert math.isnan(found.low)
    assert not found.excludes_zero()


def test_differences_are_taken_seed_by_seed_over_the_seeds_of_both():
    found = paired(LINES, "a", "b", "after")
    # 0.2 and 0.4; t(0.975, 1) = 12.7062, s / sqrt(2) = 0.1
    assert found is not None
    assert found == pytest.approx((0.3, 0.3 - 1.27062047, 0.3 + 1.27062047, 2))
    back = paired(LINES, "b", "a", "after")
    assert back is not None
    assert back.mean == pytest.approx(-found.mean)


def test_an_arm_without_cells_has_no_difference():
    assert paired(LINES, "a", "c", "after") is None
    assert shown(None) == ""


def test_two_settings_are_never_mixed():
    with pytest.raises(ValueError, match="two lines for seed 0"):
        paired([*LINES, line("a", 0, 0.6)], "a", "b", "after")


@pytest.mark.parametrize(
    ("values", "text"),
    [([0.25], "+0.250"), ([1.0, 1.0], "**+1.000 [+1.000, +1.000]**"), ([-1.0, 1.0], "+0.000 [-12.706, +12.706]")],
)
def test_bold_marks_an_interval_without_zero(values, text):
    assert shown(interval(values)) == text


def test_a_table_leaves_out_what_was_not_run():
    written = table(
        LINES,
        ["b", "c", "a"],
        means={"after": "after", "missing": "no such value"},
        against={"minus b": lambda arm: "b"},
        value="after",
    )
    assert written == markdown(
        ["arm", "seeds", "after", "missing", "minus b"],
        [["b", "2", "0.400", "", ""], ["a", "3", "0.500", "", shown(paired(LINES, "a", "b", "after"))]],
    )
    assert mean_shown(LINES, "a", "after", 1) == "0.5"


def test_cells_are_kept_one_by_one(tmp_path):
    file = tmp_path / "results" / "cells.jsonl"
    assert read(file) == []
    for each in LINES:
        append(file, each)
    assert read(file) == LINES
