"""A tree with targets -> parts that fit a row, each target in one part with its whole context. NumPy only."""

import itertools
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, UInt8

from harnessrl_jax.errors import PackingError
from harnessrl_jax.trajectories.targets import Targets
from harnessrl_jax.trajectories.trees import PrefixTree, path_ranges

# Inside an unbranched run a cut is tried every row_targets / CUTS_IN_A_ROW targets.
CUTS_IN_A_ROW = 16


class Part(NamedTuple):
    """A piece of a tree, closed under ancestors, and the targets that are trained in it.

    Slots are numbered inside the part; `targets.source` is such a number.
    """

    token: Int32[np.ndarray, " slot"]
    position: Int32[np.ndarray, " slot"]
    subtree_end: Int32[np.ndarray, " slot"]
    targets: Targets
    experts: UInt8[np.ndarray, "slot layer active"] | tuple[()] = ()


def prune(tree: PrefixTree, targets: Targets) -> tuple[PrefixTree, Targets]:
    """Drops the nodes that no target depends on: the last token of each branch, and text after the last sampled one.

    Args:
      tree: any prefix tree.
      targets: its targets.

    Returns:
      The tree of the sources and their ancestors, and the targets with their sources renumbered.
    """
    has_target = np.zeros(len(tree.token), np.bool_)
    has_target[targets.source] = True
    if np.all(has_target | (tree.subtree_end > np.arange(1, len(has_target) + 1))):
        return tree, targets  # every branch ends with a source
    first = np.zeros(len(has_target) + 1, np.int32)
    np.cumsum(has_target, out=first[1:])
    keep = first[tree.subtree_end] > first[:-1]
    renumber = np.zeros(len(keep) + 1, np.int32)
    np.cumsum(keep, out=renumber[1:])
    parent = tree.parent[keep]
    pruned = PrefixTree(
        token=tree.token[keep],
        parent=np.where(parent < 0, parent, renumber[parent]),
        depth=tree.depth[keep],
        subtree_end=renumber[tree.subtree_end[keep]],
        experts=() if isinstance(tree.experts, tuple) else tree.experts[keep],
    )
    return pruned, targets._replace(source=renumber[targets.source])


def parts(tree: PrefixTree, targets: Targets, *, row_slots: int, row_targets: int) -> Iterator[Part]:
    """Cuts a pruned tree into parts that fit a row.

    Each root is a part of its own, since separating roots repeats nothing. A root's tree that is too large is cut
    where the fewest nodes repeat: among all cuts of the depth-first order at branch points (and at regular places
    inside long runs) the one with the fewest slots in all, then the fewest parts. A repeated node is context only.

    Args:
      tree: a tree without nodes that no target needs.
      targets: sorted by source.
      row_slots: most slots of a part.
      row_targets: most targets of a part.

    Yields:
      The parts in depth-first order; each target is in exactly one.

    Raises:
      PackingError: one path alone is longer than a row.
    """
    if len(tree.token) and int(tree.depth.max()) >= row_slots:
        raise PackingError(
            f"A path of {int(tree.depth.max()) + 1} tokens does not fit a row of {row_slots} slots. "
            "Leave out its call and count it as too_long, or make the rows longer."
        )
    borders = _borders(tree, targets, row_slots, row_targets)
    first = targets.source[borders[:-1]]
    depth = tree.depth[first]
    above = path_ranges(tree, first, np.zeros(len(first), np.int64), depth)
    ends = np.cumsum(depth).tolist()
    for part, (begin, end) in enumerate(itertools.pairwise(borders)):
        repeated = above[ends[part] - int(depth[part]) : ends[part]]
        yield _part(tree, repeated, Targets(*(field[begin:end] for field in targets)))


def _part(tree: PrefixTree, above: Int32[np.ndarray, " repeated"], targets: Targets) -> Part:
    """The nodes of `above`, then all from the first source to the last one: in depth-first order nothing else is."""
    low, high = int(targets.source[0]), int(targets.source[-1]) + 1
    kept = np.concatenate([above, np.arange(low, high, dtype=np.int32)]) if len(above) else slice(low, high)
    shift = np.int32(len(above) - low)
    return Part(
        token=tree.token[kept],
        position=tree.depth[kept],
        subtree_end=np.minimum(tree.subtree_end[kept], high) + shift,
        targets=targets._replace(source=targets.source + shift),
        experts=() if isinstance(tree.experts, tuple) else tree.experts[kept],
    )


def _borders(tree: PrefixTree, targets: Targets, row_slots: int, row_targets: int) -> list[int]:
    """Where the parts begin in the targets, and the end of the last one."""
    roots = np.flatnonzero(tree.depth == 0)
    edges = np.append(np.searchsorted(targets.source, roots), len(targets.source)).tolist()
    sizes = (tree.subtree_end[roots] - roots).tolist()
    out = [0]
    for size, begin, end in zip(sizes, edges[:-1], edges[1:], strict=True):
        if size <= row_slots and end - begin <= row_targets:
            out.append(end)
        else:
            source = targets.source[begin:end]
            out += [begin + cut for cut in _cuts(tree.depth[source], source, row_slots, row_targets)[1:]]
    return out


def _cuts(
    depth: Int32[np.ndarray, " target"], source: Int32[np.ndarray, " target"], row_slots: int, row_targets: int
) -> list[int]:
    """Where to cut the targets of one tree: borders from 0 to their number.

    In a pruned tree the targets a..b-1 need the path to source[a] and every node from there to source[b-1], that is
    depth[a] + 1 + source[b-1] - source[a] slots. `best[k]` is the least total over all ways to cut before border k;
    the slots a part needs fall as its first target moves right, so the borders in reach are a range whose ends only
    move right: a queue of the candidates, cheapest first, gives each minimum at once.
    """
    count = len(source)
    step = np.diff(source)
    jump = (step > 1) | (step != np.diff(depth))  # a new run, or text between two calls
    regular = np.arange(1, count) % max(1, row_targets // CUTS_IN_A_ROW) == 0
    border = np.concatenate([[0], np.flatnonzero(jump | regular) + 1, [count]])
    gain = depth[border[:-1]].astype(np.int64) + 1 - source[border[:-1]]
    scale = len(border) + 1  # slots decide, then the number of parts
    last = source[border[1:] - 1].astype(np.int64)
    reach = np.maximum(
        np.searchsorted(-gain, last - row_slots), np.searchsorted(border[:-1], border[1:] - row_targets)
    ).tolist()
    came_from = [0]
    cost = [int(gain[0]) * scale]  # best[j] + gain[j] * scale, of which each border wants the least in its reach
    window: deque[int] = deque()
    for k, (low, tip) in enumerate(zip(reach, last.tolist(), strict=True), start=1):
        while window and cost[window[-1]] > cost[k - 1]:
            window.pop()
        window.append(k - 1)
        while window[0] < low:
            window.popleft()
        came_from.append(window[0])
        best = cost[window[0]] + tip * scale + 1
        cost.append(best + (int(gain[k]) * scale if k < len(gain) else 0))
    cuts = [len(border) - 1]
    while cuts[-1] > 0:
        cuts.append(came_from[cuts[-1]])
    return border[cuts[::-1]].tolist()
