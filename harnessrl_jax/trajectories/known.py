"""Calls of one attempt, in request order -> what is known of them before they are placed. NumPy only."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from harnessrl_jax.trajectories.agents import header_threads
from harnessrl_jax.trajectories.forks import Decode
from harnessrl_jax.trajectories.headers import Claims, claims
from harnessrl_jax.trajectories.prefixes import Prefixes, history, link_prefixes
from harnessrl_jax.trajectories.quotes import quotations
from harnessrl_jax.trajectories.records import Call
from harnessrl_jax.trajectories.requests import Asked, read_request


class Known(NamedTuple):
    """What is known of the calls; every sequence has one entry for each call.

    Attributes:
      calls: in request order.
      said: what the headers claim.
      threads: agent and thread, inside which tokens are compared.
      parent: number of the call that each prompt extends.
      prefixes: of each (agent, thread), with the numbers of its calls.
      quotes: which earlier answers a prompt contains.
      read: number -> what the call asked, or None.
      decode: ids -> text, or None.
    """

    calls: Sequence[Call]
    said: Sequence[Claims | None]
    threads: Sequence[tuple[str, str]]
    parent: Sequence[int | None]
    prefixes: Mapping[tuple[str, str], tuple[Prefixes, Sequence[int]]]
    quotes: Mapping[int, tuple[int, ...]]
    read: Callable[[int], Asked | None]
    decode: Decode | None


def know(calls: Sequence[Call], decode: Decode | None) -> Known:
    """Reads headers, compares tokens, and looks for quotations.

    Args:
      calls: of one attempt, in request order.
      decode: ids -> text, or None.

    Returns:
      What is known; requests are read when they are asked for.
    """
    said = [claims(call.headers) for call in calls]
    threads = list(zip((call.agent for call in calls), header_threads(calls, said), strict=True))
    parent: list[int | None] = [None] * len(calls)
    prefixes: dict[tuple[str, str], tuple[Prefixes, Sequence[int]]] = {}
    for thread in dict.fromkeys(threads):
        members = [number for number, other in enumerate(threads) if other == thread]
        found = link_prefixes([calls[number] for number in members])
        prefixes[thread] = found, members
        for number, extended in zip(members, found.parent, strict=True):
            parent[number] = None if extended is None else members[extended]
    fresh = [0 if extended is None else len(history(calls[extended])) for extended in parent]

    @functools.cache
    def read(number: int) -> Asked | None:
        return read_request(calls[number].request)

    return Known(
        calls=calls,
        said=said,
        threads=threads,
        parent=parent,
        prefixes=prefixes,
        quotes=quotations(calls, fresh),
        read=read,
        decode=decode,
    )
