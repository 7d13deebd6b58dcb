"""What a packed batch is, and how parts of trees are written into its rows. NumPy only.

A packed row holds parts of prefix trees one after the other; a target says which slot predicts which token. What a
target depends on is exactly its slot s and the slots j with `j <= s < subtree_end[j]`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int8, Int32, UInt8

from harnessrl_jax.trajectories.cutting import Part


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
      value_behaviour: a critic's value of what the target follows, when the returns were computed, in units of
        reward; () in a batch without a critic.
      target_return: what the critic should have said (`with_values`); () in a batch without one.
      experts: those that the sampler sent the slot's token to, for `models.row_hidden`; () in a batch without any.
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
    value_behaviour: Float32[np.ndarray, "row target"] | tuple[()] = ()
    target_return: Float32[np.ndarray, "row target"] | tuple[()] = ()
    experts: UInt8[np.ndarray, "row slot layer active"] | tuple[()] = ()

    @property
    def replayed(self) -> tuple[int, int]:
        """Layers and active experts of what it replays; zeros if it replays nothing."""
        return (0, 0) if isinstance(self.experts, tuple) else self.experts.shape[2:]


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


def empty_batch(row_slots: int, row_targets: int, rows: int, *, replayed: tuple[int, int] = (0, 0)) -> PackedBatch:
    """A batch that is all padding; `replayed` as `PackedBatch.replayed`."""
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
        experts=np.zeros((*slots, *replayed), np.uint8) if any(replayed) else (),
    )


def fill_row(batch: PackedBatch, row: int, content: Sequence[Part]) -> None:
    """Writes parts into an empty row, one after the other."""
    slot = first = 0
    for part in content:
        here = slice(slot, slot + len(part.token))
        there = slice(first, first + len(part.targets.token))
        batch.token[row, here] = part.token
        batch.position[row, here] = part.position
        batch.subtree_end[row, here] = part.subtree_end + slot
        if not isinstance(batch.experts, tuple):
            batch.experts[row, here] = part.experts
        batch.source[row, there] = part.targets.source + slot
        batch.target[row, there] = part.targets.token
        for name in ("logp_behaviour", "has_logp", "advantage", "role", "weight", "success", "call", "rollout"):
            getattr(batch, name)[row, there] = getattr(part.targets, name)
        slot, first = here.stop, there.stop
