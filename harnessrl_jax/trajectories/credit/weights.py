"""Who each target belongs to -> its weight in the loss, and what the weighted sum is divided by. NumPy only.

Weights are taken over a whole step, before anything is cut into rows, micro-batches or devices: sums travel, and there
is one division at the end. So a rollout weighs the same however it is cut.
"""

from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float32, Int

from harnessrl_jax.errors import RecordError
from harnessrl_jax.trajectories.credit.groups import above_zero

LossMean = Literal["rollout", "token", "call", "prompt"]


class LossWeights(NamedTuple):
    """The loss is Σ weight · value / denominator.

    Attributes:
      weight: of each target, above 0.
      denominator: a number of the whole step; shares of a step add up.
    """

    weight: Float32[np.ndarray, " target"]
    denominator: float


def loss_weights(
    rollout: Int[np.ndarray, " target"],
    mode: LossMean,
    *,
    call: Int[np.ndarray, " target"] | None = None,
    prompt: Int[np.ndarray, " target"] | None = None,
) -> Float32[np.ndarray, " target"]:
    """Loss weight of each target; the loss divides by their global sum.

    "rollout": 1 / (targets of the rollout), so each rollout weighs 1 however many calls or rows it has, and the sum of
    weights is the number of rollouts. "token": 1, so each token weighs the same. "call": 1 / (targets of the call), so
    each sampled sequence weighs the same (`seq-mean-token-mean` of trainers whose sequence is a call). "prompt":
    1 / (targets of the prompt's rollouts together), so each task weighs the same.

    Args:
      rollout: number of the rollout of each target; all targets of a rollout must be given together.
      mode: the unit of the mean.
      call: number of the call, wanted by "call".
      prompt: number of the group, wanted by "prompt"; all targets of a group must be given together.

    Returns:
      The weights, above 0.

    Raises:
      RecordError: the mode is unknown, or the numbers it wants are missing or of another length.

    References:
      "rollout": Agent Lightning v1, arXiv 2608.17528, "per rollout mean". "token": DAPO, arXiv 2503.14476.

    Examples:
      >>> loss_weights(np.array([0, 0, 0, 0, 1]), "rollout").tolist()
      [0.25, 0.25, 0.25, 0.25, 1.0]
    """
    if mode == "token":
        return np.ones(len(rollout), np.float32)
    units = {"rollout": rollout, "call": call, "prompt": prompt}
    if mode not in units:
        raise RecordError(f"loss_weights: unknown mode {mode!r}. Known modes: rollout, token, call, prompt.")
    unit = units[mode]
    if unit is None or len(unit) != len(rollout):
        given = "none" if unit is None else f"{len(unit)} for {len(rollout)} targets"
        raise RecordError(f"loss_weights: mode {mode!r} wants the {mode} of every target, got {given}.")
    _, place, size = np.unique(unit, return_inverse=True, return_counts=True)
    return (1.0 / size[place.reshape(-1)]).astype(np.float32)


def sequence_sum(sequence: Int[np.ndarray, " target"], *, length: float) -> LossWeights:
    """Sum over the tokens of a sequence, mean over sequences, so that longer sequences weigh more.

        L = 1/S Σ_s 1/length Σ_{t in s} l_t

    With length 1 it is `seq-mean-token-sum`, as RLOO takes a whole sequence for one action. With the largest length
    allowed it is Dr.GRPO's: one constant for all, so that the gradient has no length bias.

    Args:
      sequence: number of the sequence of each target, a call or a rollout.
      length: the constant, above 0, in tokens.

    Returns:
      Weights 1 / length, and S as the denominator: their sum is not the denominator.

    Raises:
      RecordError: the length is not above 0.

    References:
      Liu et al. 2025, arXiv 2503.20783 (Dr.GRPO); Ahmadian et al. 2024, arXiv 2402.14740 (RLOO).

    Examples:
      >>> sequence_sum(np.array([0, 0, 1]), length=4)
      LossWeights(weight=array([0.25, 0.25, 0.25], dtype=float32), denominator=2.0)
    """
    above_zero("sequence_sum", "length", length)
    return LossWeights(np.full(len(sequence), 1.0 / length, np.float32), float(len(np.unique(sequence))))
