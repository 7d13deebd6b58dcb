"""A critic's values on a tree -> generalised advantages: what GAE is on a chain, where the chain forks. NumPy only."""

from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Float64, Int

from harnessrl_jax.errors import RecordError
from harnessrl_jax.trajectories.credit.groups import aligned, finite, fraction
from harnessrl_jax.trajectories.trees import ROOT


class TreeAdvantages(NamedTuple):
    """What `tree_gae` says of each node.

    Attributes:
      advantage: of the node.
      target: advantage + value: what the critic should have said.
    """

    advantage: Float64[np.ndarray, " node"]
    target: Float64[np.ndarray, " node"]


def tree_gae(
    parent: Int[np.ndarray, " node"],
    value: Float[np.ndarray, " node"],
    reward: Float[np.ndarray, " node"],
    *,
    gamma: float,
    lam: float,
    children: Literal["equal", "by_leaves"],
) -> TreeAdvantages:
    """Generalised advantage estimation on a tree.

        δ_t = r_t + γ mean_c V(c) - V(t)          A(t) = δ_t + γλ mean_c A(c)          over the children c of t

    The means are 0 at a leaf. On a chain this is GAE. With γ = λ = 1, V = 0 and rewards at the leaves, A(t) is the mean
    reward of the leaves below t: every leaf alike with "by_leaves", every child alike with "equal".

    Args:
      parent: parent of each node, `ROOT` (-1) at a root; before its children, as in `PrefixTree`.
      value: the critic's V, in units of reward.
      reward: reward that arrives at the node; the outcome at the leaves.
      gamma: discount of the next node, in 0..1.
      lam: decay of later errors, in 0..1.
      children: whether children weigh the same, or by the leaves below them.

    Returns:
      Advantages, and targets for the critic.

    Raises:
      RecordError: a value or reward is not finite, a parent does not stand before its child, the arrays differ in
        length, or gamma or lam is out of range.

    References:
      Schulman et al. 2015, arXiv 1506.02438; on trees as in ClawGym II, arXiv 2608.16798, whose formula is not
      published: the form is ours.

    Examples:
      >>> parent, reward = np.array([-1, 0, 1, 0]), np.array([0.0, 0.0, 1.0, 0.0])
      >>> tree_gae(parent, np.zeros(4), reward, gamma=1.0, lam=1.0, children="equal").advantage.tolist()
      [0.5, 1.0, 1.0, 0.0]
    """
    aligned("tree_gae", parent=parent, value=value, reward=reward)
    check_parents("tree_gae", parent)
    fraction("tree_gae", "gamma", gamma)
    fraction("tree_gae", "lam", lam)
    values, rewards = finite("tree_gae", value, "values"), finite("tree_gae", reward)
    size, parents = len(values), parent.tolist()
    share = [1] * size if children == "equal" else leaves_below(parent)
    next_value, next_advantage, weight = [0.0] * size, [0.0] * size, [0] * size
    advantage = [0.0] * size
    for node in range(size - 1, -1, -1):
        of_all = weight[node] or 1
        error = rewards[node] + gamma * next_value[node] / of_all - values[node]
        advantage[node] = error + gamma * lam * next_advantage[node] / of_all
        if (above := parents[node]) != ROOT:
            next_value[above] += share[node] * values[node]
            next_advantage[above] += share[node] * advantage[node]
            weight[above] += share[node]
    out = np.array(advantage, np.float64)
    return TreeAdvantages(advantage=out, target=out + np.array(values, np.float64))


def leaves_below(parent: Int[np.ndarray, " node"]) -> list[int]:
    """Number of leaves at or below each node; parents stand before their children.

    Examples:
      >>> leaves_below(np.array([-1, 0, 0, 2]))
      [2, 1, 1, 1]
    """
    parents = parent.tolist()
    count = [0] * len(parents)
    for node in range(len(parents) - 1, -1, -1):
        count[node] = count[node] or 1
        if parents[node] != ROOT:
            count[parents[node]] += count[node]
    return count


def check_parents(where: str, parent: Int[np.ndarray, " node"]) -> None:
    """Raises RecordError unless every parent is ROOT or stands before its child."""
    wrong = np.flatnonzero((parent < ROOT) | (parent >= np.arange(len(parent))))
    if len(wrong):
        raise RecordError(
            f"{where}: the parent of node {wrong[0]} must be -1 or a node before it, got {parent[wrong[0]]}. "
            "Number the nodes in depth-first order."
        )
