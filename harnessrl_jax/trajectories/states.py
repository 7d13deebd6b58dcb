"""Calls in their places -> those that serve the harness and not the task, and summaries that were thrown away. Pure.

A call is dropped only for what can be seen, never for what is likely:

* auxiliary: the harness asked for its own ends, and the answer is read in no later prompt of another conversation, so
  that it cannot have moved the reward. What shows the end: a header that says background work, a request for a title or
  other label of the conversation, or a request for one token about one message, without instructions or tools.
* rejected: one of several summaries of the same history, of which another one was used.

Everything else is trained: sub-agents, votes, branches, and summaries that the work goes on from, since all of them are
the policy's own work on the task. That nobody read an answer is no reason: nobody reads the last one of a conversation.
A rollout whose calls are all auxiliary is a rollout about such requests, and all of them are live. Counting tokens
samples nothing and leaves no call.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from harnessrl_jax.trajectories.evidence import Evidence
from harnessrl_jax.trajectories.headers import Claims
from harnessrl_jax.trajectories.places import Place
from harnessrl_jax.trajectories.records import Call
from harnessrl_jax.trajectories.requests import Asked

# Words that ask for a label of the conversation itself. Needed together with: no tools, one turn, an unread answer.
_LABEL_WORDS = ("title", "topic", "tags", "follow-up")
_LABEL = re.compile(
    r"\b(?:generate|create|write|give|provide|suggest|produce|come up with|you are an?)\b[^.\n]{0,60}"
    r"\b(?:titles?|topic|tags|follow-up questions)\b[^.\n]{0,80}"
    r"\b(?:conversation|chat|session|thread|discussion|task)\b|\btitle generator\b"
)
_LABEL_KEYS = (("title",), ("isNewTopic", "title"), ("topic",), ("tags",), ("follow_ups",))


class Used:
    """Which answers later prompts contain, and who reads them."""

    def __init__(self, parent: Sequence[int | None], quotes: Mapping[int, Sequence[int]]) -> None:
        self.readers: defaultdict[int, set[int]] = defaultdict(set)
        for reader, extended in enumerate(parent):
            if extended is not None:
                self.readers[extended].add(reader)
        for reader, quoted in quotes.items():
            for number in quoted:
                self.readers[number].add(reader)


def auxiliary(
    calls: Sequence[Call],
    said: Sequence[Claims | None],
    places: Sequence[Place],
    used: Used,
    requests: Mapping[int, Asked | None],
) -> dict[int, Evidence]:
    """The calls that serve the harness and not the task.

    Args:
      calls: of one attempt, in request order.
      said: what the headers of each claim.
      places: where each stands.
      used: who reads which answer.
      requests: what the opening call of each conversation asked, or None.

    Returns:
      Number of the call -> evidence.
    """
    members: defaultdict[int, list[int]] = defaultdict(list)
    for number, place in enumerate(places):
        members[place.session].append(number)
    out: dict[int, Evidence] = {}
    for opening, own in members.items():
        if any(used.readers[number].difference(own) for number in own):
            continue
        evidence = _background(own, said)
        single = all(places[number].link == "opens" for number in own)
        if evidence is None and single:
            evidence = _own_ends(requests[opening])
        if evidence is not None:
            out.update(dict.fromkeys(own, evidence))
    return out if len(out) < len(calls) else {}


def rejected(calls: Sequence[Call], places: Sequence[Place], used: Used) -> dict[int, Evidence]:
    """Summaries that were thrown away: the harness asked for the same summary again and went on from another answer.

    Args:
      calls: of one attempt, in request order.
      places: where each stands.
      used: who reads which answer.

    Returns:
      Number of the call -> evidence.
    """
    summed_up = {places[place.summary].session for place in places if place.summary is not None}
    attempts: defaultdict[tuple[int, bytes], list[int]] = defaultdict(list)
    for number, (call, place) in enumerate(zip(calls, places, strict=True)):
        if place.session in summed_up:
            attempts[place.session, call.prompt_ids.tobytes()].append(number)
    out: dict[int, Evidence] = {}
    for reader, place in enumerate(places):
        accepted = place.summary
        if accepted is None or reader not in used.readers[accepted]:
            continue
        same = attempts[places[accepted].session, calls[accepted].prompt_ids.tobytes()]
        name = calls[accepted].call_id
        for number in same:
            if calls[number].seq < calls[reader].seq and not used.readers[number]:
                words = f"a summary of the same history that nobody read; {name} was used"
                out[number] = Evidence("state", "other_summary_used", name, words)
    return out


def _background(own: Sequence[int], said: Sequence[Claims | None]) -> Evidence | None:
    claims = [said[number] for number in own]
    if any(claim is None or claim.kind != "background" for claim in claims):
        return None
    return Evidence("state", "background_header", None, "a header marks it as background work of the harness")


def _own_ends(asked: Asked | None) -> Evidence | None:
    """What shows that a request of one turn serves the harness itself."""
    if asked is None or asked.tools:
        return None
    if asked.max_tokens == 1 and len(asked.messages) == 1 and not asked.instructions:
        return Evidence("state", "one_token_probe", None, "one token about one message, without instructions or tools")
    if asked.schema_keys in _LABEL_KEYS:
        words = f"the answer must have the fields {', '.join(asked.schema_keys)}, a label of the conversation"
        return Evidence("state", "title_request", None, words)
    said = "\n".join([asked.instructions, *(turn.text for turn in asked.messages if turn.role == "user")]).lower()
    if any(word in said for word in _LABEL_WORDS) and (found := _LABEL.search(said)):
        words = f"asks for a label of the conversation: {found.group()[:80]!r}"
        return Evidence("state", "title_request", None, words)
    return None
