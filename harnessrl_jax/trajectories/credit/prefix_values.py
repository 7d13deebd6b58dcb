"""Outcomes of a group and its prefix tree -> values of prefixes, and advantages that jump at forks. NumPy only."""

import math

import numpy as np
from jaxtyping import Bool, Float, Float64, Int

from harnessrl_jax.errors import RecordError
from harnessrl_jax.trajectories.credit.groups import above_zero, aligned, boolean, finite, flat, mean
from harnessrl_jax.trajectories.trees import ROOT, PrefixTree


def prefix_values(
    tree: PrefixTree,
    leaf: Int[np.ndarray, " seq"],
    rollout: Int[np.ndarray, " seq"],
    reward: Float[np.ndarray, " rollout"],
    counted: Bool[np.ndarray, " rollout"],
) -> Float64[np.ndarray, " node"]:
    """V(s): mean outcome of the rollouts of a group that pass through the prefix s which ends at a node.

    A rollout counts once, however many of its sequences pass.

    Args:
      tree: the prefix tree of one group.
      leaf: last node of each sequence, as `trees.build` gives it.
      rollout: position of each sequence's rollout in `reward`.
      reward: outcome reward; never read where `counted` is False.
      counted: False for infrastructure failures and rollouts without a reward.

    Returns:
      The values; NaN where no counted rollout passes.

    Raises:
      RecordError: a counted reward is not finite, arrays that belong together differ in length, or a leaf or rollout
        that does not exist.

    References:
      TEMPO, arXiv 2509.18314.

    Examples:
      >>> from harnessrl_jax.trajectories import build
      >>> tree, leaf = build([np.array([1, 2]), np.array([1, 3]), np.array([4])])
      >>> prefix_values(tree, leaf, np.arange(3), np.array([1.0, 0.0, 1.0]), np.ones(3, bool)).tolist()
      [0.5, 1.0, 0.0, 1.0]
    """
    aligned("prefix_values", leaf=leaf, rollout=rollout)
    aligned("prefix_values", reward=reward, counted=counted)
    boolean("prefix_values", counted=counted)
    size, places = len(tree.token), np.flatnonzero(counted)
    if np.any((leaf < ROOT) | (leaf >= size)) or np.any((rollout < 0) | (rollout >= len(reward))):
        raise RecordError(
            f"prefix_values: leaves must be nodes of a tree of {size}, rollouts positions among {len(reward)} rewards."
        )
    outcome = finite("prefix_values", reward[places])
    if not outcome or not size:
        return np.full(size, math.nan)
    passes = np.array([_passed(tree, leaf[rollout == place]) for place in places], np.bool_)
    keys = np.ascontiguousarray(np.packbits(passes, axis=0).T)  # which rollouts pass a node, as bytes
    _, first, same = np.unique(keys.view(f"V{keys.shape[1]}").reshape(-1), return_index=True, return_inverse=True)
    who = [np.flatnonzero(passes[:, node]).tolist() for node in first.tolist()]
    value = [mean([outcome[i] for i in some]) if some else math.nan for some in who]
    return np.array(value, np.float64)[same.reshape(-1)]


def prefix_advantages(
    tree: PrefixTree,
    value: Float[np.ndarray, " node"],
    node: Int[np.ndarray, " token"],
    rollout: Int[np.ndarray, " token"],
    reward: Float[np.ndarray, " rollout"],
    counted: Bool[np.ndarray, " rollout"],
    *,
    floor: float,
) -> Float64[np.ndarray, " token"]:
    """Advantage of sampled tokens: GRPO's of the rollout, and what the token changed in the value of its prefix.

        A_{i,t} = (r_i - mean + V(s_{t+1}) - V(s_t)) / (std + floor)

    with the population deviation. The second difference is not 0 only where rollouts part, so off forks it is GRPO.
    The value before the first token of a tree is the mean of the group.

    Args:
      tree: the prefix tree of one group.
      value: of the prefix that ends at each node, from `prefix_values` or a critic.
      node: node of each sampled token.
      rollout: position of the token's rollout in `reward`.
      reward: outcome reward; never read where `counted` is False.
      counted: False for infrastructure failures and rollouts without a reward.
      floor: added to the standard deviation, above 0.

    Returns:
      The advantages; exactly 0 for rollouts that do not count, in a group of one and where all rewards are equal.

    Raises:
      RecordError: a counted reward or a value that is needed is not finite, arrays that belong together differ in
        length, a node or rollout that does not exist, or the floor is not above 0.

    References:
      TEMPO, arXiv 2509.18314.

    Examples:
      >>> from harnessrl_jax.trajectories import build
      >>> tree, leaf = build([np.array([1, 2]), np.array([1, 3]), np.array([4])])
      >>> reward, counted, rollout = np.array([1.0, 0.0, 1.0]), np.ones(3, bool), np.arange(3)
      >>> value = prefix_values(tree, leaf, rollout, reward, counted)
      >>> prefix_advantages(tree, value, leaf, rollout, reward, counted, floor=1e-9).round(3).tolist()
      [1.768, -2.475, 1.414]
    """
    aligned("prefix_advantages", node=node, rollout=rollout)
    aligned("prefix_advantages", reward=reward, counted=counted)
    boolean("prefix_advantages", counted=counted)
    aligned("prefix_advantages", value=value, tree=tree.token)
    above_zero("prefix_advantages", "floor", floor)
    if np.any((node < 0) | (node >= len(value))) or np.any((rollout < 0) | (rollout >= len(reward))):
        raise RecordError(
            f"prefix_advantages: nodes must lie in a tree of {len(value)}, rollouts among {len(reward)} rewards."
        )
    outcome = finite("prefix_advantages", reward[counted])
    out = np.zeros(len(node), np.float64)
    if flat(outcome):
        return out
    centre = mean(outcome)
    std = math.sqrt(math.fsum((r - centre) ** 2 for r in outcome) / len(outcome))
    used = counted[rollout]
    own, parent = node[used], tree.parent[node[used]]
    before = np.where(parent == ROOT, centre, value[np.maximum(parent, 0)])
    change = value[own] - before
    if not np.isfinite(change).all():
        raise RecordError("prefix_advantages: a token has no value. Give the leaf of every sequence to prefix_values.")
    out[used] = (reward[rollout[used]].astype(np.float64) - centre + change) / (std + floor)
    return out


def _passed(tree: PrefixTree, leaf: Int[np.ndarray, " seq"]) -> Bool[np.ndarray, " node"]:
    """Nodes on the path to any of the leaves: those with a leaf in the range of nodes below them."""
    ends = np.zeros(len(tree.token) + 1, np.int64)
    ends[leaf[leaf != ROOT] + 1] = 1
    total = np.cumsum(ends)
    return total[tree.subtree_end] > total[: len(tree.token)]
