import math

import numpy as np
import pytest

from harnessrl_jax.errors import RecordError
from harnessrl_jax.trajectories.credit import enabling_credit, frontier_credit, scaled_credit


def frontier(gain, informative, other_gain, other_step, dead_zone=1e-4):
    arrays = (np.array(gain), np.array(informative), np.array(other_gain, float), np.array(other_step, int))
    return frontier_credit(*arrays, dead_zone=dead_zone)


def test_the_frontier_worked_by_hand():
    # 0.5 against the mean of 0.1 and 0.3; -0.2 against 0.2; an answer; a difference inside the dead zone.
    got = frontier([0.5, -0.2, math.nan, 0.10005], [True, True, False, True], [0.1, 0.2, 0.3, 9, 0.1], [0, 1, 0, 2, 3])
    np.testing.assert_allclose(got, [0.3, -0.4, 0, 0])
    assert got[2:].tolist() == [0, 0]


def test_a_frontier_without_a_choice_gives_exactly_zero():
    assert frontier([0.7, 0.7], [True, True], [0.7] * 7, [1] * 7, dead_zone=0.0).tolist() == [0, 0]
    assert frontier([], np.zeros(0, bool), [], []).tolist() == []


def test_a_frontier_that_makes_no_sense_is_refused():
    with pytest.raises(RecordError, match=r"frontier_credit: gains must be finite, got \[nan\]"):
        frontier([math.nan], [True], [], [])
    with pytest.raises(RecordError, match=r"frontier_credit: gains must be finite, got \[inf\]"):
        frontier([1.0], [True], [math.inf], [0])
    with pytest.raises(RecordError, match=r"informative must be an array of bool, got int64"):
        frontier([1.0], [1], [], [])
    with pytest.raises(RecordError, match=r"other_step must name one of 1 steps, got \[1\]"):
        frontier([1.0], [True], [1.0], [1])
    with pytest.raises(RecordError, match=r"dead_zone must be a finite number of at least 0, got -1"):
        frontier([1.0], [True], [], [], dead_zone=-1)


def enabling(gain, edges, gamma=1.0):
    source, user = np.array(edges, int).reshape(-1, 2).T
    return enabling_credit(np.array(gain), source, user, gamma=gamma).tolist()


def test_gains_flow_back_to_what_made_them_possible():
    # 3 rests on 1 and 2: half of 4 each. 2 rests on 0: 1 + 2. 1 rests on 0: 10 + 2.
    edges = [(0, 1), (0, 2), (1, 3), (2, 3)]
    assert enabling([0.0, 10, 1, 4], edges) == [15, 2, 2, 0]
    assert enabling([0.0, 10, 1, 4], edges, gamma=0.5) == [13, 2, 2, 0]
    assert enabling([0.0, 10, 1, 4], edges[::-1]) == [15, 2, 2, 0]
    assert enabling([0.0, 10, 1, 4], []) == [0, 0, 0, 0]


def test_with_one_source_each_the_first_step_has_all_that_follows():
    assert enabling([1.0, 2, 3, 4], [(0, 1), (1, 2), (2, 3)]) == [9, 7, 4, 0]


def test_edges_that_make_no_sense_are_refused():
    with pytest.raises(RecordError, match=r"from a step to a later one of 2, got \[\(1, 0\)\]"):
        enabling([1.0, 2], [(1, 0)])
    with pytest.raises(RecordError, match=r"each edge must go once"):
        enabling([1.0, 2], [(0, 1), (0, 1)])
    with pytest.raises(RecordError, match=r"enabling_credit: gains must be finite"):
        enabling([math.nan, 2], [(0, 1)])
    with pytest.raises(RecordError, match=r"gamma must lie in 0\.\.1, got 1\.5"):
        enabling([1.0, 2], [], gamma=1.5)


def scaled(credit, **changes):
    return scaled_credit(np.array(credit), **({"weight": 0.2, "std_floor": 5e-4, "clip": 5.0} | changes))


def test_scaled_by_the_spread_of_the_batch():
    # 4 and 0: population deviation 2, no mean is subtracted.
    np.testing.assert_allclose(scaled([4.0, 0.0]), [0.4, 0])
    np.testing.assert_allclose(scaled([0.0] * 99 + [1.0])[-1], 0.2 * 5)  # the deviation is 0.0995: clipped


def test_a_batch_without_spread_meets_the_floor():
    assert scaled([0.0] * 7).tolist() == [0.0] * 7
    np.testing.assert_allclose(scaled(np.float32([1e-3] * 7)), 0.2 * 2, rtol=1e-6)
    assert scaled([]).tolist() == []


def test_scales_that_make_no_sense_are_refused():
    for name in ("weight", "std_floor", "clip"):
        with pytest.raises(RecordError, match=rf"scaled_credit: {name} must be a finite number above 0, got 0"):
            scaled([1.0], **{name: 0})
    with pytest.raises(RecordError, match=r"scaled_credit: credit must be finite"):
        scaled([math.inf])
