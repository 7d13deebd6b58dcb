"""Sizes -> which rows of which bucket hold them: first-fit-decreasing over a few fixed row shapes. NumPy only."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from harnessrl_jax.errors import PackingError


class Bucket(NamedTuple):
    """Rows of one compiled shape: a step compiles once for each bucket of a run.

    Attributes:
      row_slots: slots of a row.
      row_targets: targets of a row.
      max_rows: rows of the batch.
    """

    row_slots: int
    row_targets: int
    max_rows: int


class Size(NamedTuple):
    """What something needs of a row."""

    slots: int
    targets: int


class FittedRow(NamedTuple):
    """One row that is not empty.

    Attributes:
      bucket: number of its bucket; None if every row that could hold it is taken.
      members: which of the sizes are in it, in the order in which they came.
    """

    bucket: int | None
    members: list[int]


def check_buckets(buckets: Sequence[Bucket]) -> None:
    """Raises PackingError unless there is a bucket, every number is at least 1 and the shapes ascend."""
    if not buckets:
        raise PackingError("pack_buckets: got no buckets. Give at least one.")
    for place, bucket in enumerate(buckets):
        for name, value in bucket._asdict().items():
            if value < 1:
                raise PackingError(f"pack: {name} must be at least 1, got {value}.")
        before = buckets[max(place - 1, 0)]
        if place and not (before.row_slots < bucket.row_slots and before.row_targets <= bucket.row_targets):
            raise PackingError(
                f"pack_buckets: bucket {place} ({bucket.row_slots} slots, {bucket.row_targets} targets) must have more "
                f"slots and no fewer targets than the one before ({before.row_slots}, {before.row_targets}). "
                "Sort the buckets from small to large."
            )


def first_fit(sizes: Sequence[Size], buckets: Sequence[Bucket]) -> list[FittedRow]:
    """The largest first, each into the first open row with room; then each row takes the smallest shape it can.

    A row is opened in the largest bucket that has one left. When all rows that could hold something are taken, it
    goes to a row without a bucket, so that the caller can say how many rows would have been needed.

    Args:
      sizes: each fits a row of the last bucket.
      buckets: from small to large.

    Returns:
      The rows in the order in which they were opened.

    Example:
      >>> first_fit([Size(2, 1), Size(5, 1), Size(3, 1)], [Bucket(4, 8, 1), Bucket(8, 8, 1)])
      [FittedRow(bucket=1, members=[1, 2]), FittedRow(bucket=0, members=[0])]

    References:
      Friesen and Langston 1986, "Variable sized bin packing": first-fit into large bins, each then shrunk.
    """
    left = [bucket.max_rows for bucket in buckets]
    rows: list[FittedRow] = []
    slots, targets = np.zeros(len(sizes), np.int64), np.zeros(len(sizes), np.int64)
    for member in sorted(range(len(sizes)), key=lambda i: (-sizes[i].slots, -sizes[i].targets, i)):
        size, count = sizes[member], len(rows)
        room = (slots[:count] >= size.slots) & (targets[:count] >= size.targets)
        row = int(room.argmax()) if room.any() else count
        if row == count:
            bucket = _largest_with_room(size, buckets, left)
            shape = buckets[-1 if bucket is None else bucket]
            slots[row], targets[row] = shape.row_slots, shape.row_targets
            rows.append(FittedRow(bucket, []))
        rows[row].members.append(member)
        slots[row] -= size.slots
        targets[row] -= size.targets
    return [_shrunk(row, sizes, buckets, left) for row in rows]


def _holds(bucket: Bucket, size: Size) -> bool:
    return size.slots <= bucket.row_slots and size.targets <= bucket.row_targets


def _largest_with_room(size: Size, buckets: Sequence[Bucket], left: list[int]) -> int | None:
    """Takes a row from the largest bucket that has one left and can hold the size."""
    for bucket in reversed(range(len(buckets))):
        if left[bucket] and _holds(buckets[bucket], size):
            left[bucket] -= 1
            return bucket
    return None


def _shrunk(row: FittedRow, sizes: Sequence[Size], buckets: Sequence[Bucket], left: list[int]) -> FittedRow:
    """The row in the smallest bucket that has one left and can hold its content."""
    content = Size(sum(sizes[i].slots for i in row.members), sum(sizes[i].targets for i in row.members))
    for bucket in range(len(buckets) if row.bucket is None else row.bucket):
        if left[bucket] and _holds(buckets[bucket], content):
            left[bucket] -= 1
            if row.bucket is not None:
                left[row.bucket] += 1
            return row._replace(bucket=bucket)
    return row
