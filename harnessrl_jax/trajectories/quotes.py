"""Prompts and earlier outputs -> which answers stand inside which prompts. NumPy only.

An answer that a harness passes on (a summary, the report of a sub-agent) is read again as part of some later prompt. It
is looked for by its last ids, with a rolling hash, so that the work is one pass over the new tokens of each prompt.
Ids at the ends are left out: text that goes on merges with them into other ids. An answer that ends with words of its
own prompt shows nothing: others may have them from there too.
"""

import functools
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32, UInt64

from harnessrl_jax.trajectories.records import Call

# Fewer ids stand in a prompt by chance; more would miss answers that are passed on in part.
LEAST_IDS, MOST_IDS = 4, 8

_BASE = np.uint64(0x9E3779B97F4A7C15)


def quotations(calls: Sequence[Call], fresh: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Which earlier answers each prompt contains.

    Args:
      calls: of one attempt, in request order.
      fresh: for each call, how many ids of its prompt are the history that it extends; those are not read.

    Returns:
      Number of a call -> numbers of the earlier calls whose answers its prompt contains, ascending. An answer shorter
      than `LEAST_IDS` plus its two ends is never found.
    """

    @functools.cache
    def new(number: int) -> bool:
        return not _stands_in(tails[number], calls[number].prompt_ids)

    wanted: defaultdict[int, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    tails = [_tail(call) for call in calls]
    for number, tail in enumerate(tails):
        if len(tail) >= LEAST_IDS:
            wanted[len(tail)][int(_hashes(tail, len(tail))[0])].append(number)
    ordered = {width: np.sort(np.fromiter(known, np.uint64, len(known))) for width, known in wanted.items()}
    out: dict[int, tuple[int, ...]] = {}
    for reader, call in enumerate(calls):
        ids = call.prompt_ids[fresh[reader] :]
        found = {
            number
            for width, known in wanted.items()
            for number in _find(ids, width, known, ordered[width], tails)
            if calls[number].seq < call.seq and new(number)
        }
        if found:
            out[reader] = tuple(sorted(found))
    return out


def _tail(call: Call) -> Int32[np.ndarray, " tail"]:
    """The last ids of an answer, without the end of turn and without the id that may merge with what follows."""
    ended = call.finish in ("stop", "tool_calls")
    ids = call.output_ids[1 : len(call.output_ids) - 1 - ended]
    return ids[-MOST_IDS:]


def _find(
    ids: Int32[np.ndarray, " id"],
    width: int,
    known: dict[int, list[int]],
    ordered: UInt64[np.ndarray, " hash"],
    tails: Sequence[Int32[np.ndarray, " tail"]],
) -> list[int]:
    if len(ids) < width:
        return []
    hashes = _hashes(ids, width)
    out: list[int] = []
    nearest = ordered[np.minimum(np.searchsorted(ordered, hashes), len(ordered) - 1)]
    for place in np.flatnonzero(nearest == hashes).tolist():
        here = ids[place : place + width]
        out += [number for number in known[int(hashes[place])] if np.array_equal(tails[number], here)]
    return out


def _stands_in(tail: Int32[np.ndarray, " tail"], ids: Int32[np.ndarray, " id"]) -> bool:
    if len(ids) < len(tail):
        return False
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(tail))
    return bool((windows == tail).all(axis=1).any())


def _hashes(ids: Int32[np.ndarray, " id"], width: int) -> UInt64[np.ndarray, " window"]:
    """A hash of every `width` neighbouring ids, modulo 2**64."""
    with np.errstate(over="ignore"):
        powers = np.cumprod(np.full(width, _BASE, np.uint64))
        windows = np.lib.stride_tricks.sliding_window_view(ids.astype(np.uint64), width)
        return windows @ powers
