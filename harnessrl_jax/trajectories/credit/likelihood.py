"""Outcome rewards of a group -> advantages that climb the log-likelihood of success. NumPy only."""

import math

import numpy as np
from jaxtyping import Bool, Float, Float64, Int

from harnessrl_jax.errors import RecordError
from harnessrl_jax.trajectories.credit.groups import aligned, boolean, finite, flat, members


def max_rl(
    reward: Float[np.ndarray, " rollout"], group: Int[np.ndarray, " rollout"], counted: Bool[np.ndarray, " rollout"]
) -> Float64[np.ndarray, " rollout"]:
    """Centred reward over the mean reward: the gradient of the log-likelihood of success, as far as n samples see it.

        A_i = (r_i - mean) / mean          for rewards of at least 0

    For rewards of 0 and 1 the mean over i of A_i ∇log π is an unbiased estimate of the gradient of
    -Σ_{k<n} (1-p)^k / k, log p cut after n - 1 terms, where p is the chance of success. Hard tasks weigh more.

    Args:
      reward: outcome reward, at least 0; never read where `counted` is False.
      group: number of the group.
      counted: False for infrastructure failures and rollouts without a reward.

    Returns:
      The advantages, at most n - 1 in size.

    Raises:
      RecordError: a counted reward is negative or not finite, or the arrays differ in length.

    References:
      "Maximum Likelihood Reinforcement Learning", arXiv 2602.02710.

    Examples:
      >>> max_rl(np.array([1.0, 0.0, 0.0, 0.0]), np.zeros(4, int), np.ones(4, bool)).tolist()
      [3.0, -1.0, -1.0, -1.0]
    """
    aligned("max_rl", reward=reward, group=group, counted=counted)
    boolean("max_rl", counted=counted)
    out = np.zeros(len(reward), np.float64)
    for place in members(group, counted):
        values = finite("max_rl", reward[place])
        if min(values) < 0:
            raise RecordError(f"max_rl: rewards must be at least 0, got {values}. Shift them, or use leave_one_out.")
        if not flat(values):
            centre = math.fsum(values) / len(values)
            out[place] = [(value - centre) / centre for value in values]
    return out
