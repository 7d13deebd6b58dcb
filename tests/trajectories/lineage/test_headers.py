import json

import pytest

from harnessrl_jax.trajectories.headers import Claims, attribution, claims

CODEX = {"thread-id": "t1", "session-id": "t1"}


def metadata(**fields):
    return {"x-codex-turn-metadata": json.dumps({"session_id": "t1", "thread_id": "t1"} | fields)}


def test_no_secret_and_nothing_of_the_machine_is_kept():
    kept = attribution(
        {
            "Authorization": "Bearer key",
            "X-Api-Key": "key",
            "Cookie": "key",
            "Thread-Id": "t1",
            "X-Codex-Turn-Metadata": '{"thread_id": "t1", "installation_id": "mine", "workspaces": {"/home/me": {}}}',
        }
    )
    assert kept == {"thread-id": "t1", "x-codex-turn-metadata": '{"thread_id": "t1"}'}
    assert attribution({"x-codex-turn-metadata": "[" * 10_000}) == {"x-codex-turn-metadata": "{}"}


@pytest.mark.parametrize(
    ("headers", "want"),
    [
        # Claude Code: the session is the parent's, the agent id says who asks
        (
            {"x-claude-code-session-id": "s", "x-app": "cli"},
            Claims("s", False, None, "turn", None, "x-claude-code-session-id"),
        ),
        (
            {"x-claude-code-session-id": "s", "x-app": "cli-bg"},
            Claims("s", False, None, "background", None, "x-claude-code-session-id"),
        ),
        (
            {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"},
            Claims("a", True, "s", "turn", None, "x-claude-code-agent-id"),
        ),
        (
            {
                "x-claude-code-session-id": "s",
                "x-claude-code-agent-id": "b",
                "x-claude-code-parent-agent-id": "a",
            },
            Claims("b", True, "a", "turn", None, "x-claude-code-agent-id"),
        ),
        # Codex: the session is the root's, the thread says who asks, windows count compactions
        (CODEX, Claims("t1", False, None, "turn", None, "thread-id")),
        (CODEX | {"x-codex-window-id": "t1:3"}, Claims("t1", False, None, "turn", 3, "thread-id")),
        (metadata(window_number=2), Claims("t1", False, None, "turn", 2, "thread-id")),
        (
            metadata(window_number=0, request_kind="compaction"),
            Claims("t1", False, None, "compaction", 0, "thread-id"),
        ),
        (CODEX | {"x-openai-subagent": "compact"}, Claims("t1", False, None, "compaction", None, "thread-id")),
        (
            CODEX | {"x-openai-subagent": "memory_consolidation"},
            Claims("t1", False, None, "background", None, "thread-id"),
        ),
        (
            {"thread-id": "t2", "session-id": "t1", "x-openai-subagent": "collab_spawn"},
            Claims("t2", True, "t1", "turn", None, "thread-id"),
        ),
        (
            {"thread-id": "t3", "session-id": "t1", "x-codex-parent-thread-id": "t2"},
            Claims("t3", True, "t2", "turn", None, "thread-id"),
        ),
        # OpenCode: a sub-agent has a session of its own and names its parent's
        (
            {"x-session-id": "s", "x-session-affinity": "s"},
            Claims("s", False, None, "turn", None, "x-session-id"),
        ),
        (
            {"x-session-id": "c", "x-session-affinity": "c", "x-parent-session-id": "s"},
            Claims("c", True, "s", "turn", None, "x-parent-session-id"),
        ),
        # nobody in particular
        ({"x-session-id": "s"}, None),
        ({"x-app": "cli-bg"}, None),
        ({"x-codex-turn-metadata": "no json"}, None),
        ({}, None),
    ],
)
def test_what_the_headers_of_each_harness_claim(headers, want):
    assert claims(attribution(headers)) == want
