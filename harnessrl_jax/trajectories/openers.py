"""A new conversation -> the call whose tool call it carries out. Pure.

A sub-agent runs while the call that asked for it waits for the result. So the opener is the last call so far of some
other conversation and has made tool calls; which one, the record, the text or a header says. Codex only starts a
sub-agent and goes on: where a header names its parent, any call of the parent may have asked for it.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, cast

from harnessrl_jax.trajectories.evidence import Evidence
from harnessrl_jax.trajectories.records import Call
from harnessrl_jax.trajectories.requests import Asked

# A shorter argument stands inside a longer text by chance.
QUOTED_CHARACTERS = 8
# Of more calls only the last are searched, which keeps the work linear.
MOST_WAITING = 64


def find_opener(
    asked: Asked | None, waiting: Sequence[Call], parents: Sequence[Call], made: Sequence[Call]
) -> Evidence | None:
    """The call that opened a conversation.

    Args:
      asked: the first request of the conversation; None if it cannot be read.
      waiting: calls whose tool calls are being carried out, in request order.
      parents: those of them that belong to the agent which a header names as the parent.
      made: all calls of that agent so far that made tool calls, in request order.

    Returns:
      The evidence, which names the call; None if none is known.
    """
    said = () if asked is None else tuple(turn.text for turn in asked.messages)
    whole = set(said)
    texts = _latest(waiting)
    # A whole message is better evidence than a part of one, which a parent that went on may have by chance.
    quoting = (
        [call for call, own in texts if not whole.isdisjoint(own)]
        or [call for call, own in _latest(made) if not whole.isdisjoint(own)]
        or [call for call, own in texts if any(text in part for text in own for part in said)]
    )
    if quoting:
        name = quoting[0].call_id
        words = f"its request quotes the arguments of a tool call of {name}"
        return Evidence("opener", "quoted_arguments", name, words)
    if parents:
        name = parents[-1].call_id
        return Evidence("opener", "harness_header", name, f"a header names the agent of {name}, which is waiting")
    return None


def _latest(calls: Sequence[Call]) -> list[tuple[Call, tuple[str, ...]]]:
    return [(call, tuple(_arguments(call))) for call in reversed(calls[-MOST_WAITING:])]


def _arguments(call: Call) -> Iterator[str]:
    """The texts among the arguments of a call's tool calls, those left out that are too short to tell anything."""
    for made in call.tool_calls:
        try:
            pending: list[Any] = [json.loads(made.arguments)]
        except (ValueError, RecursionError):  # a model may write anything
            continue
        while pending:
            value = pending.pop()
            if isinstance(value, dict):
                pending += cast(dict[str, Any], value).values()
            elif isinstance(value, list):
                pending += cast(list[Any], value)
            elif isinstance(value, str) and len(value.strip()) >= QUOTED_CHARACTERS:
                yield value.strip()
