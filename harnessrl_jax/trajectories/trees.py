"""Token sequences -> one prefix tree as flat arrays in depth-first order. NumPy only: runs where JAX is absent."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32, Int64

from harnessrl_jax.errors import PackingError

ROOT = -1


class PrefixTree(NamedTuple):
    """Token sequences that share prefixes, each shared token stored once.

    Nodes stand in depth-first order, siblings by ascending token: node j is an ancestor of node i, or i itself,
    exactly if `j <= i < subtree_end[j]`. Several roots are allowed (sequences that share nothing).

    Attributes:
      token: the token id of the node.
      parent: the node before it, `ROOT` (-1) at a root; always smaller than the node's own number.
      depth: number of ancestors; the position id of the token.
      subtree_end: one past the last node below this one.
    """

    token: Int32[np.ndarray, " node"]
    parent: Int32[np.ndarray, " node"]
    depth: Int32[np.ndarray, " node"]
    subtree_end: Int32[np.ndarray, " node"]


def build(sequences: Sequence[Int[np.ndarray, " token"]]) -> tuple[PrefixTree, Int32[np.ndarray, " seq"]]:
    """The prefix tree of some token sequences.

    Sorted sequences that share a prefix are neighbours, so the longest common prefix of each with the one before
    says which of its tokens are new; read in that order the new tokens are the tree in depth-first order.
    O(tokens) array work after one sort of the sequences, whatever their order.

    Args:
      sequences: token ids of each sequence, 0 <= id < 2**31; may be empty, may repeat.

    Returns:
      The tree, and for each sequence the node of its last token (`ROOT` if the sequence is empty).
    """
    length = np.array([len(s) for s in sequences], np.int64)
    keys: list[bytes] = [np.asarray(s, ">i4").tobytes() for s in sequences]  # big-endian, so that bytes sort like ids
    ranked = sorted(range(len(keys)), key=keys.__getitem__)
    order = np.array(ranked, np.int64)
    length = length[order]
    token = np.frombuffer(b"".join([keys[place] for place in ranked]), ">i4").astype(np.int32)
    shared = _shared_with_previous(token, length)
    position = offsets(length)
    new = position >= np.repeat(shared, length)
    depth = position[new].astype(np.int32)
    parent, subtree_end, last = _links(shared, length, len(depth))
    leaf = np.empty(len(keys), np.int32)
    leaf[order] = last
    return PrefixTree(token=token[new], parent=parent, depth=depth, subtree_end=subtree_end), leaf


def path(tree: PrefixTree, leaf: int) -> Int32[np.ndarray, " depth"]:
    """Nodes from the root down to `leaf`, both included; empty for `ROOT`."""
    if leaf == ROOT:
        return np.zeros(0, np.int32)
    if not 0 <= leaf < len(tree.token):
        raise PackingError(f"path: node {leaf} is not in a tree of {len(tree.token)} nodes. Give a leaf of this tree.")
    return np.flatnonzero(tree.subtree_end[: leaf + 1] > leaf).astype(np.int32)


def ancestor(
    tree: PrefixTree, node: Int[np.ndarray, " query"], depth: Int[np.ndarray, " query"]
) -> Int32[np.ndarray, " query"]:
    """For each pair the node at that depth on the path to `node`; `ROOT` for a negative depth.

    In depth-first order it is the last node up to `node` that has this depth, which one search in the nodes sorted
    by (depth, node) finds.

    Args:
      tree: any prefix tree.
      node: nodes of the tree.
      depth: at most the depth of the node.

    Returns:
      The ancestors.
    """
    size = len(tree.token)
    by_depth = np.argsort(tree.depth, kind="stable")
    key = tree.depth[by_depth].astype(np.int64) * size + by_depth
    found = np.searchsorted(key, np.asarray(depth, np.int64) * size + node, side="right") - 1
    return np.where(np.asarray(depth) < 0, ROOT, by_depth[np.maximum(found, 0)] if size else ROOT).astype(np.int32)


def offsets(size: Int[np.ndarray, " run"]) -> Int64[np.ndarray, " item"]:
    """0, 1, ... size-1 for each run, the runs one after the other."""
    return np.arange(int(size.sum()), dtype=np.int64) - np.repeat(np.cumsum(size) - size, size)


def _shared_with_previous(
    token: Int32[np.ndarray, " token"], length: Int[np.ndarray, " seq"]
) -> Int[np.ndarray, " seq"]:
    """Longest common prefix of each sequence with the one before it; the sequences lie one after the other."""
    before = np.concatenate([np.zeros(1, np.int64), length[:-1]])[: len(length)]
    most = np.minimum(length, before)
    start = np.cumsum(length) - length
    here = np.repeat(start, most) + offsets(most)
    differs = np.flatnonzero(token[here] != token[here - np.repeat(before, most)])
    first = np.cumsum(most) - most
    at = np.searchsorted(differs, first)
    found = np.append(differs, np.iinfo(np.int64).max)[at]
    return np.minimum(found - first, most)


def _links(
    shared: Int[np.ndarray, " seq"], length: Int[np.ndarray, " seq"], nodes: int
) -> tuple[Int32[np.ndarray, " node"], Int32[np.ndarray, " node"], Int32[np.ndarray, " seq"]]:
    """Parent and subtree end of every node, and the last node of every sequence, from the common prefixes.

    Each sequence adds one unbranched run of nodes. `open_runs` holds the runs on the path to the newest node as
    (first node, depth of the first node); a new run closes what lies below the depth where it starts.
    """
    parent = np.arange(-1, nodes - 1, dtype=np.int32)
    subtree_end = np.full(nodes, nodes, np.int32)
    last = np.full(len(length), ROOT, np.int32)
    open_runs: list[tuple[int, int]] = []
    node, tip, deep = 0, ROOT, 0
    for index, (start, stop) in enumerate(zip(shared.tolist(), length.tolist(), strict=True)):
        if stop > start:
            while open_runs and deep > start:
                first, depth = open_runs[-1]
                keep = max(start - depth, 0)
                subtree_end[first + keep : first + deep - depth] = node
                deep = max(depth, start)
                if keep == 0:
                    open_runs.pop()
            parent[node] = open_runs[-1][0] + start - 1 - open_runs[-1][1] if start else ROOT
            open_runs.append((node, start))
            node += stop - start
            tip, deep = node - 1, stop
        last[index] = tip if stop else ROOT
    return parent, subtree_end, last
