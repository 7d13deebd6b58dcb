"""Rewards of single calls -> one advantage a call, standardised among calls that can be compared. NumPy only."""

import math

import numpy as np
from jaxtyping import Float, Float64, Int

from harnessrl_jax.trajectories.credit.groups import (
    above_zero,
    aligned,
    finite,
    flat,
    groups_within,
    mean,
    members,
    standardised,
)


def process_by_call_index(
    reward: Float[np.ndarray, " call"],
    group: Int[np.ndarray, " call"],
    call_index: Int[np.ndarray, " call"],
    *,
    std_floor: float = 1e-6,
) -> Float64[np.ndarray, " call"]:
    """Process reward of each call, standardised over the rollouts of its group that reach the same call index.

        A_{i,k} = (p_{i,k} - mean_k) / (std_k + floor)

    with the population standard deviation, so no value exceeds sqrt(n-1). Exactly 0 where fewer than two members
    reach index k, and where all are equal. The advantage of a call is then A = A_outcome + c_p A_process.

    Args:
      reward: process reward p of the call.
      group: number of the group: one for each task and agent.
      call_index: k, position of the call among the calls of its agent in its rollout.
      std_floor: added to the standard deviation, above 0.

    Returns:
      The advantages.

    Raises:
      RecordError: a reward is not finite, the arrays differ in length, or the floor is not above 0.

    References:
      Harness-RL, arXiv 2608.29641, as its published re-implementation has it.

    Examples:
      >>> reward, group, index = np.array([1.0, 0.0, 5.0]), np.zeros(3, int), np.array([0, 0, 1])
      >>> process_by_call_index(reward, group, index).round(5).tolist()
      [1.0, -1.0, 0.0]
    """
    aligned("process_by_call_index", reward=reward, group=group, call_index=call_index)
    above_zero("process_by_call_index", "std_floor", std_floor)
    out = np.zeros(len(reward), np.float64)
    for place in members(groups_within(group, call_index), np.ones(len(reward), np.bool_)):
        values = finite("process_by_call_index", reward[place])
        out[place] = standardised(values, floor=std_floor, unbiased=False)
    return out


def stage_normalised(
    reward: Float[np.ndarray, " call"],
    group: Int[np.ndarray, " call"],
    stage: Int[np.ndarray, " call"],
    rollout: Int[np.ndarray, " call"],
    *,
    floor: float,
) -> Float64[np.ndarray, " call"]:
    """GRPO with one normalisation for each stage of a workflow: a plan is compared with plans, an answer with answers.

        mean_s = Σ w_c r_c / Σ w_c          std_s² = Σ w_c (r_c - mean_s)² / Σ w_c          over the calls of stage s
        A_c = (r_c - mean_s) / (std_s + floor)

    with w_c = 1 / (calls of the same rollout in the stage): the rollout stays the unit, so one that loops in a stage
    does not move the baseline of those that do not.

    Args:
      reward: reward of the call: its stage's own, or the outcome of its rollout.
      group: number of the group.
      stage: number of the stage.
      rollout: number of the rollout.
      floor: added to the standard deviation, above 0.

    Returns:
      The advantages; exactly 0 in a stage that fewer than two rollouts of the group reach, and where all rewards of
      the stage are equal.

    Raises:
      RecordError: a reward is not finite, the arrays differ in length, or the floor is not above 0.

    References:
      GRPO (arXiv 2402.03300) applied to each stage; the weights are ours.

    Examples:
      >>> reward, stage, rollout = np.array([1.0, 0.0, 9.0, 5.0]), np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])
      >>> stage_normalised(reward, np.zeros(4, int), stage, rollout, floor=1e-9).round(6).tolist()
      [1.0, -1.0, 1.0, -1.0]
    """
    aligned("stage_normalised", reward=reward, group=group, stage=stage, rollout=rollout)
    above_zero("stage_normalised", "floor", floor)
    out = np.zeros(len(reward), np.float64)
    for place in members(groups_within(group, stage), np.ones(len(reward), np.bool_)):
        values = finite("stage_normalised", reward[place])
        own = [np.flatnonzero(rollout[place] == number).tolist() for number in np.unique(rollout[place])]
        if len(own) > 1 and not flat(values):
            centre = mean([mean([values[c] for c in calls]) for calls in own])
            spread = mean([mean([(values[c] - centre) ** 2 for c in calls]) for calls in own])
            out[place] = [(value - centre) / (math.sqrt(spread) + floor) for value in values]
    return out
