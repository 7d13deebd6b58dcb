"""Information that steps gained -> credit for choosing well and for making later gains possible. NumPy only."""

import math

import numpy as np
from jaxtyping import Bool, Float, Float64, Int

from harnessrl_jax.errors import RecordError
from harnessrl_jax.trajectories.credit.groups import above_zero, aligned, boolean, finite, fraction, mean, members


def frontier_credit(
    gain: Float[np.ndarray, " step"],
    informative: Bool[np.ndarray, " step"],
    other_gain: Float[np.ndarray, " other"],
    other_step: Int[np.ndarray, " other"],
    *,
    dead_zone: float,
) -> Float64[np.ndarray, " step"]:
    """What a step gained against what the other actions open to it would have gained.

        r_fr = IG(taken) - mean IG(other actions on the frontier)          0 if |r_fr| < dead zone

    Args:
      gain: information gain of the action taken: how much its result raises the scorer's log-probability of the
        answer, nats; never read where `informative` is False.
      informative: False for actions that bring no information, such as answering; their credit is 0.
      other_gain: gain of an action that was open and not taken, nats.
      other_step: the step it was open to.
      dead_zone: at least 0; 1e-4 in the code.

    Returns:
      The credit; exactly 0 at a step without another open action, and where all gains are equal.

    Raises:
      RecordError: a gain is not finite, a step that does not exist, a negative dead zone, or lengths that differ.

    References:
      Harness-G (SNC), arXiv 2607.27652, and its code.

    Examples:
      >>> gain, informative = np.array([0.5, 0.0]), np.array([True, False])
      >>> frontier_credit(gain, informative, np.array([0.25, 0.25]), np.array([0, 0]), dead_zone=1e-4).tolist()
      [0.25, 0.0]
    """
    aligned("frontier_credit", gain=gain, informative=informative)
    boolean("frontier_credit", informative=informative)
    aligned("frontier_credit", other_gain=other_gain, other_step=other_step)
    if not (math.isfinite(dead_zone) and dead_zone >= 0):
        raise RecordError(f"frontier_credit: dead_zone must be a finite number of at least 0, got {dead_zone!r}.")
    if np.any((other_step < 0) | (other_step >= len(gain))):
        raise RecordError(f"frontier_credit: other_step must name one of {len(gain)} steps, got {other_step.tolist()}.")
    taken = np.zeros(len(gain), np.float64)
    taken[informative] = finite("frontier_credit", gain[informative], "gains")
    out = np.zeros(len(gain), np.float64)
    for place in members(other_step, informative[other_step]):
        step = int(other_step[place[0]])
        credit = float(taken[step]) - mean(finite("frontier_credit", other_gain[place], "gains"))
        out[step] = credit if abs(credit) >= dead_zone else 0.0
    return out


def enabling_credit(
    gain: Float[np.ndarray, " step"],
    source: Int[np.ndarray, " edge"],
    user: Int[np.ndarray, " edge"],
    *,
    gamma: float,
) -> Float64[np.ndarray, " step"]:
    """What later steps gained with evidence that a step produced, passed back from the last step to the first.

        r_en[p] = Σ_{u uses p} (IG_u + γ r_en[u]) / |sources of u|

    Args:
      gain: information gain of the action taken, nats; 0 for actions that bring none.
      source: the latest step that produced the evidence, before its user.
      user: the step that used it. A pair is given once.
      gamma: discount of gains that are further away, in 0..1; 1 in the code.

    Returns:
      The credit; 0 for steps whose evidence nobody used.

    Raises:
      RecordError: a gain is not finite, a source does not stand before its user, a pair is given twice, gamma is out
        of range, or the lengths differ.

    References:
      Harness-G (SNC), arXiv 2607.27652, and its code.

    Examples:
      >>> enabling_credit(np.array([0.0, 1.0, 2.0]), np.array([0, 0, 1]), np.array([1, 2, 2]), gamma=1.0).tolist()
      [3.0, 1.0, 0.0]
    """
    aligned("enabling_credit", source=source, user=user)
    aligned("enabling_credit", gain=gain)
    fraction("enabling_credit", "gamma", gamma)
    edges = sorted(zip(user.tolist(), source.tolist(), strict=True), reverse=True)
    if any(not 0 <= before < after < len(gain) for after, before in edges) or len(set(edges)) < len(edges):
        raise RecordError(
            f"enabling_credit: each edge must go once from a step to a later one of {len(gain)}, got "
            f"{[(before, after) for after, before in edges]}."
        )
    gains = finite("enabling_credit", gain, "gains")
    sources = np.bincount(user, minlength=len(gain)).tolist()
    out = [0.0] * len(gain)
    for after, before in edges:  # the last user first: all that it enabled is known
        out[before] += (gains[after] + gamma * out[after]) / sources[after]
    return np.array(out, np.float64)


def scaled_credit(
    credit: Float[np.ndarray, " step"], *, weight: float, std_floor: float, clip: float
) -> Float64[np.ndarray, " step"]:
    """The credit of a batch's steps in units of its spread, ready to be added to an outcome advantage.

        A = A_outcome + weight · clip(credit / max(std, floor), ±clip)

    The population deviation is taken over the whole batch and no mean is subtracted: credit of 0 stays 0, and the sign
    stays.

    Args:
      credit: `frontier_credit` + `enabling_credit` of all steps of a batch.
      weight: at most this much a unit of spread, above 0; 0.2 in the code.
      std_floor: least deviation, above 0; 5e-4 in the code.
      clip: most units of spread, above 0; 5 in the code.

    Returns:
      What is added to each step's advantage.

    Raises:
      RecordError: a credit is not finite, or a number is not above 0.

    References:
      Harness-G (SNC), arXiv 2607.27652, and its code.

    Examples:
      >>> scaled_credit(np.array([3.0, 1.0]), weight=0.5, std_floor=1e-3, clip=2.0).tolist()
      [1.0, 0.5]
    """
    for name, value in (("weight", weight), ("std_floor", std_floor), ("clip", clip)):
        above_zero("scaled_credit", name, value)
    aligned("scaled_credit", credit=credit)
    values = finite("scaled_credit", credit, "credit")
    if not values:
        return np.zeros(0, np.float64)
    centre = mean(values)
    std = math.sqrt(math.fsum((value - centre) ** 2 for value in values) / len(values))
    return weight * np.clip(np.array(values, np.float64) / max(std, std_floor), -clip, clip)
