"""Calls of a rollout, their lineage and credit -> one plain view, which the terminal and the report both draw."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from harnessrl_jax.monitor.views import CallView, ForkView, RolloutView, SessionView, TokenView
from harnessrl_jax.trajectories.evidence import AgentSource, EvidenceKind, Fork
from harnessrl_jax.trajectories.lineage import Lineage, LinkedCall
from harnessrl_jax.trajectories.records import Call, Role, Rollout, Task
from harnessrl_jax.trajectories.roles import call_roles, token_characters

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Token ids -> text, control tokens spelled out."""
Key: TypeAlias = str
"""A conversation: the call_id of the call that opened it."""

_OPENED: Mapping[EvidenceKind, str] = {
    "named_opener": "named by the harness",
    "quoted_arguments": "its request quotes the arguments of this call",
    "harness_header": "a header names the agent that waits for it",
}
_TOLD: Mapping[AgentSource, str] = {
    "name": "",
    "header": "a header",
    "fingerprint": "its instructions and tools",
    "prefix": "its tokens alone",
}


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
        sessions.setdefault(item.session, []).append(item)
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
        session_id=items[0].call.session_id,
        agent=str(items[0].agent),
        told_by=_TOLD[items[0].agent.source],
        trainable=items[0].call.trainable,
        opened=source.openers[key][1] if key in source.openers else "",
        calls=tuple(_call_view(source, item) for item in items),
    )


def _call_view(source: _Source, item: LinkedCall) -> CallView:
    call = item.call
    known = {other.call.call_id: other.call for items in source.sessions.values() for other in items}
    parent = known[item.parent_call_id] if item.parent_call_id is not None else None
    shared = 0 if parent is None else len(parent.prompt_ids) + len(parent.output_ids)
    advantage = source.advantages.get(call.call_id)
    opened = [key for key, (opener, _) in source.openers.items() if opener == call.call_id]
    return CallView(
        call_id=call.call_id,
        seq=call.seq,
        link=item.link,
        state=item.state,
        evidence=_remark(item),
        fork=None if item.fork is None else _fork_view(item.fork, known[item.fork.from_call_id].seq, source.decode),
        sibling_of=None if item.sibling_of is None else known[item.sibling_of].seq,
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


def _fork_view(fork: Fork, from_seq: int, decode: Decode) -> ForkView:
    before, after = fork.before_text, fork.after_text
    return ForkView(
        category=fork.category,
        from_seq=from_seq,
        position=fork.position,
        before=decode(fork.before) if before is None else before,
        after=decode(fork.after) if after is None else after,
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
    """The call that opened a session, and how that is known; of another session, so that none opens itself."""
    for other in linked:
        if other.call.call_id == first.opened_by and other.session != first.session:
            found = next(item for item in first.evidence if (item.about, item.call_id) == ("opener", first.opened_by))
            return other.call.call_id, _OPENED[found.kind]
    return None


def _remark(item: LinkedCall) -> str:
    """The evidence of a call, without what already shows in where its session stands."""
    return "; ".join(one.words for one in item.evidence if one.about != "opener" or item.opened_by is None)
