"""How each third-party harness is installed, pointed at an endpoint, and asked for one tool round trip."""

import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

PROGRAMS = pathlib.Path(__file__).parent / "programs"
TASK = "Run one shell command with your tool, then say what it printed."
# What is asked once the history is long enough to be summarised; the scripted model then calls no tool.
AFTERWARDS = "Answer without a tool: is anything left to do?"


class Place(NamedTuple):
    """Where a harness runs, and the endpoint it is given."""

    folder: pathlib.Path
    home: pathlib.Path
    work: pathlib.Path
    url: str
    key: str


def _nothing(place: Place) -> dict:
    return {}


class Recipe(NamedTuple):
    """One harness.

    Attributes:
      install: puts it below a folder; whether that worked.
      version: what is installed there, or None.
      commands: what to run, in order; each is asked for when those before it have ended.
      environment: variables besides those of `quiet`.
      files: files to write first.
      delegates: whether a sub-agent does the work.
      compacts: whether it replaces its history by a summary on the way.
    """

    install: Callable[[pathlib.Path], bool]
    version: Callable[[pathlib.Path], str | None]
    commands: Callable[[Place], Iterable[list[str]]]
    environment: Callable[[Place], dict[str, str]] = _nothing
    files: Callable[[Place], dict[pathlib.Path, str]] = _nothing
    delegates: bool = False
    compacts: bool = False


