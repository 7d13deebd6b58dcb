"""Token sequences -> one prefix tree as flat arrays in depth-first order. NumPy only: runs where JAX is absent."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32, UInt8

from harnessrl_jax.errors import PackingError

ROOT = -1

# Ids in the byte order in which bytes sort like ids.
BIG_ENDIAN = np.dtype(">i4")


class PrefixTree(NamedTuple):
    """Token sequences that share prefixes, each shared token stored once.

    Nodes stand in depth-first order, siblings by ascending token: node j is an ancestor of node i, or i itself,
    exactly if `j <= i < subtree_end[j]`. Several roots are allowed (sequences that share nothing).

    Attributes:
      token: the token id of the node.
      parent: the node before it, `ROOT` (-1) at a root; always smaller than the node's own number.
      depth: number of ancestors; the position id of the token.
      subtree_end: one past the last node below this one.
      experts: those that the sampler sent the node's token to; () where they are not replayed. With them, nodes that
        differ in their experts alone stand apart.
    """

    token: Int32[np.ndarray, " node"]
    parent: Int32[np.ndarray, " node"]
    depth: Int32[np.ndarray, " node"]
    subtree_end: Int32[np.ndarray, " node"]
    experts: UInt8[np.ndarray, "node layer active"] | tuple[()] = ()


def build(sequences: Iterable[Int[np.ndarray, " token"]]) -> tuple[PrefixTree, Int32[np.ndarray, " seq"]]:
    """The prefix tree of some token sequences.

    Sorted sequences that share a prefix are neighbours, so the longest common prefix of each with the one before
    says which of its tokens are new; read in that order the new tokens are the tree in depth-first order. Tokens that
    are not new are only compared, as bytes: n log n comparisons of sequences, whatever their order.

    Args:
      sequences: token ids of each sequence, 0 <= id < 2**31; may be empty, may repeat. Each is read once.

    Returns:
      The tree, and for each sequence the node of its last token (`ROOT` if the sequence is empty).

    Raises:
      PackingError: a sequence is not of integers in that range.

    Example:
      >>> tree, leaf = build([[1, 2, 3], [1, 2, 4], [1]])
      >>> tree.token.tolist(), tree.parent.tolist(), leaf.tolist()
      ([1, 2, 3, 4], [-1, 0, 1, 1], [2, 3, 0])
    """
    tree, leaf, _ = build_forest([sequences])
    return tree, leaf


def build_forest(
    groups: Iterable[Iterable[Int[np.ndarray, " token"]]],
) -> tuple[PrefixTree, Int32[np.ndarray, " seq"], Int32[np.ndarray, " edge"]]:
    """The trees of several groups of sequences one after the other; what stands in different groups shares nothing.

    Args:
      groups: sequences as for `build`.

    Returns:
      All trees as one, the last node of each sequence, and the first node of each group, with the number of nodes at
      the end.

    Raises:
      PackingError: a sequence is not of integers from 0 to 2**31 - 1.
    """
    places: list[int] = []
    shared: list[int] = []
    length: list[int] = []
    new: list[bytes] = []
    edges = [0]
    for group in groups:
        keys = [_key(sequence) for sequence in group]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        before, first, nodes = b"", len(places), edges[-1]
        for place in order:
            key = keys[place]
            same = _common_tokens(before, key)
            places.append(first + place)
            shared.append(same)
            length.append(len(key) // 4)
            new.append(key[4 * same :])
            nodes += length[-1] - same
            before = key
        edges.append(nodes)
    token = np.frombuffer(b"".join(new), BIG_ENDIAN).astype(np.int32)
    if token.size and token.min() < 0:
        raise PackingError(f"build: token id {token.min()} is negative. Ids run from 0 to 2**31 - 1.")
    parent, depth, subtree_end, last = _links(shared, length, len(token))
    leaf = np.empty(len(places), np.int32)
    leaf[places] = last
    return PrefixTree(token, parent, depth, subtree_end), leaf, np.array(edges, np.int32)


def path(tree: PrefixTree, leaf: int) -> Int32[np.ndarray, " depth"]:
    """Nodes from the root down to `leaf`, both included; empty for `ROOT`.

    >>> tree, leaf = build([[1, 2, 3], [1, 2, 4]])
    >>> tree.token[path(tree, leaf[1])].tolist()
    [1, 2, 4]
    """
    if leaf == ROOT:
        return np.zeros(0, np.int32)
    if not 0 <= leaf < len(tree.token):
        raise PackingError(f"path: node {leaf} is not in a tree of {len(tree.token)} nodes. Give a leaf of this tree.")
    return np.flatnonzero(tree.subtree_end[: leaf + 1] > leaf).astype(np.int32)


def path_ranges(
    tree: PrefixTree,
    leaf: Int[np.ndarray, " query"],
    low: Int[np.ndarray, " query"],
    high: Int[np.ndarray, " query"],
) -> Int32[np.ndarray, " found"]:
    """For each query the nodes on the path to `leaf` with `low <= depth < high`, ascending; query after query.

    Nodes without a branch between them have consecutive numbers, so a path is a few ranges: one for each branch point
    on the way up. All queries climb one such range at a time.

    Args:
      tree: any prefix tree.
      leaf: nodes of the tree; anything where `low == high`.
      low: 0 or more.
      high: at most the depth of the leaf plus 1.

    Returns:
      The nodes; `sum(high - low)` of them.

    Raises:
      PackingError: a range that is not on the path.
    """
    leaf, low, high = (np.asarray(field, np.int64) for field in (leaf, low, high))
    size = high - low
    query = np.flatnonzero(size)
    node, wanted, stop = leaf[query], low[query], high[query]
    if size.min(initial=0) < 0 or np.any((node < 0) | (wanted < 0) | (stop > tree.depth[node] + 1)):
        raise PackingError("path_ranges: a range of depths is not on the path to its leaf. Give a node below it.")
    if not len(query):
        return np.zeros(0, np.int32)
    first_out = (np.cumsum(size) - high)[query]  # a node of depth d stands at first_out + d
    tops = np.flatnonzero(tree.parent[1:] != np.arange(len(tree.parent) - 1, dtype=np.int32)) + 1
    tops = np.concatenate([np.zeros(1, np.int64), tops])
    place: list[Int[np.ndarray, " range"]] = []
    shift: list[Int[np.ndarray, " range"]] = []
    while len(node):
        top = tops[np.searchsorted(tops, node, side="right") - 1]
        depth = tree.depth[top]
        wide = depth < stop
        place.append((first_out + np.maximum(wanted, depth))[wide])
        shift.append((top - depth - first_out)[wide])  # from the place of a node of this range to its number
        more = depth > wanted
        node, wanted, stop, first_out = tree.parent[top[more]], wanted[more], stop[more], first_out[more]
    places, shifts = np.concatenate(place), np.concatenate(shift)
    upward = np.argsort(places)
    total = int(size.sum())
    out = np.arange(total)
    out += np.repeat(shifts[upward], np.diff(places[upward], append=total))
    return out.astype(np.int32)


def ancestor(
    tree: PrefixTree, node: Int[np.ndarray, " query"], depth: Int[np.ndarray, " query"]
) -> Int32[np.ndarray, " query"]:
    """For each pair the node at that depth on the path to `node`; `ROOT` for a negative depth.

    Args:
      tree: any prefix tree.
      node: nodes of the tree.
      depth: at most the depth of the node.

    Returns:
      The ancestors.

    Raises:
      PackingError: a depth below the node.

    Example:
      >>> tree, leaf = build([[1, 2, 3], [1, 2, 4]])
      >>> ancestor(tree, leaf, np.array([1, -1])).tolist()
      [1, -1]
    """
    depth = np.asarray(depth, np.int64)
    out = np.full(len(depth), ROOT, np.int32)
    inside = depth >= 0
    out[inside] = path_ranges(tree, np.asarray(node)[inside], depth[inside], depth[inside] + 1)
    return out


def _key(sequence: Int[np.ndarray, " token"]) -> bytes:
    """Big-endian bytes, which sort like the ids."""
    array = np.asarray(sequence)
    if array.dtype == BIG_ENDIAN:
        return array.tobytes()
    wide = array.dtype != np.int32 and array.size > 0
    if wide and (array.dtype.kind not in "iu" or array.max() >= 2**31 or array.min() < 0):
        raise PackingError(f"build: got ids of type {array.dtype}, {array[:3]} ...; wanted integers below 2**31.")
    return array.astype(BIG_ENDIAN).tobytes()


def _common_tokens(before: bytes, key: bytes) -> int:
    """Length of the common prefix of two keys of which `before` is not the greater one."""
    if key.startswith(before):
        return len(before) // 4
    size = min(len(before), len(key)) // 4
    return int(np.argmax(np.frombuffer(before, np.int32, size) != np.frombuffer(key, np.int32, size)))


def _links(
    shared: Sequence[int], length: Sequence[int], nodes: int
) -> tuple[
    Int32[np.ndarray, " node"], Int32[np.ndarray, " node"], Int32[np.ndarray, " node"], Int32[np.ndarray, " seq"]
]:
    """Parent, depth and subtree end of every node, and the last node of every sequence, from the common prefixes.

    Each sequence adds one unbranched run of nodes. `open_runs` holds the runs on the path to the newest node as
    (first node, depth of the first node); a new run closes what lies below the depth where it starts.
    """
    first, top, above = [0], [0], [ROOT]  # of each run: its first node, the depth of that, and its parent
    begin, end = [0], [0]  # nodes from `begin` on, as far as the next one, have subtrees that end here
    last: list[int] = []
    open_runs: list[tuple[int, int]] = []
    node, deep = 0, 0
    for start, stop in zip([*shared, 0], [*length, 1], strict=True):  # the one at the end closes all
        if stop > start:
            while open_runs and deep > start:
                run, depth = open_runs[-1]
                deep = depth if depth > start else start
                begin.append(run + deep - depth)
                end.append(node)
                if deep == depth:
                    open_runs.pop()
            first.append(node)
            top.append(start)
            above.append(open_runs[-1][0] + start - 1 - open_runs[-1][1] if start else ROOT)
            open_runs.append((node, start))
            node += stop - start
            deep = stop
        last.append(node - 1 if stop else ROOT)
    firsts, tops = np.array(first, np.int32), np.array(top[:-1], np.int32)
    parent = np.arange(-1, nodes - 1, dtype=np.int32)
    parent[firsts[1:-1]] = above[1:-1]
    depths = np.arange(nodes, dtype=np.int32) + np.repeat(tops - firsts[:-1], np.diff(firsts))
    begins = np.array([*begin, nodes], np.int32)
    order = np.argsort(begins, kind="stable")
    subtree_end = np.repeat(np.array([*end, 0], np.int32)[order][:-1], np.diff(begins[order]))
    return parent, depths, subtree_end, np.array(last[:-1], np.int32)
