"""Trees and targets -> rows of a few fixed shapes, and a report of what did not fit and why. NumPy only."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from harnessrl_jax.errors import PackingError
from harnessrl_jax.trajectories.accounting import Drop
from harnessrl_jax.trajectories.cutting import Part, parts, prune
from harnessrl_jax.trajectories.fitting import Bucket, FittedRow, Size, check_buckets, first_fit
from harnessrl_jax.trajectories.rows import PackedBatch, empty_batch, fill_row
from harnessrl_jax.trajectories.targets import Targets
from harnessrl_jax.trajectories.trees import PrefixTree

Item = tuple[PrefixTree, Targets]


class RowReport(NamedTuple):
    """How well one row is filled.

    Attributes:
      bucket: number of its bucket.
      slots: slots that hold a token.
      targets: targets.
      call_slots: slots that the calls trained here would need one by one.
      row_slots: slots of the row.
    """

    bucket: int
    slots: int
    targets: int
    call_slots: int
    row_slots: int

    @property
    def fill(self) -> float:
        """Share of the row's slots that hold a token, 0 to 1."""
        return self.slots / self.row_slots

    @property
    def reuse(self) -> float:
        """How many calls a slot serves on average."""
        return self.call_slots / self.slots


class PackingReport(NamedTuple):
    """How well a batch is filled, and what is not in it.

    Attributes:
      rows: the rows that hold something, bucket after bucket; in a batch they come first.
      rows_wanted: rows that everything would have needed.
      call_slots: slots that the same calls would need one by one.
      tree_slots: slots of their trees before any was cut.
      dropped: calls and sampled tokens by reason; a tree that found no room is "no_room", a call longer than a row
        "too_long".
    """

    rows: tuple[RowReport, ...]
    rows_wanted: int
    call_slots: int
    tree_slots: int
    dropped: Mapping[str, Drop]

    @property
    def rows_used(self) -> int:
        """Rows that hold something."""
        return len(self.rows)

    @property
    def slots_used(self) -> int:
        """Slots that hold a token."""
        return sum(row.slots for row in self.rows)

    @property
    def targets_used(self) -> int:
        """Targets in the batch."""
        return sum(row.targets for row in self.rows)

    @property
    def fill(self) -> float:
        """Share of the used rows' slots that hold a token, 0 to 1."""
        return self.slots_used / max(sum(row.row_slots for row in self.rows), 1)

    @property
    def reuse(self) -> float:
        """How many calls a slot serves on average: slots of the calls one by one / slots used."""
        return self.call_slots / max(self.slots_used, 1)

    @property
    def repeated(self) -> int:
        """Slots that repeat a prefix because a tree was cut."""
        return self.slots_used - self.tree_slots


def pack(
    items: Sequence[Item], *, row_slots: int, row_targets: int, max_rows: int
) -> tuple[PackedBatch, PackingReport]:
    """Lays trees into rows of one shape: `pack_buckets` with one bucket.

    Args:
      items: trees with their targets, sorted by source; a call lies in one item.
      row_slots: slots of a row.
      row_targets: targets of a row.
      max_rows: rows of the batch.

    Returns:
      The batch and its report.

    Raises:
      PackingError: a path longer than a row, a weight that is not above 0, unsorted targets, or a shape below 1.
    """
    (batch,), report = pack_buckets(items, [Bucket(row_slots, row_targets, max_rows)])
    return batch, report


