"""Headers of a request -> what the harness says about who is asking. Pure.

Headers are hints: a client may send anything, so they attribute calls and never authorise them. What is kept here is a
fixed list of names, none of which carries a key.
"""

import json
from collections.abc import Mapping
from typing import Literal, NamedTuple

from harnessrl_jax.trajectories.requests import json_object

RequestKind = Literal["turn", "compaction", "background"]

KEPT = (
    # any harness
    "x-session-id",
    "x-parent-session-id",
    "x-parent-tool-call-id",
    "x-stainless-retry-count",
    # OpenCode
    "x-session-affinity",
    "x-opencode-session",
    # Claude Code
    "x-claude-code-session-id",
    "x-claude-code-agent-id",
    "x-claude-code-parent-agent-id",
    "x-app",
    # Codex
    "session-id",
    "thread-id",
    "x-codex-parent-thread-id",
    "x-codex-window-id",
    "x-codex-turn-metadata",
    "x-openai-subagent",
    "x-openai-memgen-request",
)
# The metadata also name folders and commits of the machine, which nobody needs here.
_METADATA = (
    "session_id",
    "thread_id",
    "parent_thread_id",
    "agent_name",
    "thread_source",
    "request_kind",
    "window_number",
)
_BACKGROUND_KINDS = ("memory", "memory_consolidation")


class Claims(NamedTuple):
    """What the headers of one request say.

    Attributes:
      thread: the conversation holder: a session, or a sub-agent inside it.
      subagent: whether it is a sub-agent.
      parent: the thread that it belongs to, if it is one.
      kind: a turn of the task, a request to sum the history up, or background work of the harness.
      window: how often the history was compacted before; None if unknown.
      source: names of the headers that say so.
    """

    thread: str
    subagent: bool
    parent: str | None
    kind: RequestKind
    window: int | None
    source: str


def attribution(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that say who asked, with lower-case names; all others, and with them every secret, are left out.

    Args:
      headers: of a request, names in any case.

    Returns:
      The headers to keep with the call.

    Example:
      >>> attribution({"Authorization": "Bearer x", "X-Claude-Code-Session-Id": "s"})
      {'x-claude-code-session-id': 's'}
    """
    lower = {name.lower(): value for name, value in headers.items()}
    kept = {name: lower[name] for name in KEPT if name in lower}
    if "x-codex-turn-metadata" in kept:
        metadata = json_object(kept["x-codex-turn-metadata"])
        kept["x-codex-turn-metadata"] = json.dumps({key: metadata[key] for key in _METADATA if key in metadata})
    return kept


def claims(headers: Mapping[str, str]) -> Claims | None:
    """Reads the headers of Claude Code, Codex and OpenCode; None if they say nothing about who asked.

    Claude Code sends its session with every request, and the id of the agent with those of a sub-agent. Codex sends
    the root session and the thread, and counts the windows that compaction opens. OpenCode gives a sub-agent a session
    of its own and names the parent's.
    """
    if headers.get("x-claude-code-session-id") or headers.get("x-claude-code-agent-id"):
        return _claude_code(headers)
    if headers.get("thread-id") or headers.get("x-codex-turn-metadata"):
        return _codex(headers)
    return _opencode(headers)


def _claude_code(headers: Mapping[str, str]) -> Claims:
    session = headers.get("x-claude-code-session-id", "")
    agent = headers.get("x-claude-code-agent-id", "")
    kind: RequestKind = "background" if headers.get("x-app") == "cli-bg" else "turn"
    if not agent:
        return Claims(session, False, None, kind, None, "x-claude-code-session-id")
    parent = headers.get("x-claude-code-parent-agent-id") or session
    return Claims(agent, True, parent, kind, None, "x-claude-code-agent-id")


def _codex(headers: Mapping[str, str]) -> Claims | None:
    metadata = json_object(headers.get("x-codex-turn-metadata", ""))
    thread, session, parent = (
        headers.get(header) or str(metadata.get(key) or "")
        for header, key in (
            ("thread-id", "thread_id"),
            ("session-id", "session_id"),
            ("x-codex-parent-thread-id", "parent_thread_id"),
        )
    )
    if not thread:
        return None
    label = headers.get("x-openai-subagent", "")
    request = metadata.get("request_kind")
    kind: RequestKind = "turn"
    if label == "compact" or request == "compaction":
        kind = "compaction"
    elif label in _BACKGROUND_KINDS or request in _BACKGROUND_KINDS or headers.get("x-openai-memgen-request") == "true":
        kind = "background"
    window = str(metadata.get("window_number", headers.get("x-codex-window-id", "").rpartition(":")[2]))
    number = int(window[:9]) if window.isascii() and window.isdigit() else None
    subagent = thread != session and bool(session)
    return Claims(thread, subagent, (parent or session) if subagent else None, kind, number, "thread-id")


def _opencode(headers: Mapping[str, str]) -> Claims | None:
    session = headers.get("x-opencode-session") or headers.get("x-session-id", "")
    parent = headers.get("x-parent-session-id")
    if session and parent and parent != session:
        return Claims(session, True, parent, "turn", None, "x-parent-session-id")
    if session and (headers.get("x-session-affinity") or headers.get("x-opencode-session")):
        return Claims(session, False, None, "turn", None, "x-session-id")
    return None
