"""Trees and targets -> rows of one fixed shape, and a report of what did not fit and why. NumPy only.

A packed row holds parts of prefix trees one after the other; a target says which slot predicts which token. What a
target depends on is exactly its slot s and the slots j with `j <= s < subtree_end[j]`.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int8, Int32

from harnessrl_jax.errors import PackingError
from harnessrl_jax.trajectories.accounting import Drop, canonical_order, merge_drops
from harnessrl_jax.trajectories.credit import CreditedCall, CreditedCalls, LossMean
from harnessrl_jax.trajectories.cutting import Part, parts, prune
from harnessrl_jax.trajectories.targets import Targets, build_targets
from harnessrl_jax.trajectories.trees import PrefixTree, build


class PackedBatch(NamedTuple):
    """Rows of one shape: trees in slots, and the targets that read them. NumPy on the host, a pytree on the device.

    Padding: token, position, source, target, advantage and weight 0, `subtree_end` = own slot + 1 (a pad sees only
    itself), call and rollout -1.

    Attributes:
      token: token id of the slot.
      position: depth of the slot in its tree; the position id.
      subtree_end: one past the last slot below this one, in slots of the row.
      source: slot whose hidden state predicts the target.
      target: token id to predict.
      logp_behaviour: log-probability the sampler reported, nats; read only where `has_logp`.
      has_logp: whether there is one.
      advantage: credit of the token.
      role: `Role` of the token; NONE on padding.
      weight: loss weight; 0 exactly on padding.
      success: whether the token's rollout had an outcome reward above 0.
      call: number of the call in the step.
      rollout: number of the rollout in the step.
    """

    token: Int32[np.ndarray, "row slot"]
    position: Int32[np.ndarray, "row slot"]
    subtree_end: Int32[np.ndarray, "row slot"]
    source: Int32[np.ndarray, "row target"]
    target: Int32[np.ndarray, "row target"]
    logp_behaviour: Float32[np.ndarray, "row target"]
    has_logp: Bool[np.ndarray, "row target"]
    advantage: Float32[np.ndarray, "row target"]
    role: Int8[np.ndarray, "row target"]
    weight: Float32[np.ndarray, "row target"]
    success: Bool[np.ndarray, "row target"]
    call: Int32[np.ndarray, "row target"]
    rollout: Int32[np.ndarray, "row target"]


class PackingReport(NamedTuple):
    """How well a batch is filled, and what is not in it.

    Attributes:
      rows_used: rows that hold something; they come first.
      rows_wanted: rows that everything would have needed.
      slots_used: slots that hold a token.
      targets_used: targets in the batch.
      row_slots: slots of a row.
      call_slots: slots that the same calls would need one by one.
      tree_slots: slots of their trees before any was cut.
      dropped: calls and sampled tokens by reason; a tree that found no room is "no_room", a call longer than a row
        "too_long".
    """

    rows_used: int
    rows_wanted: int
    slots_used: int
    targets_used: int
    row_slots: int
    call_slots: int
    tree_slots: int
    dropped: Mapping[str, Drop]

    @property
    def fill(self) -> float:
        """Share of the used rows' slots that hold a token, 0 to 1."""
        return self.slots_used / max(self.rows_used * self.row_slots, 1)

    @property
    def reuse(self) -> float:
        """How many calls a slot serves on average: slots of the calls one by one / slots used."""
        return self.call_slots / max(self.slots_used, 1)

    @property
    def repeated(self) -> int:
        """Slots that repeat a prefix because a tree was cut."""
        return self.slots_used - self.tree_slots


class PackedStep(NamedTuple):
    """One training step's data.

    Attributes:
      batch: the rows.
      report: fill, reuse, and every sampled token that is not in the batch, by reason.
      calls: the credited calls; `batch.call` counts through them.
      rollouts: rollout ids; `batch.rollout` counts through them.
    """

    batch: PackedBatch
    report: PackingReport
    calls: tuple[CreditedCall, ...]
    rollouts: tuple[str, ...]


