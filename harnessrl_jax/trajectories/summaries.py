"""A prompt that extends nothing -> the summary that stands in it for the history. Pure.

When a context is full, a harness asks for a summary, drops the history and goes on from the summary. The new prompt
shares few tokens with the old one, so that it would look like a new conversation.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from harnessrl_jax.trajectories.forks import Decode
from harnessrl_jax.trajectories.headers import Claims
from harnessrl_jax.trajectories.records import Call
from harnessrl_jax.trajectories.requests import Asked


class Compacted(NamedTuple):
    """A history that was replaced.

    Attributes:
      history: number of the last call of that history.
      summary: number of the call that summed it up; None if none is known.
      source: name of the header that says so; "" if the prompt quotes the summary.
    """

    history: int
    summary: int | None
    source: str


def window_opened(
    number: int, said: Sequence[Claims | None], threads: Sequence[tuple[str, str]], quotes: Sequence[int]
) -> Compacted | None:
    """What a harness replaced that counts its context windows in a header, where the count went up.

    Args:
      number: of the call.
      said: what the headers of each call claim.
      threads: agent and thread of each call.
      quotes: numbers of the earlier calls whose answers the prompt contains.
    """
    claim = said[number]
    if claim is None or claim.window is None:
        return None
    history: int | None = None
    summaries: list[int] = []
    for earlier in range(number - 1, -1, -1):
        other = said[earlier]
        if threads[earlier] != threads[number] or other is None or other.window is None:
            continue
        if other.window >= claim.window:
            return None
        if other.kind == "compaction":
            summaries.append(earlier)
            continue
        history = earlier
        break
    if history is None:
        return None
    # Of several attempts the one that the prompt quotes was accepted; if that cannot be seen, the last.
    summary = next((summary for summary in summaries if summary in quotes), summaries[0] if summaries else None)
    return Compacted(history, summary, claim.source)


def quoted_summary(
    number: int,
    asked: Asked,
    calls: Sequence[Call],
    quotes: Mapping[int, Sequence[int]],
    sessions: Sequence[int],
    known: tuple[int, int],
    requests: Mapping[int, Asked | None],
    decode: Decode | None,
) -> Compacted | None:
    """What a prompt replaces by a summary that it quotes.

    A quoted answer is a summary of a conversation if what it answered is not repeated with it, and if it either belongs
    to that conversation, of which then no more is left than it had read, or no turn at all; or was asked with other
    instructions or tools about it: by the name of the session, or because its own prompt quotes the conversation. The
    last needs several calls to sum up: agents that pass single answers on to each other sum nothing up.

    Args:
      number: of the call.
      asked: its request.
      calls: all of them, in request order.
      quotes: for each prompt the numbers of the earlier calls whose answers it contains.
      sessions: for each call so far the number of the call that opened its conversation.
      known: of the last conversation with the same instructions and tools, the opening call and the last call.
      requests: what each quoted call asked, or None.
      decode: ids -> text, or None; without it, messages that a harness adds beside the summary hide it.
    """
    opening, last = known
    call = calls[number]
    for summary in sorted(quotes.get(number, ()), reverse=True):
        request = requests[summary]
        if request is None or calls[summary].tool_calls or request.messages[-1:] == ():
            continue
        if request.messages[-1] in asked.messages:
            continue
        if sessions[summary] == opening:
            shorter = len(asked.messages) <= len(request.messages)
            about = summary != opening and (shorter or _replaced(request, asked, calls[summary], decode))
        else:
            named = call.agent != call.session_id == calls[summary].session_id
            about = (request.instructions, request.tools) != (asked.instructions, asked.tools) and (
                named or (opening != last and any(sessions[quoted] == opening for quoted in quotes.get(summary, ())))
            )
        if about:
            return Compacted(last, summary, "")
    return None


def _replaced(request: Asked, asked: Asked, summary: Call, decode: Decode | None) -> bool:
    """Whether of the turns that the summary read none is left, nor the summary as a turn, but only as quoted text."""
    read = [message for message in request.messages if message.role == "assistant"]
    if decode is None or not read or any(message in asked.messages for message in read):
        return False
    said = decode(summary.output_ids[: len(summary.output_ids) - (summary.finish == "stop")].tolist())
    return not any(message.text and message.text in said for message in asked.messages if message.role == "assistant")
