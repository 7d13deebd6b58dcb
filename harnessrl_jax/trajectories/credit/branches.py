"""Returns of forked rollouts -> advantages among siblings that share everything before the fork. NumPy only."""

import math

import numpy as np
from jaxtyping import Bool, Float, Float64, Int

from harnessrl_jax.errors import RecordError
from harnessrl_jax.trajectories.credit.groups import aligned, boolean, finite, flat, fraction, mean
from harnessrl_jax.trajectories.credit.tree_values import check_parents
from harnessrl_jax.trajectories.trees import ROOT


def branch_advantages(
    parent: Int[np.ndarray, " action"],
    branch: Int[np.ndarray, " action"],
    reward: Float[np.ndarray, " action"],
    counted: Bool[np.ndarray, " action"],
    *,
    decay: float,
) -> Float64[np.ndarray, " action"]:
    """Advantage of each action of a tree of forked rollouts.

        R(n) = mean return of the counted leaves at or below n
        a(n) = R(n) - mean_{m ≠ n} R(m) over the siblings of n, 0 without one
        A(n) = a(nearest fork at or above n) + Σ_{d>=1} decay^d a(action of the same branch d steps further down)

    The siblings of a fork share all that happened before it, so their mean is a baseline that knows the prefix, and an
    action after the fork takes the advantage of its side. What flows back to the prefix is the advantage of the
    branch the prefix was sampled in, since the advantages of all siblings together are 0: on average it adds nothing,
    whatever the decay. With decay 0 actions before the first fork have advantage 0.

    Args:
      parent: action before each action, `ROOT` (-1) at the first; parents before children. Several first actions are
        siblings.
      branch: number of the rollout that sampled the action. A fork begins a branch of its own; its prefix keeps the
        number of the rollout that was forked.
      reward: return of the rollout at its last action, the leaf; read nowhere else.
      counted: False at the leaves of infrastructure failures, which are then in no mean.
      decay: λ, in 0..1; 0.95 in the re-implementation.

    Returns:
      The advantages; exactly 0 for actions without a counted leaf at or below them, which are nobody's sibling.

    Raises:
      RecordError: a counted return is not finite, a parent does not stand before its child, two children go on with
        their parent's branch, the arrays differ in length, or the decay is out of range.

    References:
      BPO, arXiv 2607.14171. Only its abstract was seen; how credit flows upstream is our reading.

    Examples:
      >>> parent, branch = np.array([-1, 0, 0]), np.array([0, 0, 1])  # one action, then a fork
      >>> reward, counted = np.array([math.nan, 1.0, 0.0]), np.ones(3, bool)
      >>> branch_advantages(parent, branch, reward, counted, decay=0.5).tolist()
      [0.5, 1.0, -1.0]
    """
    aligned("branch_advantages", parent=parent, branch=branch, reward=reward, counted=counted)
    boolean("branch_advantages", counted=counted)
    check_parents("branch_advantages", parent)
    fraction("branch_advantages", "decay", decay)
    size = len(parent)
    parents: list[int] = parent.tolist()
    children: list[list[int]] = [[] for _ in range(size + 1)]
    for node, above in enumerate(parents):
        children[above].append(node)  # the first actions stand at the end of the list
    returns = _mean_returns(children, reward, counted)
    local, forked = _local(children, returns)
    own, upstream = [0.0] * size, [0.0] * size
    for node, above in enumerate(parents):
        if returns[node] is not None:
            own[node] = local[node] if forked[node] or above == ROOT else own[above]
    for node in range(size - 1, -1, -1):
        goes_on = [child for child in children[node] if branch[child] == branch[node]]
        if len(goes_on) > 1:
            raise RecordError(
                f"branch_advantages: actions {goes_on} both follow action {node} in branch {branch[node]}. Give every "
                "fork a branch number of its own."
            )
        upstream[node] = sum(decay * (local[child] + upstream[child]) for child in goes_on)
    return np.array(own, np.float64) + np.array(upstream, np.float64)


def _mean_returns(
    children: list[list[int]], reward: Float[np.ndarray, " action"], counted: Bool[np.ndarray, " action"]
) -> list[float | None]:
    """Mean return of the counted leaves at or below each action; None without one."""
    size = len(children) - 1
    leaf = np.array([not below for below in children[:size]], np.bool_) & counted
    returns = dict(
        zip(np.flatnonzero(leaf).tolist(), finite("branch_advantages", reward[leaf], "returns"), strict=True)
    )
    below: list[list[float]] = [[] for _ in range(size)]
    for node in range(size - 1, -1, -1):
        if node in returns:
            below[node] = [returns[node]]
        elif len(children[node]) == 1:  # along a run of actions the same list
            below[node] = below[children[node][0]]
        else:
            below[node] = [value for child in children[node] for value in below[child]]
    return [mean(values) if values else None for values in below]


def _local(children: list[list[int]], returns: list[float | None]) -> tuple[list[float], list[bool]]:
    """a(n) of each action, and whether it has a sibling to be compared with."""
    local, forked = [0.0] * len(returns), [False] * len(returns)
    for siblings in children:
        known = [(node, value) for node in siblings if (value := returns[node]) is not None]
        values = [value for _, value in known]
        for node, value in known if len(known) > 1 else ():
            others = (math.fsum(values) - value) / (len(values) - 1)
            local[node], forked[node] = (0.0 if flat(values) else value - others), True
    return local, forked
