"""Calls -> who made them. The name is recorded; what tells several agents under one name apart is recorded with it.

A header of the harness wins. Without one, conversations with the same instructions and tools are one agent's. Where
the requests cannot be read, only the token lineage is left, which cannot tell agents apart: they stay one.
"""

from collections.abc import Collection, Mapping, Sequence

from harnessrl_jax.trajectories.evidence import Agent
from harnessrl_jax.trajectories.headers import Claims
from harnessrl_jax.trajectories.records import Call
from harnessrl_jax.trajectories.requests import Asked


def header_threads(calls: Sequence[Call], said: Sequence[Claims | None]) -> list[str]:
    """The thread of each call as its headers give it; "" for the main agent, and where no header says anything.

    Args:
      calls: of one attempt, in request order.
      said: what the headers of each say.
    """
    main: dict[str, str] = {}
    out: list[str] = []
    for call, claim in zip(calls, said, strict=True):
        if claim is None:
            out.append("")
            continue
        is_main = not claim.subagent and claim.thread == main.setdefault(call.agent, claim.thread)
        out.append("" if is_main else claim.thread)
    return out


def name_agents(
    calls: Sequence[Call],
    said: Sequence[Claims | None],
    sessions: Sequence[int],
    heads: Mapping[int, Asked | None],
    side: Collection[int],
) -> list[Agent]:
    """The agent of each call.

    Args:
      calls: of one attempt, in request order.
      said: what the headers of each say.
      sessions: for each call the number of the call that opened its conversation.
      heads: what those opening calls asked; None where it cannot be read.
      side: numbers of opening calls that serve the harness and not the task; they do not become the main agent.

    Returns:
      The agents. A thread that no header names is "" for the main agent and "#2", "#3", ... for others.
    """
    threads = header_threads(calls, said)
    known: dict[str, dict[tuple[str, str], str]] = {}
    labels: dict[int, str] = {}
    for opening in sorted({session for session in sessions if said[session] is None}, key=lambda i: (i in side, i)):
        head, prints = heads[opening], known.setdefault(calls[opening].agent, {})
        if head is not None:
            label = f"#{len(prints) + 1}" if prints else ""
            labels[opening] = prints.setdefault((head.instructions, head.tools), label)
    openings: dict[str, set[int]] = {}
    for call, session in zip(calls, sessions, strict=True):
        openings.setdefault(call.agent, set()).add(session)
    out: list[Agent] = []
    for number, (call, session) in enumerate(zip(calls, sessions, strict=True)):
        if said[number] is not None:
            out.append(Agent(call.agent, threads[number], "header"))
        elif len(known.get(call.agent, {})) > 1 and session in labels:
            out.append(Agent(call.agent, labels[session], "fingerprint"))
        else:
            told = session in labels or len(openings[call.agent]) == 1
            out.append(Agent(call.agent, "", "name" if told else "prefix"))
    return out
