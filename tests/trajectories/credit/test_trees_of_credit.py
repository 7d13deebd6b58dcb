import itertools
import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from harnessrl_jax.errors import RecordError
from harnessrl_jax.trajectories import build, path
from harnessrl_jax.trajectories.credit import (
    branch_advantages,
    group_std,
    prefix_advantages,
    prefix_values,
    tree_gae,
)


def forked(sequences, rollout, reward, counted=None, floor=1e-12, dtype=np.float64):
    """Values by prefix, and advantages of each sequence's tokens."""
    tree, leaf = build([np.array(s) for s in sequences])
    rollout, reward = np.array(rollout), np.array(reward, dtype)
    counted = np.ones(len(reward), bool) if counted is None else np.array(counted)
    value = prefix_values(tree, leaf, rollout, reward, counted)
    nodes = [path(tree, end) for end in leaf.tolist()]
    advantages = [
        prefix_advantages(tree, value, node, np.full(len(node), own), reward, counted, floor=floor)
        for node, own in zip(nodes, rollout.tolist(), strict=True)
    ]
    prefixes = {tuple(tree.token[path(tree, node)].tolist()): value[node] for node in range(len(value))}
    return prefixes, advantages


def test_tempo_s_example():
    # A = 1 and B = 0 share prefix 1, C = D = 1 share prefix 2: mean 0.75, std 0.4330.
    prefixes, (a, b, c, d) = forked([[1, 3], [1, 4], [2, 5], [2, 6]], range(4), [1, 0, 1, 1])
    assert prefixes == {(1,): 0.5, (1, 3): 1, (1, 4): 0, (2,): 1, (2, 5): 1, (2, 6): 1}
    np.testing.assert_allclose(a, [0, 1.732], atol=5e-4)
    np.testing.assert_allclose(b, [-2.309, -2.887], atol=5e-4)
    np.testing.assert_allclose(c, [1.155, 0.577], atol=5e-4)
    np.testing.assert_array_equal(c, d)


def test_away_from_forks_prefix_advantages_are_grpo():
    reward = np.array([0.1, 0.5, 0.9, 0.2])
    _, advantages = forked([[7, 7, n, 1, 2] for n in range(4)], range(4), reward, floor=1e-6)
    want = group_std(reward, np.zeros(4, int), np.ones(4, bool), floor=1e-6, unbiased=False)
    for own, grpo, r in zip(advantages, want, reward, strict=True):
        assert own[0] == own[1] == own[3] == own[4] == pytest.approx(grpo, rel=1e-14)
        assert own[2] == pytest.approx(grpo + (r - reward.mean()) / (reward.std() + 1e-6))


def test_a_rollout_counts_once_in_a_prefix_however_many_calls_pass():
    prefixes, _ = forked([[1, 2], [1, 3], [1, 4], [1, 5]], [0, 0, 0, 1], [1, 0])
    assert prefixes[1,] == 0.5


def test_failed_rollouts_are_in_no_value_and_have_no_advantage():
    with_failure = forked([[1, 2], [1, 3], [1, 2, 4]], range(3), [1, 0, math.nan], counted=[True, True, False])
    without = forked([[1, 2], [1, 3]], range(2), [1, 0])
    assert math.isnan(with_failure[0].pop((1, 2, 4)))
    assert with_failure[0] == without[0]
    assert with_failure[1][2].tolist() == [0, 0, 0]
    np.testing.assert_array_equal(with_failure[1][0], without[1][0])


