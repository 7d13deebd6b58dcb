"""Outcome rewards of the rollouts of a group -> one advantage a rollout. NumPy only.

Every estimator gives exactly 0 to a rollout that is not counted, to a group of one and to a group whose counted rewards
are all equal, and reads no reward that is not counted. Results are float64; they become float32 once, in the targets.
"""

import math
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Float, Float64, Int

from harnessrl_jax.errors import RecordError
from harnessrl_jax.trajectories.credit.groups import above_zero, aligned, boolean, finite, flat, members, standardised


class Estimator(Protocol):
    """A way to turn outcome rewards into advantages; `leave_one_out`, `partial(group_std, ...)`, or one of your own.

    It must not depend on the order of the members, and must give exactly 0 to members that are not counted.
    """

    def __call__(
        self,
        reward: Float[np.ndarray, " rollout"],
        group: Int[np.ndarray, " rollout"],
        counted: Bool[np.ndarray, " rollout"],
        /,
    ) -> Float64[np.ndarray, " rollout"]:
        """Advantages of the rollouts; `reward` is never read where `counted` is False."""
        ...


def leave_one_out(
    reward: Float[np.ndarray, " rollout"], group: Int[np.ndarray, " rollout"], counted: Bool[np.ndarray, " rollout"]
) -> Float64[np.ndarray, " rollout"]:
    """Reward of each rollout minus the mean of the others in its group.

        A_i = r_i - 1/(n-1) Σ_{j≠i} r_j          over the n counted rollouts of the group

    The baseline does not depend on the rollout it is subtracted from, so the gradient is unbiased.

    Args:
      reward: outcome reward; never read where `counted` is False, so it may be NaN there.
      group: number of the group.
      counted: False for infrastructure failures and rollouts without a reward.

    Returns:
      The advantages.

    Raises:
      RecordError: a counted reward is not finite, or the arrays differ in length.

    References:
      Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!"

    Examples:
      >>> leave_one_out(np.array([1.0, 0.0, 0.5]), np.zeros(3, int), np.ones(3, bool)).tolist()
      [0.75, -0.75, 0.0]
    """
    aligned("leave_one_out", reward=reward, group=group, counted=counted)
    boolean("leave_one_out", counted=counted)
    out = np.zeros(len(reward), np.float64)
    for place in members(group, counted):
        values = finite("leave_one_out", reward[place])
        if not flat(values):
            total = math.fsum(values)
            out[place] = [value - (total - value) / (len(values) - 1) for value in values]
    return out


def group_mean(
    reward: Float[np.ndarray, " rollout"], group: Int[np.ndarray, " rollout"], counted: Bool[np.ndarray, " rollout"]
) -> Float64[np.ndarray, " rollout"]:
    """Reward minus the mean of the whole group, without a standard deviation: Dr.GRPO.

        A_i = r_i - 1/n Σ_j r_j          = (n-1)/n of `leave_one_out`

    Dr.GRPO also divides the summed loss by a constant instead of by lengths: see `sequence_sum`.

    Args:
      reward: outcome reward; never read where `counted` is False.
      group: number of the group.
      counted: False for infrastructure failures and rollouts without a reward.

    Returns:
      The advantages.

    Raises:
      RecordError: a counted reward is not finite, or the arrays differ in length.

    References:
      Liu et al. 2025, "Understanding R1-Zero-like training", arXiv 2503.20783.

    Examples:
      >>> group_mean(np.array([1.0, 0.0, 0.5]), np.zeros(3, int), np.ones(3, bool)).tolist()
      [0.5, -0.5, 0.0]
    """
    aligned("group_mean", reward=reward, group=group, counted=counted)
    boolean("group_mean", counted=counted)
    out = np.zeros(len(reward), np.float64)
    for place in members(group, counted):
        values = finite("group_mean", reward[place])
        if not flat(values):
            centre = math.fsum(values) / len(values)
            out[place] = [value - centre for value in values]
    return out


def group_std(
    reward: Float[np.ndarray, " rollout"],
    group: Int[np.ndarray, " rollout"],
    counted: Bool[np.ndarray, " rollout"],
    *,
    floor: float,
    unbiased: bool,
) -> Float64[np.ndarray, " rollout"]:
    """Reward standardised over its group: GRPO.

        A_i = (r_i - mean) / (std + floor)

    Mean and standard deviation are those of the whole group, so |A| is at most √(n-1), or (n-1)/√n with `unbiased`,
    however unequal the rewards are; a leave-one-out deviation has no such bound.

    Args:
      reward: outcome reward; never read where `counted` is False.
      group: number of the group.
      counted: False for infrastructure failures and rollouts without a reward.
      floor: added to the standard deviation, above 0; 1e-6 in common trainers.
      unbiased: divide the squares by n - 1 (as `torch.std` does) instead of n.

    Returns:
      The advantages.

    Raises:
      RecordError: a counted reward is not finite, the arrays differ in length, or the floor is not above 0.

    References:
      Shao et al. 2024, "DeepSeekMath", arXiv 2402.03300.

    Examples:
      >>> reward, group, counted = np.array([3.0, 1.0, 1.0, 3.0]), np.zeros(4, int), np.ones(4, bool)
      >>> group_std(reward, group, counted, floor=1e-9, unbiased=False).round(6).tolist()
      [1.0, -1.0, -1.0, 1.0]
    """
    aligned("group_std", reward=reward, group=group, counted=counted)
    boolean("group_std", counted=counted)
    above_zero("group_std", "floor", floor)
    out = np.zeros(len(reward), np.float64)
    for place in members(group, counted):
        out[place] = standardised(finite("group_std", reward[place]), floor=floor, unbiased=unbiased)
    return out


def rloo(
    reward: Float[np.ndarray, " rollout"],
    kl: Float[np.ndarray, " rollout"],
    group: Int[np.ndarray, " rollout"],
    counted: Bool[np.ndarray, " rollout"],
    *,
    beta: float,
) -> Float64[np.ndarray, " rollout"]:
    """Leave-one-out mean of the reward that is charged for leaving the reference policy: RLOO.

        R_i = r_i - β kl_i          A_i = R_i - 1/(n-1) Σ_{j≠i} R_j

    With β = 0 it is `leave_one_out`. RLOO takes the whole rollout as one action: pair it with `sequence_sum`.

    Args:
      reward: outcome reward; never read where `counted` is False.
      kl: Σ log π - log π_ref over the sampled tokens of the rollout, nats; likewise never read.
      group: number of the group.
      counted: False for infrastructure failures and rollouts without a reward.
      beta: price of a nat, at least 0.

    Returns:
      The advantages.

    Raises:
      RecordError: a counted reward or kl is not finite, the arrays differ in length, or beta is negative.

    References:
      Ahmadian et al. 2024, "Back to Basics", arXiv 2402.14740.

    Examples:
      >>> reward, kl = np.array([1.0, 0.0]), np.array([2.0, 0.0])
      >>> rloo(reward, kl, np.zeros(2, int), np.ones(2, bool), beta=0.25).tolist()
      [0.5, -0.5]
    """
    aligned("rloo", reward=reward, kl=kl, group=group, counted=counted)
    boolean("rloo", counted=counted)
    if not (math.isfinite(beta) and beta >= 0):
        raise RecordError(f"rloo: beta must be a finite number of at least 0, got {beta!r}.")
    charged = np.zeros(len(reward), np.float64)
    pairs = zip(finite("rloo", reward[counted]), finite("rloo", kl[counted], "kl"), strict=True)
    charged[counted] = [value - beta * price for value, price in pairs]
    return leave_one_out(charged, group, counted)
