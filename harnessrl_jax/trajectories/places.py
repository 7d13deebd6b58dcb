"""Calls of one attempt, in request order -> how each is linked to what came before. NumPy only.

One pass in request order. A prompt that extends an earlier one is linked by its tokens. For any other prompt the order
of judgement is: the same prompt was asked before; a header says that the history was compacted; a summary of it is
quoted; turns of an earlier conversation come back; nothing is known of it, and it opens a conversation.
"""

from typing import NamedTuple

from harnessrl_jax.trajectories.evidence import Evidence, EvidenceKind, Fork, Link
from harnessrl_jax.trajectories.forks import find_fork
from harnessrl_jax.trajectories.headers import Claims
from harnessrl_jax.trajectories.known import Known
from harnessrl_jax.trajectories.openers import find_opener
from harnessrl_jax.trajectories.prefixes import shared_tokens
from harnessrl_jax.trajectories.requests import Asked
from harnessrl_jax.trajectories.summaries import Compacted, quoted_summary, window_opened
from harnessrl_jax.trajectories.takeovers import Conversations


class Place(NamedTuple):
    """Where a call stands.

    Attributes:
      link: as in `LinkedCall`.
      session: number of the call that opened its conversation.
      summary: number of the call whose answer stands for the history, where it "continues"; None elsewhere.
      fork: where it leaves the history that it takes up; None where it extends or opens.
      evidence: for the link and for the opener.
    """

    link: Link
    session: int
    summary: int | None
    fork: Fork | None
    evidence: tuple[Evidence, ...]


def place_calls(known: Known) -> list[Place]:
    """Places every call; the same calls give the same places, whatever order they arrived in."""
    walk = _Walk(known)
    for number in range(len(known.calls)):
        walk.step(number)
    return walk.places


