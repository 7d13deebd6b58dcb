"""Calls of Llama 3: bare JSON with "parameters", or whatever follows `<|python_tag|>`. Pure."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from harnessrl_jax.trajectories.formats import json_text
from harnessrl_jax.trajectories.formats.bare_json import BareJson
from harnessrl_jax.trajectories.formats.json_calls import JsonCall, call_run
from harnessrl_jax.trajectories.formats.said import Found, Malformed, Said, ToolBlock, read_marked

PYTHON_TAG = "<|python_tag|>"

_CALL = re.compile(r"[ \t\n\r]*(?P<name>[A-Za-z_][A-Za-z0-9_]*)\.call\(")
_KEY = re.compile(r"[ \t\n\r]*([A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3:
    """Three ways to call, as the model card of Llama 3.1 lists them.

    1. `{"name": ..., "parameters": {...}}` at the start of the output or after the python tag, several split by `;`.
    2. `<|python_tag|>NAME.call(KEY=VALUE, ...)`, the values JSON: a built-in tool.
    3. `<|python_tag|>CODE`: the tag is the action, the code its arguments. Code ends with the output, so output that
       was cut has none.

    Attributes:
      code_tool: name under which code is handed over, as `{"code": ...}`.
      served: see `ToolFormat`.

    References:
      Llama 3.1 prompt format, https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1
    """

    code_tool: str = "code_interpreter"
    served: bool = True

    @property
    def call(self) -> JsonCall:
        """How JSON names a call."""
        return _CALL_KEYS

    @property
    def marks(self) -> tuple[str, ...]:
        """The python tag."""
        return (PYTHON_TAG,)

    @property
    def opening(self) -> tuple[str, ...]:
        """The python tag, or bare JSON."""
        return (PYTHON_TAG, *_BARE.opening)

    def read(self, said: Said) -> Found:
        """The calls in a text."""
        tagged = said.find(self.marks, 0)
        if tagged is None:
            return _BARE.read(said)
        return read_marked(said, self.marks, lambda start, mark: self._tagged(said, start, start + len(mark)))

    def _tagged(self, said: Said, start: int, at: int) -> Iterator[ToolBlock]:
        if said.text.startswith(("{", "["), json_text.skip(said.text, at)):
            yield from call_run(said, start, at, _CALL_KEYS, ";")
            return
        if not said.whole:
            raise Malformed(len(said.text))
        try:
            yield _built_in(said.text, start, at)
        except Malformed:
            yield self._code(said.text, start, at)

    def _code(self, text: str, start: int, at: int) -> ToolBlock:
        code = text[at:].strip()
        if not code:
            raise Malformed(at)
        first = text.index(code, at)
        return ToolBlock(
            name=self.code_tool,
            arguments=json.dumps({"code": code}, ensure_ascii=False),
            name_span=(start, at),
            arguments_span=(first, first + len(code)),
            span=(start, len(text)),
            closed=True,
        )


def _built_in(text: str, start: int, at: int) -> ToolBlock:
    """`NAME.call(KEY=VALUE, ...)` up to the end of the text; Malformed if it is anything else."""
    head = _CALL.match(text, at)
    if head is None:
        raise Malformed(at)
    arguments: dict[str, str] = {}
    at = json_text.skip(text, head.end())
    while not (text.startswith(")", at) and not arguments):
        key = _KEY.match(text, at)
        if key is None or key.group(1) in arguments:
            raise Malformed(at)
        end = json_text.value_end(text, key.end())
        arguments[key.group(1)] = text[key.end() : end]
        at = json_text.skip(text, end)
        if text.startswith(")", at):
            break
        at = json_text.expect(text, at, ",")
    if json_text.skip(text, at + 1) != len(text):
        raise Malformed(at)
    return ToolBlock(
        name=head.group("name"),
        arguments="{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in arguments.items()) + "}",
        name_span=head.span("name"),
        arguments_span=(head.end(), at),
        span=(start, len(text)),
        closed=True,
    )


_CALL_KEYS = JsonCall(arguments_key="parameters", other_keys=("type",))
_BARE = BareJson(call=_CALL_KEYS, separator=";")

LLAMA3 = Llama3()