def pack_groups(
    credited: CreditedCalls, *, loss_mean: LossMean, row_slots: int, row_targets: int, max_rows: int
) -> PackedStep:
    """Builds one tree for each group of rollouts and packs them.

    The rollouts of a group share system prompt and question, so their calls share one tree and each shared token is
    computed once. A call whose tokens exceed a row is dropped as "too_long" before the loss weights are taken.

    Args:
      credited: the calls of a step.
      loss_mean: how targets are weighted, see `loss_weights`.
      row_slots: slots of a row.
      row_targets: targets of a row.
      max_rows: rows of the batch.

    Returns:
      The batch, its report, and what the call and rollout numbers mean. The same for every order of the calls.
    """
    calls = tuple(sorted(credited.calls, key=lambda c: canonical_order(c.call)))
    rollouts = {(c.call.run_id, c.call.rollout_id): None for c in calls}
    number = {key: place for place, key in enumerate(rollouts)}
    fits = [len(c.call.prompt_ids) + len(c.call.output_ids) - 1 <= row_slots for c in calls]
    long = [len(c.call.output_ids) for c, fit in zip(calls, fits, strict=True) if not fit]
    items: list[tuple[PrefixTree, Targets]] = []
    places = [place for place, fit in enumerate(fits) if fit]
    for _, members in itertools.groupby(places, key=lambda p: (calls[p].call.run_id, calls[p].call.group_id)):
        group = list(members)
        own = [calls[place] for place in group]
        tree, leaf = build([np.concatenate([c.call.prompt_ids, c.call.output_ids]) for c in own])
        rollout = np.array([number[c.call.run_id, c.call.rollout_id] for c in own], np.int32)
        call = np.array(group, np.int32)
        targets = build_targets(tree, leaf, own, call_number=call, rollout_number=rollout, loss_mean=loss_mean)
        items.append((tree, targets))
    batch, report = pack(items, row_slots=row_slots, row_targets=row_targets, max_rows=max_rows)
    too_long = {"too_long": Drop(calls=len(long), tokens=sum(long))} if long else {}
    report = report._replace(dropped=merge_drops(credited.dropped, report.dropped, too_long))
    return PackedStep(batch=batch, report=report, calls=calls, rollouts=tuple(rollout for _, rollout in rollouts))


