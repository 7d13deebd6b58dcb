"""Answers in sequence, each checked -> advantages for "solved within K answers". NumPy only."""

import numpy as np
from jaxtyping import Bool, Float64, Int

from harnessrl_jax.errors import RecordError
from harnessrl_jax.trajectories.credit.baselines import leave_one_out
from harnessrl_jax.trajectories.credit.groups import aligned, boolean, groups_within, members


def verification_weights(
    solved: Bool[np.ndarray, " answer"],
    group: Int[np.ndarray, " answer"],
    rollout: Int[np.ndarray, " answer"],
    index: Int[np.ndarray, " answer"],
) -> Float64[np.ndarray, " answer"]:
    """How much answer j matters to the chance of being solved in the end.

        w_j = P(all later answers fail | answer j fails)
            = (rollouts of the group that are never solved) / (rollouts of the group whose answer j fails)

    With p_j the chance that answer j fails after j failures, J = 1 - Π p_j and ∇J = Σ_j (Π_{i≠j} p_i) ∇(1 - p_j). The
    chance of the failures before j is there by itself, as only rollouts that reach answer j have one.

    Args:
      solved: whether the check of the answer passed; a rollout ends at its first success or after K answers.
      group: number of the group.
      rollout: number of the rollout.
      index: j, from 0, without gaps in a rollout.

    Returns:
      The weights, in 0..1; 0 where no rollout of the group fails at j, where nothing is to be learned.

    Raises:
      RecordError: answers of a rollout are missing or double or go on after a success, or the arrays differ in length.

    References:
      CAL-GRPO, arXiv 2604.17912, whose formula was not seen: the derivation is ours. It supposes that the chance of a
      later success does not depend on how an answer failed.

    Examples:
      >>> solved, rollout, index = np.array([0, 1, 0, 0, 1], bool), np.array([0, 0, 1, 1, 2]), np.array([0, 1, 0, 1, 0])
      >>> verification_weights(solved, np.zeros(5, int), rollout, index).tolist()
      [0.5, 1.0, 0.5, 1.0, 0.5]
    """
    aligned("verification_weights", solved=solved, group=group, rollout=rollout, index=index)
    boolean("verification_weights", solved=solved)
    everything = np.ones(len(solved), np.bool_)
    never = np.zeros(len(solved), np.bool_)
    for place in members(groups_within(group, rollout), everything):
        order = place[np.argsort(index[place], kind="stable")]
        if index[order].tolist() != list(range(len(order))) or solved[order[:-1]].any():
            raise RecordError(
                f"verification_weights: answers of a rollout must be 0, 1, ... once each and end at the first that "
                f"passes; rollout {rollout[place[0]]} has {index[order].tolist()}, passed {solved[order].tolist()}."
            )
        never[place] = not solved[place].any()
    out = np.zeros(len(solved), np.float64)
    for place in members(groups_within(group, index), everything):
        out[place] = never[place].sum() / max(int((~solved[place]).sum()), 1)
    return out


def verification_advantages(
    solved: Bool[np.ndarray, " answer"],
    group: Int[np.ndarray, " answer"],
    rollout: Int[np.ndarray, " answer"],
    index: Int[np.ndarray, " answer"],
) -> Float64[np.ndarray, " answer"]:
    """Advantage of each answer for Verification@K = P(solved within K answers).

        A_{i,j} = w_j (r_{i,j} - mean of r_{·,j} of the others that reach answer j)

    Rewarding an answer by its own check alone (w = 1) is biased: a first answer that fails costs little if the second
    mends it. The expectation of Σ_j A_{i,j} ∇log π_j is ∇J, each term times the chance that another rollout of the
    group reaches answer j; alone at an answer, a rollout has nothing to compare with and the advantage is exactly 0.

    Args:
      solved: whether the check of the answer passed; a rollout ends at its first success or after K answers.
      group: number of the group.
      rollout: number of the rollout.
      index: j, from 0, without gaps in a rollout.

    Returns:
      The advantages, in -1..1.

    Raises:
      RecordError: as `verification_weights`.

    References:
      CAL-GRPO, arXiv 2604.17912; see `verification_weights`.

    Examples:
      >>> solved, rollout, index = np.array([0, 1, 0, 0, 1], bool), np.array([0, 0, 1, 1, 2]), np.array([0, 1, 0, 1, 0])
      >>> verification_advantages(solved, np.zeros(5, int), rollout, index).tolist()
      [-0.25, 1.0, -0.25, -1.0, 0.5]
    """
    weight = verification_weights(solved, group, rollout, index)
    own = leave_one_out(solved.astype(np.float64), groups_within(group, index), np.ones(len(solved), np.bool_))
    return weight * own