class _Walk:
    """One pass over the calls, and what it has learnt so far."""

    def __init__(self, known: Known) -> None:
        self.places: list[Place] = []
        self._known = known
        self._last: dict[int, int] = {}  # conversation -> its last call
        self._fresh: set[int] = set()  # conversations that went on since they were last read
        self._given: dict[int, int] = {}  # conversation -> how many messages it began with
        self._heads: dict[tuple[tuple[str, str], str, str], int] = {}  # thread, instructions, tools -> conversation
        self._asked: dict[tuple[tuple[str, str], str, bytes], int] = {}  # thread, session, prompt -> first call
        self._waiting: dict[int, int] = {}  # conversation -> its last call, if that waits for results of tool calls
        self._made: dict[str, list[int]] = {}  # thread that a header names -> its calls that made tool calls
        self._sessions: list[int] = []
        self._own: dict[tuple[str, str], Conversations] = {}
        self._all = Conversations()

    def step(self, number: int) -> None:
        """Places the next call."""
        call, parent = self._known.calls[number], self._known.parent[number]
        place = self._root(number) if parent is None else self._child(number, parent)
        self.places.append(place)
        self._last[place.session] = number
        self._fresh.add(place.session)
        self._waiting.pop(place.session, None)
        if call.tool_calls:
            self._waiting[place.session] = number
            claim = self._known.said[number]
            if claim is not None:
                self._made.setdefault(claim.thread, []).append(number)
        self._sessions.append(place.session)
        for conversations in self._of(number):
            conversations.add_call(number, call)

    def _child(self, number: int, parent: int) -> Place:
        """A call that extends another; if the conversation had gone on from there, it may be a changed history too."""
        session = self._sessions[parent]
        if self._last[session] != parent:
            asked = self._known.read(number)
            if place := self._continues(number, asked) or self._goes_back(number, parent, asked):
                return place
        extended = self._known.calls[parent].call_id
        reason = Evidence("link", "token_prefix", extended, f"prompt extends {extended}")
        return Place("extends", session, None, None, (reason,))

    def _goes_back(self, number: int, parent: int, asked: Asked | None) -> Place | None:
        """A changed history whose beginning is intact: it holds turns that were sampled after the part it extends."""
        intact, at = {parent}, self._known.parent[parent]
        while at is not None:
            intact.add(at)
            at = self._known.parent[at]
        later = set(self._known.quotes.get(number, ()))
        if asked is not None:
            later.update(self._of(number)[0].made_by(asked))
        later = {other for other in later - intact if self._sessions[other] == self._sessions[parent]}
        return self._rewrites(max(later), number, "same_messages") if later else None

    def _root(self, number: int) -> Place:
        call, thread = self._known.calls[number], self._known.threads[number]
        first = self._asked.setdefault((thread, call.session_id, call.prompt_ids.tobytes()), number)
        if first != number:
            # Every window has its own history, also where all are summed up in the same words.
            return self._new_window(number) or self.places[first]
        asked = self._known.read(number)
        place = (
            self._continues(number, asked)
            or self._takes_up(number, asked)
            or (self._same_session(number) if asked is None else None)
            or self._opens(number, asked)
        )
        if asked is not None:
            self._given.setdefault(place.session, len(asked.messages))
            self._heads[thread, asked.instructions, asked.tools] = place.session
        return place

    def _continues(self, number: int, asked: Asked | None) -> Place | None:
        if place := self._new_window(number):
            return place
        found = None if asked is None else self._quoted_summary(number, asked)
        if found is None or found.summary is None:
            return None
        other, summary = (self._known.calls[i].call_id for i in (found.history, found.summary))
        words = f"quotes the summary {summary} in place of the history of {other}"
        return self._compacted(number, found, Evidence("link", "quoted_answer", summary, words))

    def _new_window(self, number: int) -> Place | None:
        known = self._known
        found = window_opened(number, known.said, known.threads, known.quotes.get(number, ()))
        if found is None:
            return None
        other = known.calls[found.history].call_id
        words = f"a new context window after {other} ({found.source})"
        return self._compacted(number, found, Evidence("link", "harness_header", other, words))

    def _compacted(self, number: int, found: Compacted, reason: Evidence) -> Place:
        place = self._rewrites(found.history, number, reason.kind)
        fork = None if place.fork is None else place.fork._replace(category="compaction")
        return Place("continues", place.session, found.summary, fork, (reason,))

    def _quoted_summary(self, number: int, asked: Asked) -> Compacted | None:
        known = self._known
        session = self._heads.get((known.threads[number], asked.instructions, asked.tools))
        quoted = known.quotes.get(number, ())
        if session is None or not quoted:
            return None
        requests = {other: known.read(other) for other in quoted}
        conversation = session, self._last[session]
        return quoted_summary(
            number, asked, known.calls, known.quotes, self._sessions, conversation, requests, known.decode
        )

    def _takes_up(self, number: int, asked: Asked | None) -> Place | None:
        if asked is None:
            return None
        self._read_fresh()
        own, everyone = self._of(number)
        source = own.find(asked)
        if source is None:
            source = self._echoed(number, asked)
        elsewhere = source is None
        if elsewhere:
            source = everyone.find(asked)
        if source is None:
            return None
        place = self._rewrites(source, number, "same_messages")
        handoff = place.fork is not None and place.fork.category == "handoff"
        if elsewhere and not handoff:
            return None
        return place._replace(link="handoff", session=number) if handoff else place

    def _echoed(self, number: int, asked: Asked) -> int | None:
        """The last call of the same agent whose answer stands in the prompt, where that has turns of an assistant."""
        known, head = self._known, (asked.instructions, asked.tools)
        if all(turn.role != "assistant" for turn in asked.messages):
            return None
        for quoted in reversed(known.quotes.get(number, ())):
            other = known.read(quoted)
            if other is not None and (known.threads[quoted], other.instructions, other.tools) == (
                known.threads[number],
                *head,
            ):
                return quoted
        return None

    def _rewrites(self, source: int, number: int, kind: EvidenceKind) -> Place:
        known = self._known
        requests = known.read(source), known.read(number)
        fork = find_fork(known.calls[source], known.calls[number], requests, known.decode)
        if known.said[number] is not None and fork.category == "handoff":
            fork = fork._replace(category="instructions")  # a header says that it is the same agent
        length = len(known.calls[number].prompt_ids)
        words = f"history differs from {fork.from_call_id} at token {fork.position} of {length}"
        if fork.category != "unknown":
            words = f"{words} ({fork.category})"
        reason = Evidence("link", kind, fork.from_call_id, words)
        return Place("rewrites", self._sessions[source], None, fork, (reason,))

    def _same_session(self, number: int) -> Place | None:
        """Without a readable request all that is left is that the record puts both into one conversation."""
        known, call = self._known, self._known.calls[number]
        prefixes, members = known.prefixes[known.threads[number]]
        own = [known.calls[member] for member in members]
        at = members.index(number)
        before = [i for i in range(at) if own[i].session_id == call.session_id]
        if not before:
            return None
        shared = shared_tokens(prefixes, own, at)
        source = members[max(before, key=lambda i: (shared[i], i))]
        return self._rewrites(source, number, "same_session")

    def _opens(self, number: int, asked: Asked | None) -> Place:
        known, call, claim = self._known, self._known.calls[number], self._known.said[number]
        waiting = [other for other in self._waiting.values() if known.calls[other].seq < call.seq]
        parent = claim.parent if claim is not None and claim.subagent else None
        parents = [other for other in waiting if parent is not None and _is(known.said[other], parent)]
        made = [] if parent is None else [i for i in self._made.get(parent, ()) if known.calls[i].seq < call.seq]
        opener = find_opener(asked, *([known.calls[i] for i in numbers] for numbers in (waiting, parents, made)))
        return Place("opens", number, None, None, () if opener is None else (opener,))

    def _read_fresh(self) -> None:
        """Reads the conversations that went on; each call is read at most once, most never."""
        for session in sorted(self._fresh):
            last = self._last[session]
            asked = self._known.read(last)
            if asked is not None:
                for conversations in self._of(last):
                    conversations.add_request(last, asked, self._given.get(session, 0))
        self._fresh.clear()

    def _of(self, number: int) -> tuple[Conversations, Conversations]:
        return self._own.setdefault(self._known.threads[number], Conversations()), self._all


def _is(claim: Claims | None, thread: str) -> bool:
    return claim is not None and claim.thread == thread
