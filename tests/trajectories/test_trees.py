import itertools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from harnessrl_jax.errors import PackingError
from harnessrl_jax.trajectories import ROOT, ancestor, build, path
from harnessrl_jax.trajectories.trees import path_ranges

SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=8)


def tree_of(sequences):
    return build([np.array(sequence, np.int32) for sequence in sequences])


def test_worked_by_hand():
    # 5-6-7   leaf of the first, on the way to the second
    #     `-8
    # 9       a second root
    tree, leaf = tree_of([[5, 6], [5, 6, 8], [9], [5, 6, 7], [5, 6, 8], []])
    assert tree.token.tolist() == [5, 6, 7, 8, 9]
    assert tree.parent.tolist() == [ROOT, 0, 1, 1, ROOT]
    assert tree.depth.tolist() == [0, 1, 2, 2, 0]
    assert tree.subtree_end.tolist() == [4, 4, 3, 4, 5]
    assert leaf.tolist() == [1, 3, 4, 2, 3, ROOT]
    assert path(tree, 3).tolist() == [0, 1, 3]
    assert path(tree, ROOT).tolist() == []


def test_nothing_gives_an_empty_tree():
    for sequences in ([], [[]]):
        tree, leaf = tree_of(sequences)
        assert [len(field) for field in tree[:4]] == [0] * 4
        assert leaf.tolist() == [ROOT] * len(sequences)
        assert [field.dtype for field in (*tree[:4], leaf)] == [np.int32] * 5


@hypothesis.given(SEQUENCES)
def test_equals_a_dictionary_of_all_prefixes(sequences):
    tree, leaf = tree_of(sequences)
    prefixes = sorted({tuple(s[:stop]) for s in sequences for stop in range(1, len(s) + 1)})
    number = {prefix: place for place, prefix in enumerate(prefixes)} | {(): ROOT}
    assert tree.token.tolist() == [prefix[-1] for prefix in prefixes]
    assert tree.depth.tolist() == [len(prefix) - 1 for prefix in prefixes]
    assert tree.parent.tolist() == [number[prefix[:-1]] for prefix in prefixes]
    below = [sum(other[: len(prefix)] == prefix for other in prefixes) for prefix in prefixes]
    assert tree.subtree_end.tolist() == [place + size for place, size in enumerate(below)]
    assert leaf.tolist() == [number[tuple(s)] for s in sequences]


@hypothesis.given(SEQUENCES, st.randoms(use_true_random=False))
def test_order_of_the_sequences_does_not_matter(sequences, random):
    tree, leaf = tree_of(sequences)
    order = list(range(len(sequences)))
    random.shuffle(order)
    other, other_leaf = tree_of([sequences[place] for place in order])
    for field, other_field in zip(tree, other, strict=True):
        np.testing.assert_array_equal(field, other_field)
    np.testing.assert_array_equal(leaf[order], other_leaf)


@hypothesis.given(SEQUENCES)
def test_building_from_the_paths_of_a_tree_gives_the_tree(sequences):
    tree, leaf = tree_of(sequences)
    for sequence, end in zip(sequences, leaf.tolist(), strict=True):
        assert tree.token[path(tree, end)].tolist() == sequence
    tips = np.flatnonzero(tree.subtree_end == np.arange(len(tree.token)) + 1).tolist()
    again, _ = build([tree.token[path(tree, tip)] for tip in tips])
    for field, other in zip(tree, again, strict=True):
        np.testing.assert_array_equal(field, other)


@hypothesis.given(SEQUENCES, st.randoms(use_true_random=False))
def test_ranges_of_paths_are_parts_of_the_paths(sequences, random):
    tree, _ = tree_of(sequences)
    queries = []
    for node in range(len(tree.token)):
        high = random.randint(0, int(tree.depth[node]) + 1)
        queries.append((node, random.randint(0, high), high))
    random.shuffle(queries)
    want = [path(tree, node)[low:high].tolist() for node, low, high in queries]
    assert path_ranges(tree, *np.array(queries, int).reshape(-1, 3).T).tolist() == list(
        itertools.chain.from_iterable(want)
    )


@hypothesis.given(SEQUENCES, st.randoms(use_true_random=False))
def test_ancestors_are_the_nodes_of_the_path(sequences, random):
    tree, _ = tree_of(sequences)
    queries = [(node, depth) for node in range(len(tree.token)) for depth in range(-1, int(tree.depth[node]) + 1)]
    random.shuffle(queries)
    want = [([ROOT, *path(tree, node).tolist()])[depth + 1] for node, depth in queries]
    assert ancestor(tree, *np.array(queries, int).reshape(-1, 2).T).tolist() == want


@pytest.mark.parametrize(("leaf", "low", "high"), [(1, 0, 3), (ROOT, 0, 1), (1, -1, 1), (1, 2, 1)])
def test_a_range_that_is_not_on_the_path_is_refused(leaf, low, high):
    tree, _ = tree_of([[1, 2]])
    with pytest.raises(PackingError, match=r"not on the path to its leaf"):
        path_ranges(tree, *np.array([[leaf], [low], [high]]))


def test_a_node_outside_the_tree_is_refused():
    tree, _ = tree_of([[1, 2]])
    with pytest.raises(PackingError, match=r"node 2 is not in a tree of 2 nodes"):
        path(tree, 2)


@pytest.mark.parametrize(
    ("sequence", "fault"),
    [
        (np.array([2**31]), "int64"),
        (np.array([-1]), "int64"),
        (np.array([0.5]), "float64"),
        (np.array([3, -1], np.int32), "-1"),
    ],
)
def test_ids_that_are_none_are_refused(sequence, fault):
    with pytest.raises(PackingError, match=fault):
        build([np.array([1, 2], np.int32), sequence])


def test_large_ids_sort_as_numbers():
    tree, _ = tree_of([[2**31 - 1], [256], [1], [70000]])
    assert tree.token.tolist() == [1, 256, 70000, 2**31 - 1]
