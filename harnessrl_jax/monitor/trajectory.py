"""Calls of a rollout, their lineage and credit -> one plain view, which the terminal and the report both draw."""

import json
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from harnessrl_jax.trajectories.lineage import Lineage, LinkedCall
from harnessrl_jax.trajectories.records import Call, Role, Rollout, Task
from harnessrl_jax.trajectories.roles import call_roles, token_characters

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Token ids -> text, control tokens spelled out."""
Key: TypeAlias = tuple[str, str]
"""A session: agent and session_id."""

# A shorter argument stands inside a longer text by chance.
QUOTE_CHARACTERS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenView:
    """One sampled token: its text and its role."""

    text: str
    role: Role


@dataclass(frozen=True, kw_only=True, slots=True)
class CallView:
    """One model call.

    Attributes:
      call_id: of the record.
      seq: position among the requests of the rollout, from 0.
      link: extends, opens or rewrites, as in the lineage.
      state: live, superseded, rejected, auxiliary or undelivered.
      evidence: what link and state rest on.
      finish: why sampling ended.
      parse_status: what the tool-call parser said.
      version: weights that sampled it.
      advantage: credit of each of its tokens; None if they are not trained.
      mask_reason: why they are not trained; "" if they are.
      process_reward: of this call; None if it has none.
      continues: `seq` of the call whose prompt and output begin this prompt; None if there is none.
      shared_tokens: prompt tokens that come from that call.
      new_tokens: prompt tokens after those.
      new_prompt: text of the new ones.
      tokens: what was sampled.
      sessions: conversations that this call opened.
    """

    call_id: str
    seq: int
    link: str
    state: str
    evidence: str
    finish: str
    parse_status: str
    version: int
    advantage: float | None
    mask_reason: str
    process_reward: float | None
    continues: int | None
    shared_tokens: int
    new_tokens: int
    new_prompt: str
    tokens: tuple[TokenView, ...]
    sessions: tuple["SessionView", ...]

    @property
    def remark(self) -> str:
        """The evidence, where something other than going on happened; "" elsewhere."""
        return "" if self.state == "live" and self.link == "extends" else self.evidence


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionView:
    """One conversation of one agent, its calls in request order; `opened` says how its opener is known."""

    session_id: str
    agent: str
    trainable: bool
    opened: str
    calls: tuple[CallView, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutView:
    """One rollout: what was asked, what came out, and the forest of its sessions.

    Attributes:
      task_id: the problem.
      question: what the harness was asked; "" if unknown.
      answers: what would be right.
      rollout_id: with `attempt` unique in a run.
      attempt: 0 for the first try.
      status: completed, truncated, policy_failure or infra_failure.
      detail: the failure in words, or "".
      answer: what the harness answered, or None.
      reward: the verifier's, or None.
      version: weights when the rollout began.
      wall_s: how long it took.
      sessions: those that no call of the rollout is known to have opened, usually the central agent's.
    """

    task_id: str
    question: str
    answers: tuple[str, ...]
    rollout_id: str
    attempt: int
    status: str
    detail: str
    answer: str | None
    reward: float | None
    version: int
    wall_s: float
    sessions: tuple[SessionView, ...]

    def calls(self) -> Iterator[CallView]:
        """All calls; a call stands before the calls of the sessions it opened."""
        yield from _calls(self.sessions)


def view(
    rollout: Rollout,
    lineage: Lineage | None,
    decode: Decode,
    *,
    task: Task | None = None,
    advantages: Mapping[str, float] | None = None,
    reasons: Mapping[str, str] | None = None,
    untrained: str = "evaluation, not trained",
) -> RolloutView:
    """Arranges one attempt of one rollout for people.

    Args:
      rollout: the record.
      lineage: of its calls; None if it made none.
      decode: ids -> text.
      task: the problem; only for its question and answers.
      advantages: by call_id, of the calls that are trained.
      reasons: by call_id, why a live call is not trained, such as "too_long".
      untrained: why a live call of a trainable agent is not trained where `reasons` says nothing.

    Returns:
      The view.
    """
    linked = lineage.calls if lineage is not None else ()
    sessions: dict[Key, list[LinkedCall]] = {}
    for item in linked:
        sessions.setdefault((item.call.agent, item.call.session_id), []).append(item)
    openers = {key: found for key, items in sessions.items() if (found := _opener(items[0], linked)) is not None}
    source = _Source(rollout, decode, sessions, openers, advantages or {}, reasons or {}, untrained)
    return RolloutView(
        task_id=rollout.task_id,
        question=task.question if task is not None else "",
        answers=task.answers if task is not None else (),
        rollout_id=rollout.rollout_id,
        attempt=rollout.attempt,
        status=rollout.status,
        detail=rollout.detail,
        answer=rollout.answer,
        reward=rollout.reward,
        version=rollout.version,
        wall_s=rollout.finished_s - rollout.started_s,
        sessions=tuple(_session_view(source, key) for key in sessions if key not in openers),
    )


class _Source(NamedTuple):
    """What the parts of one view are made from."""

    rollout: Rollout
    decode: Decode
    sessions: Mapping[Key, Sequence[LinkedCall]]
    openers: Mapping[Key, tuple[str, str]]  # call_id and evidence
    advantages: Mapping[str, float]
    reasons: Mapping[str, str]
    untrained: str


def _session_view(source: _Source, key: Key) -> SessionView:
    items = source.sessions[key]
    return SessionView(
        session_id=key[1],
        agent=key[0],
        trainable=items[0].call.trainable,
        opened=source.openers[key][1] if key in source.openers else "",
        calls=tuple(_call_view(source, item) for item in items),
    )


def _call_view(source: _Source, item: LinkedCall) -> CallView:
    call = item.call
    calls = (other.call for items in source.sessions.values() for other in items)
    parent = next((other for other in calls if other.call_id == item.parent_call_id), None)
    shared = 0 if parent is None else len(parent.prompt_ids) + len(parent.output_ids)
    advantage = source.advantages.get(call.call_id)
    opened = [key for key, (opener, _) in source.openers.items() if opener == call.call_id]
    return CallView(
        call_id=call.call_id,
        seq=call.seq,
        link=item.link,
        state=item.state,
        evidence=item.evidence,
        finish=call.finish,
        parse_status=call.parse_status,
        version=call.version_end,
        advantage=advantage,
        mask_reason="" if advantage is not None else _mask_reason(source, item),
        process_reward=source.rollout.process_rewards.get(call.call_id),
        continues=None if parent is None else parent.seq,
        shared_tokens=shared,
        new_tokens=len(call.prompt_ids) - shared,
        new_prompt=source.decode(call.prompt_ids[shared:].tolist()),
        tokens=_tokens(call, source.decode),
        sessions=tuple(_session_view(source, key) for key in opened),
    )


def _mask_reason(source: _Source, item: LinkedCall) -> str:
    if not item.call.trainable:
        return "frozen agent"
    if item.state != "live":
        return item.state
    return source.reasons.get(item.call.call_id, source.untrained)


def _tokens(call: Call, decode: Decode) -> tuple[TokenView, ...]:
    text, _, ends = token_characters(call.output_ids.tolist(), decode)
    # A character that several tokens spell together is shown with the first of them.
    shown = np.maximum.accumulate(ends).tolist()
    pieces = [text[start:end] for start, end in zip([0, *shown], shown, strict=False)]
    return tuple(TokenView(text=piece, role=Role(int(role))) for piece, role in zip(pieces, call_roles(call)))


def _opener(first: LinkedCall, linked: Sequence[LinkedCall]) -> tuple[str, str] | None:
    """The call that opened a session, and how that is known; earlier requests only, so that no session opens itself."""
    session = (first.call.agent, first.call.session_id)
    earlier = [
        other.call
        for other in linked
        if other.call.seq < first.call.seq and (other.call.agent, other.call.session_id) != session
    ]
    for call in earlier:
        if call.call_id == first.opened_by:
            return call.call_id, "named by the harness"
    said = set(_strings(_json(first.call.request)))
    for call in reversed(earlier):
        asked = [text for tool in call.tool_calls for text in _strings(_json(tool.arguments))]
        if any(
            text in said or (len(text) >= QUOTE_CHARACTERS and any(text in part for part in said)) for text in asked
        ):
            return call.call_id, "its request quotes the arguments of this call"
    return None


def printable(text: str) -> str:
    r"""Text that cannot steer a terminal, reverse a line or break a file: what a model says is not to be trusted.

    >>> printable("a\x1b[31m b\x00 c\u202e d\ud800")
    'a␛[31m b␀ c[U+202E] d�'
    """
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    code, category = ord(character), unicodedata.category(character)
    if character in "\n\t" or category not in ("Cc", "Cf", "Cs"):
        return character
    if code < 0x20:
        return chr(0x2400 + code)
    return "\ufffd" if category == "Cs" else f"[U+{code:04X}]"


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _strings(value: Any) -> Iterator[str]:
    """All strings in a JSON value, keys left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def _calls(sessions: Sequence[SessionView]) -> Iterator[CallView]:
    for session in sessions:
        for call in session.calls:
            yield call
            yield from _calls(call.sessions)
