"""`launch serve` with a scripted model: it calls one of the tools it is offered, and answers once it has a result.

    python tests/harnesses/tool_caller.py MODEL_FOLDER RUN_FOLDER

Everything but the sampler is what `python -m harnessrl_jax.launch serve` runs.
"""

import json
import pathlib
import re
import sys
from typing import Any

import numpy as np
from recipes import AFTERWARDS

from harnessrl_jax import config
from harnessrl_jax.gateway import TextCodec
from harnessrl_jax.launch.serve import Serving, address_of, serve
from harnessrl_jax.sampler.protocol import Sample, SampleRequest
from harnessrl_jax.trajectories.records import LogpKind

CONTEXT_TOKENS = 400_000
COMMAND = "echo the-tool-was-run"
FINAL = "The round trip is complete."
# Without tools a harness asks for its own ends, mostly for a title.
LABEL = "One shell command and what it printed"
_TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)
_SHELLS = (
    *("bash", "shell", "exec_command", "run_shell_command", "execute_command", "run_commands", "terminal"),
    *("execute_bash", "local_shell", "search", "lookup"),
)
# Tools by which some harnesses want to be told that the task is done.
_ENDINGS = {"final_answer": "answer", "finish": "message", "attempt_completion": "result", "submit_and_exit": "result"}
# A task that begins so is given to a sub-agent of that type, which gets the rest of it as its own task.
_DELEGATE = re.compile(r"Delegate to (\S+): ([^\n<]+)")
_DELEGATES = ("agent", "task", "spawn_agent")
# Where a sub-agent is only started, another tool waits for it, by the name that starting it gave.
_WAITS = "wait_agent"
_AGENT_ID = re.compile(r"agent_id\W+([\w-]+)")
# What harnesses ask for when they replace a history by its summary, and what they get.
_SUMMARISE = re.compile(r"(?i)\b(?:create|provide|write)\b[^.\n]{0,60}\bsummary\b|generate the <state_snapshot>")
SUMMARY = (
    "The user wanted one shell command to be run with the tool. The command was run, and what it printed was told to "
    "the user. No file was changed, and there is nothing left to do of what was asked so far."
)
# The second is what opencode says after it has summed up.
_NOTHING_LEFT = (AFTERWARDS, "Continue if you have next steps")
_SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class ToolCaller:
    """A Sampler whose replies follow from the prompt alone."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._version = 0

    async def start(self) -> None:
        """Nothing to take."""

    async def complete(self, request: SampleRequest) -> Sample:
        """The reply that the prompt calls for, cut at the request's length."""
        ids = self._codec.encode(reply(self._codec.decode(request.prompt_ids)), "")
        ids = [*ids, self._codec.stop_ids[0]][: request.max_new_tokens]
        if request.on_tokens is not None:
            request.on_tokens(ids)
        return Sample(
            output_ids=np.array(ids, np.int32),
            logps=np.full(len(ids), -0.5, np.float32),
            logp_kind=LogpKind(mode="processed", temperature=request.temperature, top_p=request.top_p, top_k=0),
            versions=np.full(len(ids), self._version, np.int32),
            finish="stop" if ids[-1] == self._codec.stop_ids[0] else "length",
        )

    def load_weights(self, params: Any, version: int) -> None:
        """Counts the version."""
        self._version = version

    async def close(self) -> None:
        """Nothing to give back."""


def reply(prompt: str) -> str:
    """A tool call for the first result, the end of the task after it, plain text where no tool is offered.

    The summary where the last message asks for one.
    """
    tools = offered(prompt)
    after = prompt.rpartition("</tools>")[2]
    done = "<tool_response>" in after or "Calling tools:" in after
    last = after.rpartition("<|im_start|>user")[2]
    if _SUMMARISE.search(last) or (not tools and "summar" in last.lower()):
        return SUMMARY
    if not tools:
        return LABEL
    if any(asked in last for asked in _NOTHING_LEFT):
        return FINAL
    given = _DELEGATE.search(after)
    if given and (delegated := delegation(tools, given, after)):
        return delegated
    if not done:
        name = next((name for wanted in _SHELLS for name in tools if name.lower().endswith(wanted)), next(iter(tools)))
        return call(name, arguments(tools[name], "hello"))
    ending = next((name for name in tools if name in _ENDINGS), None)
    if ending is not None:
        return call(ending, arguments(tools[ending], FINAL))
    if _SUBMIT in prompt:
        return call("bash", {"command": f"echo {_SUBMIT}; echo '{FINAL}'"})
    return FINAL


def delegation(tools: dict[str, Any], given: re.Match[str], after: str) -> str | None:
    """The call that hands the task to a sub-agent, or that waits for one; None where neither is left to do."""
    by_last_name = {re.split(r"\W|__", name.lower())[-1]: name for name in tools}
    results = after.count("<tool_response>")
    delegate = next((by_last_name[name] for name in _DELEGATES if name in by_last_name), None)
    if results == 0 and delegate:
        said = {"description": "one command", "subagent_type": given[1], "systemPrompt": "You run commands."}
        said |= dict.fromkeys(("prompt", "message", "task"), given[2])
        return call(delegate, {name: said[name] for name in tools[delegate].get("properties", {}) if name in said})
    started = _AGENT_ID.search(after.rpartition("<tool_response>")[2])
    if results == 1 and _WAITS in by_last_name and started:
        return call(by_last_name[_WAITS], {"targets": [started[1]]})
    return None


def offered(prompt: str) -> dict[str, Any]:
    """The parameters of each tool that the prompt describes, by name."""
    block = _TOOLS.search(prompt)
    tools = [json.loads(line) for line in block.group(1).splitlines() if line.strip()] if block else []
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}


def call(name: str, given: dict[str, Any]) -> str:
    """A tool call as the template writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': given})}\n</tool_call>"


def arguments(schema: dict[str, Any], text: str) -> dict[str, Any]:
    """Values for every required property of an object; the shell command where one is asked for."""
    properties = schema.get("properties") or {}
    wanted = list(schema.get("required") or ()) or list(properties)[:1]
    return {name: value(properties.get(name) or {}, name, text) for name in wanted}


def value(schema: dict[str, Any], name: str, text: str) -> Any:
    """The simplest value of a schema."""
    if "enum" in schema:
        return schema["enum"][0]
    options = [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    kind = schema.get("type")
    if options and kind is None:
        return value(options[0], name, text)
    kind = kind[0] if isinstance(kind, list) else kind
    match kind:
        case "array" if name in ("command", "cmd"):
            return ["bash", "-c", COMMAND]
        case "array":
            return [value(schema.get("items") or {}, name.removesuffix("s"), text)]
        case "integer" | "number":
            return max(schema.get("minimum", 1), 1)
        case "boolean":
            return False
        case "object":
            return arguments(schema, text)
        case _:
            return COMMAND if name in ("command", "cmd") else text


def main() -> int:
    """Serves until it is stopped."""
    model, run = map(pathlib.Path, sys.argv[1:])
    settings = {
        "name": "harnesses",
        "steps": 1,
        "model": {"path": str(model)},
        "behaviour": {"context_tokens": CONTEXT_TOKENS, "max_new_tokens": 1024},
    }
    given = config.Config.model_validate(settings)
    return serve(given, run, Serving(address_of("127.0.0.1", 0, None)), lambda config: ToolCaller(TextCodec(model)))


if __name__ == "__main__":
    sys.exit(main())
