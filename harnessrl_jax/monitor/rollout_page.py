"""Views of rollouts -> HTML: the forest of each, its calls, and their sampled tokens by role and advantage."""

import itertools
from collections.abc import Sequence
from html import escape

from harnessrl_jax.monitor.terminal import shorten
from harnessrl_jax.monitor.views import CallView, ForkView, RolloutView, SessionView, TokenView, printable
from harnessrl_jax.trajectories.records import Role

CLASSES = {Role.ACTION: "action", Role.ARGS: "args", Role.OTHER: "other", Role.NONE: "other"}
PROMPT_CHARACTERS = 6000
UNTRAINED = 0.3  # strength of the colour where there is no advantage to show
ROLES = ((Role.ACTION, "action: the tool's name"), (Role.ARGS, "arguments"), (Role.OTHER, "everything else sampled"))


def rollouts_html(before: Sequence[RolloutView], after: Sequence[RolloutView]) -> str:
    """Rollouts of the same task together, those before training first.

    Args:
      before: of the untrained policy.
      after: of the trained policy.

    Returns:
      HTML of one legend and one card per task. All text of models, tools and tasks is escaped.
    """
    strongest = max((abs(c.advantage) for r in (*before, *after) for c in r.calls() if c.advantage), default=0.0)
    tasks = dict.fromkeys(rollout.task_id for rollout in (*after, *before))
    cards = []
    for number, task in enumerate(tasks):
        labelled = [("before", r) for r in before if r.task_id == task] + [
            ("after", r) for r in after if r.task_id == task
        ]
        shown = [_rollout(when, r, strongest, opened=number == 0) for when, r in labelled]
        cards.append(f'<article class="card task">{_question(labelled[0][1])}{"".join(shown)}</article>')
    return _key() + "".join(cards)


def forests_html(rollouts: Sequence[RolloutView]) -> str:
    """Some rollouts, each with its forest open.

    Args:
      rollouts: in the order to show.

    Returns:
      HTML of one legend and one card per rollout. All text of models, tools and tasks is escaped.
    """
    strongest = max((abs(call.advantage) for r in rollouts for call in r.calls() if call.advantage), default=0.0)
    cards = (
        f'<article class="card task">{_question(rollout)}{_rollout("", rollout, strongest, opened=True)}</article>'
        for rollout in rollouts
    )
    return _key() + "".join(cards)


def text(value: str) -> str:
    """Untrusted text, harmless inside HTML."""
    return escape(printable(value))


def _key() -> str:
    roles = "".join(_tokens([TokenView(text=label, role=role)], 0.0, 0.5) for role, label in ROLES)
    plus = _tokens([TokenView(text="positive", role=Role.OTHER)], 0.1, 0.0)
    minus = _tokens([TokenView(text="negative", role=Role.OTHER)], -0.1, 0.0)
    scale = f"<span>stronger colour: larger advantage, {plus} or {minus}</span>"
    return f'<div class="key">Sampled tokens: {roles} {scale}</div>'


def _question(rollout: RolloutView) -> str:
    wanted = " or ".join(text(answer) for answer in rollout.answers) or "unknown"
    title = text(rollout.question or rollout.task_id)
    return f'<div><h3>{title}</h3><span class="soft">Right answer: {wanted}</span></div>'


def _rollout(when: str, rollout: RolloutView, strongest: float, *, opened: bool) -> str:
    answer = f"“{text(rollout.answer)}”" if rollout.answer is not None else "no answer"
    reward = "no reward" if rollout.reward is None else f"reward {rollout.reward:.2f}"
    good = "up" if (rollout.reward or 0.0) >= 0.5 else "down"
    calls = sum(1 for _ in rollout.calls())
    status = "" if rollout.status == "completed" else _chip(rollout.status.replace("_", " "), "down")
    moment = _chip(f"{when} training", "when") if when else ""
    summary = (
        f"<summary>{moment}<span>{answer}</span>{_chip(reward, good)}{status}"
        f'<span class="soft">{calls} calls, {rollout.wall_s:.1f} s, weights {rollout.version}, '
        f"rollout {text(rollout.rollout_id)}</span></summary>"
    )
    detail = f'<p class="note">{text(rollout.detail)}</p>' if rollout.detail else ""
    forest = (
        "".join(_session(session, strongest) for session in rollout.sessions) or '<p class="note">No model call.</p>'
    )
    return f'<details{" open" if opened else ""}>{summary}<div class="forest">{detail}{forest}</div></details>'


