"""Members of groups, and the few sums that every estimator shares. NumPy only.

The mathematics is float64 and independent of order: sums are correctly rounded (`math.fsum`), and whether all rewards
are equal is asked before any mean is taken, because a mean of equal numbers need not be that number.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from harnessrl_jax.errors import RecordError

LARGEST_REWARD = 1e100
"""Squares of larger rewards overflow; nobody means them."""


def groups_within(*labels: Int[np.ndarray, " member"]) -> Int[np.ndarray, " member"]:
    """Equal labels in every array -> equal numbers: groups cut finer, so that only like is compared with like.

    The baseline of each harness is `leave_one_out(reward, groups_within(group, harness), counted)`; the baseline of
    each agent is the same over one member for each pair of a rollout and an agent that acted in it.

    Args:
      *labels: numbers of the group, the harness, the agent, ...: at least one array.

    Returns:
      The number of each member's group.

    Raises:
      RecordError: arrays of different lengths.

    Examples:
      >>> groups_within(np.array([7, 7, 7, 9]), np.array([0, 1, 0, 0])).tolist()
      [0, 1, 0, 2]
    """
    aligned("groups_within", **{f"label {place}": label for place, label in enumerate(labels)})
    _, number = np.unique(np.stack(labels), axis=1, return_inverse=True)
    return number.reshape(-1)


def members(group: Int[np.ndarray, " member"], counted: Bool[np.ndarray, " member"]) -> list[Int[np.ndarray, " m"]]:
    """Positions of the counted members of each group that has any, groups and members ascending.

    Examples:
      >>> [each.tolist() for each in members(np.array([5, 3, 5, 3]), np.array([True, True, True, False]))]
      [[1], [0, 2]]
    """
    places = np.flatnonzero(counted)
    _, number = np.unique(group[places], return_inverse=True)
    order = np.argsort(number, kind="stable")
    return np.split(places[order], np.flatnonzero(np.diff(number[order])) + 1) if len(places) else []


def finite(where: str, values: np.ndarray, name: str = "rewards") -> list[float]:
    """The values as Python floats; `name` is what errors call them.

    Raises:
      RecordError: one is not finite or beyond 1e100, or they are no numbers of at least 32 bits.
    """
    kind = values.dtype.kind
    if kind not in "fiub" or (kind == "f" and values.dtype.itemsize < 4):
        raise RecordError(
            f"{where}: {name} must be float32, float64 or integers, got {values.dtype}. In 16 bits 0.1 and 0.1003 are "
            f"one number: keep {name} in float32 or float64 until the loss."
        )
    out: list[float] = values.astype(np.float64).tolist()
    if not all(math.isfinite(value) for value in out):
        raise RecordError(f"{where}: {name} must be finite, got {out}. Do not count members that have none.")
    if any(abs(value) > LARGEST_REWARD for value in out):
        raise RecordError(f"{where}: {name} must lie within ±{LARGEST_REWARD:.0e}, got {out}. Scale them.")
    return out


def flat(values: Sequence[float]) -> bool:
    """Whether there is nothing to compare: fewer than two values, or all equal."""
    return len(values) < 2 or min(values) == max(values)


def mean(values: Sequence[float]) -> float:
    """The mean, exactly the common value where all are equal."""
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)


def standardised(values: Sequence[float], *, floor: float, unbiased: bool) -> list[float]:
    """(value - mean) / (std + floor); exactly 0 where there is nothing to compare.

    `unbiased` divides the squares by n - 1 instead of n. Then no value exceeds (n-1)/√n, else √(n-1).
    """
    if flat(values):
        return [0.0] * len(values)
    centre = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - unbiased))
    return [(value - centre) / (std + floor) for value in values]


def aligned(where: str, **arrays: Any) -> None:
    """Raises RecordError unless all arrays are flat and have one length."""
    shapes = {name: np.shape(array) for name, array in arrays.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        given = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise RecordError(f"{where}: wanted flat arrays of one length, got shapes {given}.")


def boolean(where: str, **masks: np.ndarray) -> None:
    """Raises RecordError unless all masks are of bool: an integer mask would be read as positions."""
    for name, mask in masks.items():
        if mask.dtype != np.bool_:
            raise RecordError(f"{where}: {name} must be an array of bool, got {mask.dtype}. Use {name}.astype(bool).")


def above_zero(where: str, name: str, value: float) -> None:
    """Raises RecordError unless the value is a finite number above 0."""
    if not (math.isfinite(value) and value > 0):
        raise RecordError(f"{where}: {name} must be a finite number above 0, got {value!r}.")


def fraction(where: str, name: str, value: float) -> None:
    """Raises RecordError unless the value lies in 0..1."""
    if not 0 <= value <= 1:
        raise RecordError(f"{where}: {name} must lie in 0..1, got {value!r}.")
