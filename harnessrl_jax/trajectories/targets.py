"""Credited calls and their prefix tree -> one target for each sampled token of each call. NumPy only."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int, Int8, Int32

from harnessrl_jax.trajectories.credit import CreditedCall, LossMean, loss_weights
from harnessrl_jax.trajectories.records import Call, Role
from harnessrl_jax.trajectories.roles import call_roles
from harnessrl_jax.trajectories.trees import PrefixTree, path_ranges


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
      tree: prefix tree of the calls, each with its prompt and at least all but the last token of its output, which
        predicts nothing.
      leaf: last node of each call.
      calls: the calls; all trained calls of a rollout must be in the same tree for "rollout" weights, and all of a
        group for "prompt" weights.
      call_number: number of each call in the step.
      rollout_number: number of its rollout in the step.
      loss_mean: how targets are weighted, see `loss_weights`.

    Returns:
      The targets.
    """
    records = [item.call for item in calls]
    size = np.array([len(call.output_ids) for call in records], np.int64)
    prompt = np.array([len(call.prompt_ids) for call in records], np.int64)
    source = path_ranges(tree, leaf, prompt - 1, prompt - 1 + size)
    order = np.argsort(source, kind="stable")
    place = np.repeat(np.arange(len(calls)), size)[order]
    rollout = np.asarray(rollout_number, np.int32)[place]
    return Targets(
        source=source[order],
        token=_joined([call.output_ids for call in records], np.int32)[order],
        logp_behaviour=_joined([_logps(call) for call in records], np.float32)[order],
        has_logp=np.array([call.logps is not None for call in records], np.bool_)[place],
        advantage=np.array([item.advantage for item in calls], np.float32)[place],
        role=_roles(records, size)[order],
        weight=loss_weights(rollout, loss_mean, call=place, prompt=_prompts(records)[place]),
        success=np.array([item.success for item in calls], np.bool_)[place],
        call=np.asarray(call_number, np.int32)[place],
        rollout=rollout,
    )


def _joined(parts: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts], dtype=dtype)


def _prompts(calls: Sequence[Call]) -> Int[np.ndarray, " call"]:
    """The number of each call's group."""
    groups = [(call.run_id, call.group_id) for call in calls]
    number = {group: place for place, group in enumerate(dict.fromkeys(groups))}
    return np.array([number[group] for group in groups], np.int64)


def _logps(call: Call) -> Float32[np.ndarray, " o"]:
    return np.zeros(len(call.output_ids), np.float32) if call.logps is None else call.logps


def _roles(calls: Sequence[Call], size: Int[np.ndarray, " call"]) -> Int8[np.ndarray, " target"]:
    """The roles of each call's tokens, call after call; OTHER where a call has no spans."""
    role = np.full(int(size.sum()), Role.OTHER, np.int8)
    for call, end in zip(calls, np.cumsum(size).tolist(), strict=True):
        if call.spans:
            role[end - len(call.output_ids) : end] = call_roles(call)
    return role
