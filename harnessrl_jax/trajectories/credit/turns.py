"""Rewards of single turns -> an advantage that also credits what a good turn leads to. NumPy only."""

import numpy as np
from jaxtyping import Float, Float64, Int

from harnessrl_jax.errors import RecordError
from harnessrl_jax.trajectories.credit.groups import (
    above_zero,
    aligned,
    finite,
    fraction,
    groups_within,
    members,
    standardised,
)

WHERE = "turn_relative"


def turn_relative(
    reward: Float[np.ndarray, " turn"],
    group: Int[np.ndarray, " turn"],
    rollout: Int[np.ndarray, " turn"],
    turn: Int[np.ndarray, " turn"],
    *,
    gamma: float,
    future_weight: float,
    floor: float,
) -> Float64[np.ndarray, " turn"]:
    """Turn-aware relative advantage: how a turn compares with the same turn of others, and what it enables.

        A_local  = (r_{i,t} - mean_t) / (std_t + floor)          over the rollouts of the group that reach turn t
        V_{i,t}  = r_{i,t} Σ_{k>=0} γ^k r_{i,t+k+1}              the future counts only where the turn itself is right
        A_future = V standardised in the same way
        A        = A_local + λ A_future

    Both standardisations take the population deviation and are exactly 0 where fewer than two rollouts reach the turn
    or all are equal there.

    Args:
      reward: 1 if the turn made a call that was wanted there, else 0.
      group: number of the group.
      rollout: number of the rollout.
      turn: t, from 0, without gaps in a rollout.
      gamma: discount of later turns, in 0..1; 0.5 in the paper.
      future_weight: λ, at least 0; 0.5 in the paper.
      floor: added to the standard deviations, above 0.

    Returns:
      The advantages.

    Raises:
      RecordError: a reward is neither 0 nor 1, turns are missing or double, the arrays differ in length, or a number
        is out of its range.

    References:
      ToolVerse, arXiv 2607.15660. That the future is standardised at each turn is our reading.

    Examples:
      >>> reward, turn, rollout = np.array([1, 1, 1, 0]), np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1])
      >>> turn_relative(reward, np.zeros(4, int), rollout, turn, gamma=0.5, future_weight=0.5, floor=1e-9).round(6)
      array([ 0.5,  1. , -0.5, -1. ])
    """
    aligned(WHERE, reward=reward, group=group, rollout=rollout, turn=turn)
    fraction(WHERE, "gamma", gamma)
    above_zero(WHERE, "floor", floor)
    if not (np.isfinite(future_weight) and future_weight >= 0):
        raise RecordError(f"{WHERE}: future_weight must be a finite number of at least 0, got {future_weight!r}.")
    values = np.array(finite(WHERE, reward), np.float64)
    if not np.isin(values, (0.0, 1.0)).all():
        raise RecordError(f"{WHERE}: turn rewards must be 0 or 1, got {values.tolist()}.")
    future = values * _later(values, groups_within(group, rollout), turn, gamma)
    out = np.zeros(len(values), np.float64)
    for place in members(groups_within(group, turn), np.ones(len(values), np.bool_)):
        local = standardised(values[place].tolist(), floor=floor, unbiased=False)
        ahead = standardised(future[place].tolist(), floor=floor, unbiased=False)
        out[place] = [a + future_weight * b for a, b in zip(local, ahead, strict=True)]
    return out


def _later(
    values: Float64[np.ndarray, " turn"],
    rollout: Int[np.ndarray, " turn"],
    turn: Int[np.ndarray, " turn"],
    gamma: float,
) -> Float64[np.ndarray, " turn"]:
    """Discounted sum of the rewards after each turn of its rollout."""
    later = np.zeros(len(values), np.float64)
    for place in members(rollout, np.ones(len(values), np.bool_)):
        order = place[np.argsort(turn[place], kind="stable")]
        if turn[order].tolist() != list(range(len(order))):
            raise RecordError(f"{WHERE}: turns of a rollout must be 0, 1, ... once each, got {turn[order].tolist()}.")
        ahead = 0.0
        for at in order[::-1].tolist():
            later[at] = ahead
            ahead = float(values[at]) + gamma * ahead
    return later
