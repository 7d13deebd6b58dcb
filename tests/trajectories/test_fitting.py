import hypothesis
import hypothesis.strategies as st
import pytest

from harnessrl_jax.errors import PackingError
from harnessrl_jax.trajectories import Bucket
from harnessrl_jax.trajectories.fitting import FittedRow, Size, check_buckets, first_fit

SMALL, MIDDLE, LARGE = Bucket(4, 4, 2), Bucket(8, 4, 2), Bucket(16, 8, 1)


def fit(slots, *buckets):
    return first_fit([Size(size, 1) for size in slots], buckets)


def test_largest_first_each_in_the_first_row_with_room():
    assert fit([3, 5, 2, 6, 4], Bucket(8, 8, 4)) == [FittedRow(0, [3, 2]), FittedRow(0, [1, 0]), FittedRow(0, [4])]


def test_equal_sizes_keep_their_order():
    assert fit([4, 4, 4], Bucket(8, 8, 4)) == [FittedRow(0, [0, 1]), FittedRow(0, [2])]


def test_targets_need_room_too_and_decide_among_equal_slots():
    sizes = [Size(1, 3), Size(1, 5), Size(1, 2)]
    assert first_fit(sizes, [Bucket(8, 5, 4)]) == [FittedRow(0, [1]), FittedRow(0, [0, 2])]


def test_a_row_takes_the_smallest_shape_that_holds_it():
    assert fit([16], SMALL, MIDDLE, LARGE) == [FittedRow(2, [0])]
    assert fit([5, 3], SMALL, MIDDLE, LARGE) == [FittedRow(1, [0, 1])]
    assert fit([2, 1], SMALL, MIDDLE, LARGE) == [FittedRow(0, [0, 1])]
    # Enough slots, not enough targets.
    assert first_fit([Size(2, 6)], [SMALL, MIDDLE, LARGE]) == [FittedRow(2, [0])]


def test_a_row_that_found_no_place_takes_the_one_that_another_leaves():
    # The second needs eight targets, which only the large row has; the first gives it up for a smaller one.
    assert first_fit([Size(7, 4), Size(6, 8)], [MIDDLE, LARGE]) == [FittedRow(0, [0]), FittedRow(1, [1])]


def test_when_large_rows_are_taken_smaller_ones_serve():
    rows = fit([16, 8, 7, 4, 4, 3], SMALL, MIDDLE, LARGE)
    assert rows == [
        FittedRow(2, [0]),
        FittedRow(1, [1]),
        FittedRow(1, [2]),
        FittedRow(0, [3]),
        FittedRow(0, [4]),
        FittedRow(None, [5]),
    ]


def test_what_finds_no_row_stands_in_rows_of_the_largest_shape():
    assert fit([16, 9, 5, 16], LARGE) == [FittedRow(0, [0]), FittedRow(None, [3]), FittedRow(None, [1, 2])]


@hypothesis.given(
    st.lists(st.tuples(st.integers(1, 16), st.integers(1, 8)), max_size=12).map(
        lambda sizes: [Size(*s) for s in sizes]
    ),
    st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 2)),
)
def test_rows_hold_everything_once_and_nothing_is_larger_than_needed(sizes, limits):
    buckets = [b._replace(max_rows=limit) for b, limit in zip((SMALL, MIDDLE, LARGE), limits, strict=True)]
    rows = first_fit(sizes, buckets)
    assert sorted(member for row in rows for member in row.members) == list(range(len(sizes)))
    used = [sum(row.bucket == number for row in rows) for number in range(3)]
    for row in rows:
        need = Size(sum(sizes[i].slots for i in row.members), sum(sizes[i].targets for i in row.members))
        holds = [need.slots <= b.row_slots and need.targets <= b.row_targets for b in buckets]
        assert holds[-1 if row.bucket is None else row.bucket]
        free = [holds[n] and used[n] < buckets[n].max_rows for n in range(3)]
        assert not any(free[: row.bucket]), "a smaller row stood empty"
    assert all(count <= bucket.max_rows for count, bucket in zip(used, buckets, strict=True))


@pytest.mark.parametrize(
    ("buckets", "fault"),
    [
        ([], "got no buckets"),
        ([Bucket(4, 4, 0)], "max_rows must be at least 1, got 0"),
        ([MIDDLE, SMALL], r"bucket 1 \(4 slots, 4 targets\) must have more slots .* before \(8, 4\)"),
        ([SMALL, SMALL], "must have more slots"),
        ([Bucket(4, 9, 1), LARGE], "no fewer targets"),
    ],
)
def test_buckets_that_do_not_ascend_are_refused(buckets, fault):
    with pytest.raises(PackingError, match=fault):
        check_buckets(buckets)