def pack(
    items: Sequence[tuple[PrefixTree, Targets]], *, row_slots: int, row_targets: int, max_rows: int
) -> tuple[PackedBatch, PackingReport]:
    """Lays trees into rows, first-fit-decreasing; a tree longer than a row is cut, repeating as little as possible.

    An item is packed whole or not at all. If the rows do not suffice, the last items that stand beyond them are left
    out as "no_room". Nodes that no target depends on take no slot.

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
    for name, value in (("row_slots", row_slots), ("row_targets", row_targets), ("max_rows", max_rows)):
        if value < 1:
            raise PackingError(f"pack: {name} must be at least 1, got {value}.")
    if any(not np.all(targets.weight > 0) for _, targets in items):
        raise PackingError("pack: a target has weight 0 or less, which means padding. Leave such targets out.")
    if any(np.any(np.diff(targets.source) < 0) for _, targets in items):
        raise PackingError("pack: the targets of a tree must be sorted by source. Sort them, as build_targets does.")
    pruned = [prune(tree, targets) for tree, targets in items]
    cut = [list(parts(*item, row_slots=row_slots, row_targets=row_targets)) for item in pruned]
    chosen = list(range(len(items)))
    rows = _first_fit([(place, part) for place in chosen for part in cut[place]], row_slots, row_targets)
    rows_wanted = len(rows)
    while len(rows) > max_rows:
        beyond = {place for row in rows[max_rows:] for place, _ in row}
        chosen.remove(max(beyond))
        rows = _first_fit([(place, part) for place in chosen for part in cut[place]], row_slots, row_targets)
    batch = _empty(row_slots, row_targets, max_rows)
    for row, content in enumerate(rows):
        _fill(batch, row, [part for _, part in content])
    left_out = [pruned[place][1] for place in range(len(items)) if place not in set(chosen)]
    no_room = Drop(
        calls=sum(len(np.unique(targets.call)) for targets in left_out), tokens=sum(len(t.token) for t in left_out)
    )
    return batch, PackingReport(
        rows_used=len(rows),
        rows_wanted=rows_wanted,
        slots_used=sum(len(part.token) for row in rows for _, part in row),
        targets_used=sum(len(part.targets.token) for row in rows for _, part in row),
        row_slots=row_slots,
        call_slots=sum(_call_slots(*pruned[place]) for place in chosen),
        tree_slots=sum(len(pruned[place][0].token) for place in chosen),
        dropped={"no_room": no_room} if left_out else {},
    )


def target_context(batch: PackedBatch, row: int, target: int) -> Int32[np.ndarray, " depth"]:
    """Token ids a target is conditioned on, root first: the slots that its source can see.

    Args:
      batch: a packed batch on the host.
      row: row of the target.
      target: its place in the row.

    Returns:
      The ids; for a target of a call, the prompt and the output before it.
    """
    source = int(batch.source[row, target])
    return batch.token[row, np.flatnonzero(batch.subtree_end[row, : source + 1] > source)]


def _first_fit(content: Sequence[tuple[int, Part]], row_slots: int, row_targets: int) -> list[list[tuple[int, Part]]]:
    """Rows of (item, part): the largest parts first, each in the first row with room for its slots and targets."""
    order = sorted(range(len(content)), key=lambda i: (-len(content[i][1].token), -len(content[i][1].targets.token), i))
    rows: list[list[tuple[int, Part]]] = []
    slots = np.full(len(content), row_slots)
    targets = np.full(len(content), row_targets)
    for place in order:
        part = content[place][1]
        row = int(np.argmax((slots >= len(part.token)) & (targets >= len(part.targets.token))))
        if row >= len(rows):
            rows.append([])
        rows[row].append(content[place])
        slots[row] -= len(part.token)
        targets[row] -= len(part.targets.token)
    return rows


def _call_slots(tree: PrefixTree, targets: Targets) -> int:
    """Slots the item's calls would need one by one: the path to the last source of each."""
    _, place = np.unique(targets.call, return_inverse=True)
    longest = np.zeros(int(place.max()) + 1 if len(place) else 0, np.int64)
    np.maximum.at(longest, place, tree.depth[targets.source] + 1)
    return int(longest.sum())


def _empty(row_slots: int, row_targets: int, rows: int) -> PackedBatch:
    slots, targets = (rows, row_slots), (rows, row_targets)
    return PackedBatch(
        token=np.zeros(slots, np.int32),
        position=np.zeros(slots, np.int32),
        subtree_end=np.tile(np.arange(1, row_slots + 1, dtype=np.int32), (rows, 1)),
        source=np.zeros(targets, np.int32),
        target=np.zeros(targets, np.int32),
        logp_behaviour=np.zeros(targets, np.float32),
        has_logp=np.zeros(targets, np.bool_),
        advantage=np.zeros(targets, np.float32),
        role=np.zeros(targets, np.int8),
        weight=np.zeros(targets, np.float32),
        success=np.zeros(targets, np.bool_),
        call=np.full(targets, -1, np.int32),
        rollout=np.full(targets, -1, np.int32),
    )


def _fill(batch: PackedBatch, row: int, content: Sequence[Part]) -> None:
    slot = first = 0
    for part in content:
        here = slice(slot, slot + len(part.token))
        there = slice(first, first + len(part.targets.token))
        batch.token[row, here] = part.token
        batch.position[row, here] = part.position
        batch.subtree_end[row, here] = part.subtree_end + slot
        batch.source[row, there] = part.targets.source + slot
        batch.target[row, there] = part.targets.token
        for name in ("logp_behaviour", "has_logp", "advantage", "role", "weight", "success", "call", "rollout"):
            getattr(batch, name)[row, there] = getattr(part.targets, name)
        slot, first = here.stop, there.stop