def pack_buckets(items: Sequence[Item], buckets: Sequence[Bucket]) -> tuple[tuple[PackedBatch, ...], PackingReport]:
    """Lays trees into rows of a few shapes, first-fit-decreasing; each row takes the smallest shape that holds it.

    A tree longer than a row of the last bucket is cut, repeating as little as possible. An item is packed whole or not
    at all. If the rows do not suffice, the last items that stand beyond them are left out as "no_room". Nodes that no
    target depends on take no slot. The loss is a sum over all rows of all batches, divided once by all their weights.

    Args:
      items: trees with their targets, sorted by source, such as `group_trees(...).items`; a call lies in one item.
      buckets: the shapes a step may have, from small to large.

    Returns:
      One batch for each bucket, and the report of all of them.

    Raises:
      PackingError: a path longer than a row, a weight that is not above 0, unsorted targets, or buckets out of order.
    """
    check_buckets(buckets)
    if any(not np.all(targets.weight > 0) for _, targets in items):
        raise PackingError("pack: a target has weight 0 or less, which means padding. Leave such targets out.")
    if any(np.any(np.diff(targets.source) < 0) for _, targets in items):
        raise PackingError("pack: the targets of a tree must be sorted by source. Sort them, as build_targets does.")
    pruned = [prune(tree, targets) for tree, targets in items]
    shape = {"row_slots": buckets[-1].row_slots, "row_targets": buckets[-1].row_targets}
    content = [(place, part) for place, item in enumerate(pruned) for part in parts(*item, **shape)]
    content, rows, rows_wanted = _fitted(content, buckets)
    batches = tuple(empty_batch(*bucket, replayed=_replayed(pruned)) for bucket in buckets)
    reports: list[RowReport] = []
    for number, (batch, bucket) in enumerate(zip(batches, buckets, strict=True)):
        for place, row in enumerate(row for row in rows if row.bucket == number):
            held = [content[member][1] for member in row.members]
            fill_row(batch, place, held)
            reports.append(_row_report(number, bucket, held))
    chosen = {place for place, _ in content}
    packed = [item for place, item in enumerate(pruned) if place in chosen]
    left_out = [targets for place, (_, targets) in enumerate(pruned) if place not in chosen and len(targets.token)]
    return batches, PackingReport(
        rows=tuple(reports),
        rows_wanted=rows_wanted,
        call_slots=sum(_call_slots(targets, tree.depth) for tree, targets in packed),
        tree_slots=sum(len(tree.token) for tree, _ in packed),
        dropped={"no_room": _dropped(left_out)} if left_out else {},
    )


def _replayed(items: Sequence[Item]) -> tuple[int, int]:
    """Layers and active experts of what the trees replay, which must be alike in all of them."""
    shapes = {(0, 0) if isinstance(tree.experts, tuple) else tree.experts.shape[1:] for tree, _ in items}
    if len(shapes) > 1:
        raise PackingError(
            f"pack: trees replay experts of different shapes [layer, active]: {sorted(shapes)}. Pack what "
            "one model sampled, with experts everywhere or nowhere."
        )
    return next(iter(shapes), (0, 0))


def _fitted(
    content: list[tuple[int, Part]], buckets: Sequence[Bucket]
) -> tuple[list[tuple[int, Part]], list[FittedRow], int]:
    """The (item, part) pairs that are packed, their rows, and the rows that all would have needed."""
    rows_wanted = None
    while True:
        rows = first_fit([Size(len(part.token), len(part.targets.token)) for _, part in content], buckets)
        rows_wanted = len(rows) if rows_wanted is None else rows_wanted
        beyond = [content[member][0] for row in rows if row.bucket is None for member in row.members]
        if not beyond:
            return content, rows, rows_wanted
        content = [pair for pair in content if pair[0] != max(beyond)]


def _row_report(number: int, bucket: Bucket, held: Sequence[Part]) -> RowReport:
    return RowReport(
        bucket=number,
        slots=sum(len(part.token) for part in held),
        targets=sum(len(part.targets.token) for part in held),
        call_slots=sum(_call_slots(part.targets, part.position) for part in held),
        row_slots=bucket.row_slots,
    )


def _call_slots(targets: Targets, depth: np.ndarray) -> int:
    """Slots the calls would need one by one: the path to the last source of each."""
    if not len(targets.call):
        return 0
    longest = np.zeros(int(targets.call.max()) + 1, np.int64)
    longest[targets.call] = depth[targets.source] + 1  # sources ascend, so the last one of each call stays
    return int(longest.sum())


def _dropped(left_out: Sequence[Targets]) -> Drop:
    return Drop(
        calls=sum(len(np.unique(targets.call)) for targets in left_out),
        tokens=sum(len(targets.token) for targets in left_out),
    )
