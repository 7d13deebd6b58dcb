"""A constraint and the model's way to write -> a grammar for the whole turn, in the Lark notation of `llguidance`.

The grammar is checked when it is made, so that a schema that cannot be enforced is refused before anything is sampled.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from harnessrl_jax.errors import SamplerError
from harnessrl_jax.gateway.constraints import ANY_OBJECT
from harnessrl_jax.gateway.exchange import Constraint
from harnessrl_jax.gateway.refusal import bad_request
from harnessrl_jax.gateway.visible import THINK, THINK_END
from harnessrl_jax.sampler.vocabulary import import_llguidance
from harnessrl_jax.trajectories.formats import BareJson, JsonCall, JsonTags, Llama3, ToolFormat

# A space or a new line with its indentation: without a limit, a weak model may write white space for ever.
_JSON = {"x-guidance": {"whitespace_flexible": True, "whitespace_pattern": r"(\n[ ]{0,16}|[ ])?"}}
_TEXT = r"/(.|\n)*/"


class Grammars:
    """Makes the grammars of one model.

    Args:
      tool_format: how the model writes tool calls.
      control: id of each control token, by its text.
    """

    def __init__(self, tool_format: ToolFormat, control: Mapping[str, int]) -> None:
        self._format = tool_format
        self._control = control

    def of(self, constraint: Constraint, tools: Sequence[Any], *, opened: bool) -> str:
        """The grammar; "" where the constraint asks for nothing.

        Args:
          constraint: what is asked for.
          tools: those on offer, in the form of chat completions.
          opened: whether the prompt ends inside reasoning.

        Raises:
          Refusal: `llguidance` is missing, or the constraint cannot be enforced.
        """
        if not constraint.asked:
            return ""
        rules: list[str] = []
        wanted = [
            tool for tool in tools if not constraint.must_call or tool["function"]["name"] in constraint.must_call
        ]
        bodies = []
        if wanted:
            rules += self._calls(wanted, parallel=constraint.parallel)
            bodies.append("calls")
        if constraint.schema is not None and not constraint.must_call:
            rules.append(f"content: {_json(constraint.schema)}")
            bodies.append("content")
        text = "\n".join([f"start: {self._thoughts(opened)}({' | '.join(bodies)})", *self._think(opened), *rules])
        _check(text)
        return text

    def _thoughts(self, opened: bool) -> str:
        return "thoughts " if opened else "thoughts? " if THINK in self._control else ""

    def _think(self, opened: bool) -> list[str]:
        """Reasoning that the prompt has opened, or that the model may open with a control token."""
        if not self._thoughts(opened):
            return []
        start = "" if opened else f"{self._mark(THINK)} "
        if THINK_END in self._control:
            return [f'thoughts: {start}TEXT {self._mark(THINK_END)} "\\n"~0..2', f"TEXT: {_TEXT}"]
        return [
            f'thoughts: {start}until "\\n"~0..2',
            f"until[suffix={json.dumps(THINK_END)}]: {_TEXT}",
        ]

    def _calls(self, tools: Sequence[Any], *, parallel: bool) -> list[str]:
        """Rules for one call, or for several where they may stand side by side."""
        match self._format:
            case JsonTags(open=before, close=after, call=keys):
                block = f'{self._mark(before)} "\\n"? call "\\n"? {self._mark(after)}'
            case BareJson(call=keys):
                block = "call"
            case Llama3(call=keys):
                block = "call"
            case _:
                raise bad_request(
                    f"Calls in this model's format ({type(self._format).__name__}) cannot be enforced. Leave out "
                    "tool_choice, or do not ask for a schema beside tools.",
                    param="tool_choice",
                )
        several = ' ("\\n"? block)*' if parallel and isinstance(self._format, JsonTags) else ""
        rules = [f"calls: block{several}", f"block: {block}", f"call: {' | '.join(_numbered('call', tools))}"]
        for at, tool in enumerate(tools):
            rules += _call(at, tool["function"], keys)
        return rules

    def _mark(self, literal: str) -> str:
        """A mark as the tokenizer has it: a control token, or text."""
        return f"<[{self._control[literal]}]>" if literal in self._control else json.dumps(literal)


def _numbered(name: str, tools: Sequence[Any]) -> list[str]:
    return [f"{name}_{at}" for at in range(len(tools))]


def _call(at: int, function: Mapping[str, Any], keys: JsonCall) -> list[str]:
    """One tool's call: the keys as models write them, then arguments that fit its parameters."""
    name, key, arguments = (json.dumps(each) for each in (function["name"], keys.name_key, keys.arguments_key))
    pieces = [json.dumps("{" + key + ":"), json.dumps(name + ","), json.dumps(arguments + ":")]
    parameters = ANY_OBJECT | (function.get("parameters") or {})
    return [
        f'call_{at}: {pieces[0]} " "? {pieces[1]} " "? {pieces[2]} " "? arguments_{at} "}}"',
        f"arguments_{at}: {_json(parameters)}",
    ]


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, **_JSON})}"


@functools.lru_cache(256)
def _check(grammar: str) -> None:
    """Raises Refusal where the grammar cannot be followed."""
    try:
        matcher = import_llguidance().LLMatcher
    except SamplerError as error:
        raise bad_request(
            f"{error} Otherwise leave out the schema and tool_choice.", code="schemas_not_installed"
        ) from error
    if problem := matcher.validate_grammar(grammar):
        raise bad_request(
            f"The reply cannot be held to this schema: {problem.strip().splitlines()[0]}. Simplify it.",
            code="unsupported_schema",
        )
