"""Prompts and outputs of calls -> which call each prompt extends, and how much it shares with any other. NumPy only.

Sequences are sorted once; those that share a prefix are then neighbours, so that everything follows from the common
prefix of each neighbouring pair. The work is one sort and one pass over the tokens; no pair of prompts is compared
that does not stand side by side.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

from harnessrl_jax.trajectories.records import Call


class Prefixes(NamedTuple):
    """Calls of one agent, in request order, sorted by prompt + output.

    Attributes:
      parent: for each call the number of the call that it extends, or None.
      rank: for each call its place in the sorted order.
      by_rank: the inverse of `rank`.
      shared: common prefix, in tokens, of each place in the sorted order with the place before; 0 for the first.
    """

    parent: tuple[int | None, ...]
    rank: Int64[np.ndarray, " call"]
    by_rank: Int64[np.ndarray, " call"]
    shared: Int64[np.ndarray, " call"]


def link_prefixes(calls: Sequence[Call]) -> Prefixes:
    """Finds for each call the earlier one whose prompt + output is the longest prefix of its prompt.

    Only a request that came before can be continued, and only one that sampled something. Where several end on the
    same token (siblings that sampled the same), the same session wins, then the latest.

    Args:
      calls: of one agent, by ascending `seq`.

    Returns:
      The parents, and the order that `shared_tokens` reads.
    """
    full = [history(call) for call in calls]
    # Any order of bytes will do in which a sequence stands before those that it is a prefix of.
    keys = [ids.tobytes() for ids in full]
    order = sorted(range(len(calls)), key=keys.__getitem__)
    shared = np.zeros(len(calls), np.int64)
    shared[1:] = [common_prefix(full[a], full[b]) for a, b in itertools.pairwise(order)]
    by_rank = np.array(order, np.int64)
    rank = np.empty(len(calls), np.int64)
    rank[by_rank] = np.arange(len(calls))
    return Prefixes(tuple(_parents(calls, order, shared.tolist())), rank, by_rank, shared)


def shared_tokens(prefixes: Prefixes, calls: Sequence[Call], child: int) -> Int64[np.ndarray, " call"]:
    """How many tokens the prompt of one call shares from the start with prompt + output of each call."""
    here, count = int(prefixes.rank[child]), len(calls)
    sorted_shared = np.full(count, len(calls[child].prompt_ids), np.int64)
    sorted_shared[here + 1 :] = np.minimum.accumulate(prefixes.shared[here + 1 :])
    sorted_shared[:here] = np.minimum.accumulate(prefixes.shared[here:0:-1])[::-1]
    out = np.empty(count, np.int64)
    out[prefixes.by_rank] = np.minimum(sorted_shared, len(calls[child].prompt_ids))
    return out


def history(call: Call) -> Int32[np.ndarray, " token"]:
    """What a conversation holds after a call: its prompt and its output."""
    return np.concatenate([call.prompt_ids, call.output_ids])


def common_prefix(a: Int32[np.ndarray, " a"], b: Int32[np.ndarray, " b"]) -> int:
    """Number of tokens that two sequences share from the start."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


def _parents(calls: Sequence[Call], order: Sequence[int], shared: Sequence[int]) -> list[int | None]:
    """Walks the sorted sequences with a stack of those that are prefixes of the present one, the longest on top."""
    out: list[int | None] = [None] * len(calls)
    length = [len(call.prompt_ids) + len(call.output_ids) for call in calls]
    stack: list[tuple[int, Sequence[int]]] = []  # (length, calls whose prompt + output are exactly this)
    place = 0
    while place < len(order):
        end, here = place + 1, length[order[place]]
        while end < len(order) and length[order[end]] == here == shared[end]:
            end += 1
        while stack and stack[-1][0] > shared[place]:
            stack.pop()
        stack.append((here, order[place:end]))
        for child in order[place:end]:
            out[child] = _deepest_end(calls, stack, child)
        place = end
    return out


def _deepest_end(calls: Sequence[Call], stack: Sequence[tuple[int, Sequence[int]]], child: int) -> int | None:
    call = calls[child]
    for length, ends in reversed(stack):
        if length <= len(call.prompt_ids):
            earlier = [i for i in ends if calls[i].seq < call.seq and len(calls[i].output_ids)]
            if earlier:
                return max(earlier, key=lambda i: (calls[i].session_id == call.session_id, i))
    return None