def test_prefixes_without_a_signal_give_exactly_zero():
    for dtype in (np.float32, np.float64):
        sequences = [[1, n // 3, n] for n in range(7)]
        prefixes, advantages = forked(sequences, range(7), [0.7] * 7, dtype=dtype)
        assert set(prefixes.values()) == {float(dtype(0.7))}
        assert all(not own.any() for own in advantages)
    assert forked([[1, 2]], [0], [1])[1][0].tolist() == [0, 0]
    assert forked([[1, 2]], [0], [math.nan], counted=[False])[1][0].tolist() == [0, 0]
    tree, leaf = build([np.array([1]), np.array([2])])
    critic, rollout, counted = np.array([0.3, 0.9]), np.arange(2), np.ones(2, bool)
    assert prefix_advantages(tree, critic, leaf, rollout, np.array([0.7, 0.7]), counted, floor=1e-6).tolist() == [0, 0]
    assert forked([], [], [])[1] == []


def test_prefix_arrays_that_do_not_fit_are_refused():
    tree, leaf = build([np.array([1, 2]), np.array([1, 3])])
    rollout, reward, counted = np.arange(2), np.array([1.0, 0.0]), np.ones(2, bool)
    with pytest.raises(RecordError, match=r"prefix_values: rewards must be finite"):
        prefix_values(tree, leaf, rollout, reward * math.nan, counted)
    with pytest.raises(RecordError, match=r"leaves must be nodes of a tree of 3"):
        prefix_values(tree, leaf + 5, rollout, reward, counted)
    value = prefix_values(tree, leaf[:1], rollout[:1], reward, counted)
    with pytest.raises(RecordError, match=r"a token has no value\. Give the leaf of every sequence"):
        prefix_advantages(tree, value, leaf, rollout, reward, counted, floor=1e-6)
    with pytest.raises(RecordError, match=r"floor must be a finite number above 0"):
        prefix_advantages(tree, value, leaf, rollout, reward, counted, floor=0.0)


def gae(value, reward, gamma, lam):
    """Plain GAE by its definition: a sum of discounted errors."""
    after = [*value[1:], 0.0]
    errors = [r + gamma * n - v for r, n, v in zip(reward, after, value, strict=True)]
    return [sum((gamma * lam) ** k * e for k, e in enumerate(errors[t:])) for t in range(len(value))]


@hypothesis.given(st.data())
def test_on_a_chain_tree_gae_is_gae(data):
    size = data.draw(st.integers(1, 8))
    numbers = st.lists(st.floats(-2, 2), min_size=size, max_size=size)
    value, reward = data.draw(numbers), data.draw(numbers)
    gamma, lam = data.draw(st.floats(0, 1)), data.draw(st.floats(0, 1))
    for children in ("equal", "by_leaves"):
        got = tree_gae(np.arange(size) - 1, np.array(value), np.array(reward), gamma=gamma, lam=lam, children=children)
        np.testing.assert_allclose(got.advantage, gae(value, reward, gamma, lam), atol=1e-12)
        np.testing.assert_allclose(got.target, got.advantage + value, atol=1e-12)


@hypothesis.given(st.lists(st.integers(-1, 20), min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_without_a_critic_it_is_the_mean_of_the_leaves_below(parents, random):
    parent = np.array([min(p, i - 1) for i, p in enumerate(parents)])
    leaf = [i not in parent for i in range(len(parent))]
    reward = np.array([random.random() if end else 0.0 for end in leaf])
    above = [{i} for i in range(len(parent))]  # each node with its ancestors
    for i, p in enumerate(parent.tolist()):
        above[i] |= above[p] if p >= 0 else set()
    zeros = np.zeros(len(parent))
    got = tree_gae(parent, zeros, reward, gamma=1.0, lam=1.0, children="by_leaves").advantage
    for node in range(len(parent)):
        below = [reward[i] for i in range(len(parent)) if leaf[i] and node in above[i]]
        assert got[node] == pytest.approx(sum(below) / len(below))


def test_children_weigh_the_same_or_by_their_leaves():
    # A root over a leaf of reward 1 and a child with two leaves of reward 0.
    parent, reward = np.array([-1, 0, 0, 2, 2]), np.array([0.0, 1, 0, 0, 0])
    equal = tree_gae(parent, np.zeros(5), reward, gamma=1.0, lam=1.0, children="equal")
    leaves = tree_gae(parent, np.zeros(5), reward, gamma=1.0, lam=1.0, children="by_leaves")
    assert (equal.advantage[0], leaves.advantage[0]) == (1 / 2, pytest.approx(1 / 3))


def test_tree_gae_worked_by_hand():
    # γ = 0.5, λ = 0.5. Leaves: 1 - 0.4 and 0 - 0.2. Root: 0.5 * mean(0.4, 0.2) - 0.3, then 0.25 * mean(0.6, -0.2).
    got = tree_gae(
        np.array([-1, 0, 0]), np.array([0.3, 0.4, 0.2]), np.array([0.0, 1, 0]), gamma=0.5, lam=0.5, children="equal"
    )
    np.testing.assert_allclose(got.advantage, [-0.15 + 0.05, 0.6, -0.2])
    np.testing.assert_allclose(got.target, [0.2, 1, 0])


def test_trees_that_are_none_are_refused():
    options = {"gamma": 1.0, "lam": 1.0, "children": "equal"}
    with pytest.raises(RecordError, match=r"the parent of node 1 must be -1 or a node before it, got 1"):
        tree_gae(np.array([-1, 1]), np.zeros(2), np.zeros(2), **options)
    with pytest.raises(RecordError, match=r"tree_gae: values must be finite"):
        tree_gae(np.array([-1]), np.array([math.nan]), np.zeros(1), **options)
    with pytest.raises(RecordError, match=r"tree_gae: rewards must be finite"):
        tree_gae(np.array([-1]), np.zeros(1), np.array([math.inf]), **options)
    with pytest.raises(RecordError, match=r"lam must lie in 0\.\.1, got 2"):
        tree_gae(np.array([-1]), np.zeros(1), np.zeros(1), **(options | {"lam": 2}))
    with pytest.raises(RecordError, match=r"wanted flat arrays of one length"):
        tree_gae(np.array([-1]), np.zeros(1), np.zeros(2), **options)


NAN = math.nan


def branches(parent, branch, reward, counted=None, decay=0.5):
    counted = np.ones(len(parent), bool) if counted is None else np.array(counted)
    return branch_advantages(np.array(parent), np.array(branch), np.array(reward), counted, decay=decay)


def test_siblings_worked_by_hand():
    # Two actions, then a fork of three (1, 0, 0.5), one of which takes two actions: 1 - 0.25, 0 - 0.75, 0.5 - 0.5.
    got = branches([-1, 0, 1, 2, 1, 1], [0, 0, 0, 0, 1, 2], [NAN, NAN, NAN, 1, 0, 0.5])
    np.testing.assert_allclose(got, [0.25 * 0.75, 0.5 * 0.75, 0.75, 0.75, -0.75, 0])


def test_decay_zero_trains_only_what_follows_a_fork():
    got = branches([-1, 0, 1, 1], [0, 0, 0, 1], [NAN, NAN, 1, 0], decay=0.0)
    assert got.tolist() == [0, 0, 1, -1]


def test_a_fork_below_a_fork():
    # Fork at the root: 4 against the mean (2 + 0) / 2 = 1 of the other side, whose own fork gives ±2.
    got = branches([-1, -1, 1, 1], [0, 1, 1, 2], [4, NAN, 2, 0], decay=0.5)
    assert got.tolist() == [3, -3 + 0.5 * 2, 2, -2]


def test_failed_branches_are_no_siblings():
    got = branches([-1, 0, 0, 0], [0, 0, 1, 2], [NAN, 1, 0, NAN], counted=[True, True, True, False])
    assert got.tolist() == [0.5, 1, -1, 0]
    # The fork is none once all but one of its sides failed: what is left belongs to the fork above.
    got = branches([-1, -1, 1, 1], [0, 1, 1, 2], [1, NAN, 0, NAN], counted=[True, True, True, False])
    assert got.tolist() == [1, -1, -1, 0]


def test_branches_without_a_signal_give_exactly_zero():
    assert branches([-1, *[0] * 7], [0, *range(7)], np.float32([NAN, *[0.7] * 7])).tolist() == [0] * 8
    assert branches([-1, 0], [0, 0], [NAN, 1]).tolist() == [0, 0]
    assert branches([-1], [0], [NAN], counted=[False]).tolist() == [0]


def test_branches_that_make_no_sense_are_refused():
    with pytest.raises(RecordError, match=r"branch_advantages: returns must be finite"):
        branches([-1, 0, 0], [0, 0, 1], [0, 1, NAN])
    with pytest.raises(RecordError, match=r"actions \[1, 2\] both follow action 0 in branch 0.*number of its own"):
        branches([-1, 0, 0], [0, 0, 0], [NAN, 1, 0])
    with pytest.raises(RecordError, match=r"decay must lie in 0\.\.1, got -0\.5"):
        branches([-1], [0], [1], decay=-0.5)


def test_siblings_give_the_gradient_of_what_follows_and_add_nothing_on_average_upstream():
    """All outcomes of one binary action and three forks of a second: chances 0.3, then 0.6 or 0.2."""
    reward = {(0, 0): 0.2, (0, 1): 1.0, (1, 0): 0.7, (1, 1): 0.1}
    first, second = 0.3, {0: 0.6, 1: 0.2}
    after, before = 0.0, 0.0
    for a, *forks in itertools.product([0, 1], repeat=4):
        chance = first if a else 1 - first
        for b in forks:
            chance *= second[a] if b else 1 - second[a]
        got = branches([-1, 0, 0, 0], [0, 0, 1, 2], [NAN, *(reward[a, b] for b in forks)], decay=0.95)
        score = [1 / second[a] if b else -1 / (1 - second[a]) for b in forks]
        after += chance * np.mean(got[1:] * score) if a == 0 else 0.0
        before += chance * got[0] * (1 / first if a else -1 / (1 - first))
    # d/dp of (1 - 0.3) (p * 1.0 + (1 - p) * 0.2)
    assert after == pytest.approx(0.7 * 0.8)
    assert before == pytest.approx(0, abs=1e-12)