def quiet(place: Place) -> dict[str, str]:
    """The whole environment of a harness: nothing of the user's own, no telemetry, both endpoints."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(place.home),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "CI": "1",
        "NO_PROXY": "127.0.0.1,localhost",
        "DO_NOT_TRACK": "1",
        "OTEL_SDK_DISABLED": "true",
        "OPENAI_BASE_URL": f"{place.url}/v1",
        "OPENAI_API_KEY": place.key,
        "ANTHROPIC_BASE_URL": place.url,
        "ANTHROPIC_API_KEY": place.key,
    }


def npm(package: str, binary: str, **rest) -> Recipe:
    """A program from the npm registry."""
    tail = rest.pop("arguments")

    def install(folder: pathlib.Path) -> bool:
        command = ["npm", "install", "--prefix", str(folder / "npm"), "--no-audit", "--no-fund", package]
        return _done(command, folder)

    def version(folder: pathlib.Path) -> str | None:
        about = folder / "npm/node_modules" / package / "package.json"
        return json.loads(about.read_text())["version"] if about.exists() else None

    def commands(place: Place) -> Iterable[list[str]]:
        program = str(place.folder / "npm/node_modules/.bin" / binary)
        return ([program, *arguments] for arguments in tail(place))

    return Recipe(install, version, commands, **rest)


def python(name: str, requirements: list[str], program: str, *given: str, interpreter: str = "3.11", **rest) -> Recipe:
    """A library from PyPI, in an environment of its own, with a short program of ours, which is given the arguments."""
    package = re.split(r"[\[=<>]", requirements[0])[0]

    def install(folder: pathlib.Path) -> bool:
        home = folder / "py" / name
        made = _done(["uv", "venv", "--allow-existing", "--python", interpreter, str(home)], folder)
        return made and _done(["uv", "pip", "install", "--python", str(home / "bin/python"), *requirements], folder)

    def version(folder: pathlib.Path) -> str | None:
        asked = f"import importlib.metadata as m; print(m.version({package!r}))"
        try:
            done = subprocess.run([folder / "py" / name / "bin/python", "-c", asked], capture_output=True, text=True)
        except FileNotFoundError:
            return None
        return done.stdout.strip() or None

    return Recipe(
        install,
        version,
        lambda place: [[str(place.folder / "py" / name / "bin/python"), str(PROGRAMS / program), *given]],
        **rest,
    )


def _done(command: list[str], folder: pathlib.Path) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    return subprocess.run(command, stdout=sys.stderr).returncode == 0


def _claude(place: Place) -> dict[str, str]:
    return {
        "ANTHROPIC_MODEL": "policy",
        "ANTHROPIC_SMALL_FAST_MODEL": "policy",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "2048",
    }


def _codex(place: Place, task: str = TASK) -> list[list[str]]:
    provider = f'{{name="local",base_url="{place.url}/v1",env_key="OPENAI_API_KEY",wire_api="responses"}}'
    options = ["model=policy", "model_provider=local", f"model_providers.local={provider}", "analytics.enabled=false"]
    given = [part for option in options for part in ("-c", option)]
    return [["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", *given, "--json", task]]


def _codex_compact(place: Place) -> list[list[str]]:
    [first] = _codex(place)
    options = first[1:-2]
    return [first, ["exec", *options, "-c", "model_auto_compact_token_limit=100", "resume", "--last", AFTERWARDS]]


def _opencode(place: Place) -> dict[pathlib.Path, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{place.url}/v1", "apiKey": place.key},
        "models": {"policy": {"name": "policy", "limit": {"context": 200_000, "output": 2048}}},
    }
    document = {
        "provider": {"local": provider},
        "model": "local/policy",
        "small_model": "local/policy",
        "autoupdate": False,
        "share": "disabled",
        "permission": "allow",
    }
    return {place.work / "opencode.json": json.dumps(document)}


def _opencode_compact(place: Place) -> Iterable[list[str]]:
    """A long task; then the model is said to have room for little more than what opencode says before any task."""
    yield ["run", "-m", "local/policy", "Nothing of this matters for the task. " * 300 + TASK]
    [(path, text)] = _opencode(place).items()
    document = json.loads(text) | {"compaction": {"auto": True, "tail_turns": 0}}
    document["provider"]["local"]["models"]["policy"]["limit"] = {"context": 22_000, "output": 2048}
    path.write_text(json.dumps(document))
    yield ["run", "-c", "-m", "local/policy", AFTERWARDS]


def _pi(place: Place) -> dict[pathlib.Path, str]:
    model = {"id": "policy", "contextWindow": 200_000, "maxTokens": 2048, "input": ["text"], "reasoning": False}
    provider = {
        "baseUrl": f"{place.url}/v1",
        "api": "openai-completions",
        "apiKey": place.key,
        "models": [model | {"name": "policy", "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}}],
    }
    return {place.home / ".pi/agent/models.json": json.dumps({"providers": {"local": provider}})}


def _pi_compact(place: Place) -> dict[pathlib.Path, str]:
    settings = {"compaction": {"enabled": True, "reserveTokens": 199_900, "keepRecentTokens": 1}}
    return _pi(place) | {place.home / ".pi/agent/settings.json": json.dumps(settings)}


def _qwen(place: Place) -> dict[pathlib.Path, str]:
    settings = {
        "telemetry": {"enabled": False},
        "privacy": {"usageStatisticsEnabled": False},
        "memory": {"enableManagedAutoMemory": False},
    }
    return {place.home / ".qwen/settings.json": json.dumps(settings)}


def _cline(place: Place, task: str) -> list[list[str]]:
    return [
        ["auth", "-p", "openai", "-k", place.key, "-m", "policy", "-b", f"{place.url}/v1"],
        ["-P", "openai", "-m", "policy", "--json", task],
    ]


_CLAUDE = ("--model", "policy", "--output-format", "json", "--allowedTools", "Bash")
_QWEN = ("--auth-type", "openai", "--yolo")
_OPENCODE = dict.fromkeys(
    ("OPENCODE_DISABLE_AUTOUPDATE", "OPENCODE_DISABLE_MODELS_FETCH", "OPENCODE_DISABLE_LSP_DOWNLOAD"), "1"
)
_LITELLM = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_SILENT_STARTUP": "1"}

ALL: dict[str, Recipe] = {
    "claude-code": npm(
        "@anthropic-ai/claude-code", "claude", environment=_claude,
        arguments=lambda place: [["-p", TASK, *_CLAUDE]],
    ),
    "claude-code-bare": npm(
        "@anthropic-ai/claude-code", "claude", environment=_claude,
        arguments=lambda place: [["--bare", "-p", TASK, *_CLAUDE]],
    ),
    "claude-code-subagent": npm(
        "@anthropic-ai/claude-code", "claude", environment=_claude, delegates=True,
        arguments=lambda place: [["-p", f"Delegate to general-purpose: {TASK}", *_CLAUDE, "Agent", "Task"]],
    ),
    "claude-code-compact": npm(
        "@anthropic-ai/claude-code", "claude", environment=_claude, compacts=True,
        arguments=lambda place: [
            ["-p", TASK, *_CLAUDE],
            ["-c", "-p", "/compact", *_CLAUDE],
            ["-c", "-p", TASK, *_CLAUDE],
        ],
    ),
    "codex": npm("@openai/codex", "codex", arguments=_codex),
    "codex-subagent": npm(
        "@openai/codex", "codex", delegates=True,
        arguments=lambda place: _codex(place, f"Delegate to default: {TASK}"),
    ),
    "codex-compact": npm("@openai/codex", "codex", arguments=_codex_compact, compacts=True),
    "opencode": npm(
        "opencode-ai", "opencode", files=_opencode,
        environment=lambda place: _OPENCODE,
        arguments=lambda place: [["run", "-m", "local/policy", TASK]],
    ),
    "opencode-subagent": npm(
        "opencode-ai", "opencode", files=_opencode, delegates=True,
        environment=lambda place: _OPENCODE,
        arguments=lambda place: [["run", "-m", "local/policy", f"Delegate to general: {TASK}"]],
    ),
    "opencode-compact": npm(
        "opencode-ai", "opencode", files=_opencode, compacts=True,
        environment=lambda place: _OPENCODE,
        arguments=_opencode_compact,
    ),
    "qwen-code": npm(
        "@qwen-code/qwen-code", "qwen", files=_qwen,
        environment=lambda place: {"OPENAI_MODEL": "policy"},
        arguments=lambda place: [[*_QWEN, "-p", TASK]],
    ),
    "qwen-code-subagent": npm(
        "@qwen-code/qwen-code", "qwen", files=_qwen, delegates=True,
        environment=lambda place: {"OPENAI_MODEL": "policy"},
        arguments=lambda place: [[*_QWEN, "-p", f"Delegate to general-purpose: {TASK}"]],
    ),
    "qwen-code-compact": npm(
        "@qwen-code/qwen-code", "qwen", files=_qwen, compacts=True,
        environment=lambda place: {"OPENAI_MODEL": "policy"},
        arguments=lambda place: [
            [*_QWEN, "-p", TASK],
            [*_QWEN, "-c", "-p", "/compress"],
            [*_QWEN, "-c", "-p", AFTERWARDS],
        ],
    ),
    "pi": npm(
        "@mariozechner/pi-coding-agent", "pi", files=_pi,
        environment=lambda place: {"PI_OFFLINE": "1"},
        arguments=lambda place: [["-p", "--provider", "local", "--model", "policy", TASK]],
    ),
    "pi-compact": npm(
        "@mariozechner/pi-coding-agent", "pi", files=_pi_compact, compacts=True,
        environment=lambda place: {"PI_OFFLINE": "1"},
        arguments=lambda place: [
            ["-p", "--provider", "local", "--model", "policy", TASK],
            ["-c", "-p", "--provider", "local", "--model", "policy", AFTERWARDS],
        ],
    ),
    "cline": npm("cline", "cline", arguments=lambda place: _cline(place, TASK)),
    "cline-subagent": npm(
        "cline", "cline", delegates=True,
        arguments=lambda place: _cline(place, f"Delegate to any: {TASK}"),
    ),
    "mini-swe-agent": python(
        "mini-swe-agent", ["mini-swe-agent"], "mini_swe.py", environment=lambda place: _LITELLM
    ),
    "openhands": python(
        "openhands", ["openhands-sdk", "openhands-tools"], "openhands_agent.py", interpreter="3.12",
        environment=lambda place: _LITELLM,
    ),
    "openhands-subagent": python(
        "openhands", ["openhands-sdk", "openhands-tools"], "openhands_delegates.py",
        f"Delegate to general-purpose: {TASK}", interpreter="3.12", environment=lambda place: _LITELLM, delegates=True,
    ),
    "openhands-compact": python(
        "openhands", ["openhands-sdk", "openhands-tools"], "openhands_condenses.py", AFTERWARDS, interpreter="3.12",
        environment=lambda place: _LITELLM, compacts=True,
    ),
    "openai-agents": python("openai-agents", ["openai-agents"], "openai_agents_chat.py"),
    "openai-agents-responses": python("openai-agents", ["openai-agents"], "openai_agents_responses.py"),
    "pydantic-ai": python("pydantic-ai", ["pydantic-ai-slim[openai,anthropic]"], "pydantic_ai_chat.py"),
    "pydantic-ai-messages": python("pydantic-ai", ["pydantic-ai-slim[openai,anthropic]"], "pydantic_ai_messages.py"),
    "langgraph": python("langgraph", ["langgraph", "langchain", "langchain-openai"], "langgraph_react.py"),
    "smolagents": python("smolagents", ["smolagents[openai]"], "smolagents_tools.py"),
    "claude-agent-sdk": python("claude-agent-sdk", ["claude-agent-sdk"], "claude_agent.py", environment=_claude),
}  # fmt: skip
