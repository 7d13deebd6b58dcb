"""Trees and targets -> rows of one fixed shape, and a report of what did not fit and why. NumPy only.

A packed row holds parts of prefix trees one after the other; a target says which slot predicts which token. What a
target depends on is exactly its slot and the slots s' with `s' <= s < subtree_end[s']`.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int8, Int32


class Targets(NamedTuple):
    """The sampled tokens of one tree that are trained on, one entry for each token of each call.

    Two calls that sampled the same token after the same prefix are two targets on one source.

    Attributes:
      source: node whose hidden state predicts the token: its parent, never a sibling.
      token: the sampled token id.
      logp_behaviour: its log-probability as the sampler reported it, nats; read only where `has_logp`.
      has_logp: whether the sampler reported one.
      advantage: credit of the token.
      role: `Role` of the token: ACTION, ARGS or OTHER.
      weight: loss weight, above 0.
      success: whether the token's rollout had an outcome reward above 0.
      call: number of the call in the step.
      rollout: number of the rollout in the step.
    """

    source: Int32[np.ndarray, " target"]
    token: Int32[np.ndarray, " target"]
    logp_behaviour: Float32[np.ndarray, " target"]
    has_logp: Bool[np.ndarray, " target"]
    advantage: Float32[np.ndarray, " target"]
    role: Int8[np.ndarray, " target"]
    weight: Float32[np.ndarray, " target"]
    success: Bool[np.ndarray, " target"]
    call: Int32[np.ndarray, " target"]
    rollout: Int32[np.ndarray, " target"]


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
