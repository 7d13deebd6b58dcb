"""Credited calls and their prefix tree -> one target for each sampled token of each call. NumPy only."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int, Int8, Int32

from harnessrl_jax.trajectories.credit import CreditedCall, LossMean, loss_weights
from harnessrl_jax.trajectories.roles import call_roles
from harnessrl_jax.trajectories.trees import PrefixTree, ancestor, offsets


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


def build_targets(
    tree: PrefixTree,
    leaf: Int[np.ndarray, " call"],
    calls: Sequence[CreditedCall],
    *,
    call_number: Int[np.ndarray, " call"],
    rollout_number: Int[np.ndarray, " call"],
    loss_mean: LossMean,
) -> Targets:
    """Every sampled token of every call, sorted by source, then in the order of the calls.

    Args:
      tree: prefix tree of prompt + output of the calls.
      leaf: last node of each call.
      calls: the calls; all trained calls of a rollout must be in the same tree for "rollout" weights, and all of a
        group for "prompt" weights.
      call_number: number of each call in the step.
      rollout_number: number of its rollout in the step.
      loss_mean: how targets are weighted, see `loss_weights`.

    Returns:
      The targets.
    """
    size = np.array([len(c.call.output_ids) for c in calls], np.int64)
    of_call = np.repeat(np.arange(len(calls)), size)
    prompt = np.array([len(c.call.prompt_ids) for c in calls], np.int64)
    source = ancestor(tree, np.asarray(leaf)[of_call], prompt[of_call] - 1 + offsets(size))
    rollout = np.asarray(rollout_number, np.int32)[of_call]
    group = {(c.call.run_id, c.call.group_id): None for c in calls}
    number = {name: place for place, name in enumerate(group)}
    prompt_number = np.array([number[c.call.run_id, c.call.group_id] for c in calls], np.int64)[of_call]
    has_logp = np.array([c.call.logps is not None for c in calls], np.bool_)
    absent = [np.zeros(n, np.float32) for n in size.tolist()]
    logps = [zeros if c.call.logps is None else c.call.logps for c, zeros in zip(calls, absent, strict=True)]
    targets = Targets(
        source=source,
        token=_joined([c.call.output_ids for c in calls], np.int32),
        logp_behaviour=_joined(logps, np.float32),
        has_logp=has_logp[of_call],
        advantage=np.array([c.advantage for c in calls], np.float32)[of_call],
        role=_joined([call_roles(c.call) for c in calls], np.int8),
        weight=loss_weights(rollout, loss_mean, call=of_call, prompt=prompt_number),
        success=np.array([c.success for c in calls], np.bool_)[of_call],
        call=np.asarray(call_number, np.int32)[of_call],
        rollout=rollout,
    )
    order = np.argsort(source, kind="stable")
    return Targets(*(field[order] for field in targets))


def _joined(parts: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)
