"""The prompts and tools of the multi-hop harness, read from the file the harness program itself reads."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROMPTS: Mapping[str, Any] = json.loads(
    (Path(__file__).parent.parent / "harnesses" / "multihop" / "prompts.json").read_text(encoding="utf-8")
)
"""Keys: `agents` (system prompt, tools and most calls of each), `tools` (OpenAI form), `search_results`, `replies`."""

FINAL: Mapping[str, str] = {"central": "answer", "researcher": "report"}
"""The tool that ends each agent's conversation."""


def parameter_of(tool: str) -> str:
    """The name of a tool's one parameter."""
    return PROMPTS["tools"][tool]["function"]["parameters"]["required"][0]


def tools_of(agent: str) -> list[Mapping[str, Any]]:
    """The tools of one agent in OpenAI form, in the order they are shown."""
    return [PROMPTS["tools"][name] for name in PROMPTS["agents"][agent]["tools"]]