def _session(session: SessionView, strongest: float) -> str:
    kind = "session trainable" if session.trainable else "session"
    who = f"<b>{text(session.agent)}</b> · session {text(session.session_id)} · "
    who += "trained" if session.trainable else "frozen"
    who += f" · told apart by {text(session.told_by)}" if session.told_by else ""
    who += f" · {session.opened}" if session.opened else ""
    calls = "".join(_call(call, strongest) for call in session.calls)
    return f'<div class="{kind}"><div class="who">{who}</div>{calls}</div>'


def _call(call: CallView, strongest: float) -> str:
    facts = [f'<b title="{text(call.call_id)}">#{call.seq}</b>']
    if call.advantage is None:
        facts.append(_chip(f"not trained: {call.mask_reason}"))
    else:
        sign = "up" if call.advantage > 0 else "down" if call.advantage < 0 else ""
        facts.append(_chip(f"advantage {call.advantage:+.3f}", sign))
    if call.process_reward is not None:
        facts.append(_chip(f"process reward {call.process_reward:g}"))
    if call.state not in ("live", call.mask_reason):
        facts.append(_chip(call.state, "down"))
    if call.parse_status not in ("ok", "none"):
        facts.append(_chip(f"{call.parse_status} tool call", "down"))
    if call.finish in ("length", "aborted", "error"):
        facts.append(_chip(f"ended by {call.finish}", "down"))
    if call.sibling_of is not None:
        facts.append(_chip(f"asks again what #{call.sibling_of} asked"))
    if call.fork is not None:
        facts.append(_chip(f"{call.link}: {call.fork.category}", "down"))
    facts.append(f'<span class="soft">weights {call.version}</span>')
    strength = UNTRAINED if call.advantage is None else abs(call.advantage) / (strongest or 1.0)
    prompt = text(shorten(call.new_prompt, PROMPT_CHARACTERS).strip("\n"))
    known = "" if call.continues is None else f" after the {call.shared_tokens:,} of call #{call.continues}"
    opened = "" if call.continues is None else " open"
    remark = f" · {text(call.remark)}" if call.remark else ""
    return (
        f'<div class="call{" off" if call.advantage is None and call.state != "live" else ""}">'
        f'<div class="facts">{"".join(facts)}</div>{_fork(call.fork)}'
        f"<details{opened}><summary>prompt: {call.new_tokens:,} new tokens{known}{remark}</summary>"
        f'<div class="text in">{prompt}</div></details>'
        f'<div class="text out">{_tokens(call.tokens, call.advantage, strength)}</div>'
        f"{''.join(_session(session, strongest) for session in call.sessions)}</div>"
    )


def _fork(fork: ForkView | None) -> str:
    """The text of the history that is gone, and what stands there now."""
    if fork is None:
        return ""
    return (
        f'<div class="text fork">after {fork.position:,} shared tokens of call #{fork.from_seq}: '
        f"<del>{text(fork.before) or 'nothing'}</del> <ins>{text(fork.after) or 'nothing'}</ins></div>"
    )


def _tokens(tokens: Sequence[TokenView], advantage: float | None, strength: float) -> str:
    """Runs of one role, a `<u>` for each token: the colour is the role, its strength |A|, the line below its sign."""
    sign = " plus" if advantage and advantage > 0 else " minus" if advantage and advantage < 0 else ""
    runs = []
    for role, run in itertools.groupby(tokens, key=lambda token: token.role):
        pieces = "".join(f"<u>{text(token.text)}</u>" for token in run)
        runs.append(
            f'<span class="run {CLASSES[role]}{sign}" style="--w:{strength:.2f}" title="{role.name}">{pieces}</span>'
        )
    return "".join(runs)


def _chip(label: str, kind: str = "") -> str:
    return f'<span class="chip {kind}">{text(label)}</span>'
