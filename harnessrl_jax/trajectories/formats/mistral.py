"""Calls after `[TOOL_CALLS]`: an array in older Mistral models, name and arguments in newer ones. Pure."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from harnessrl_jax.trajectories.formats import json_text
from harnessrl_jax.trajectories.formats.json_calls import JsonCall, call_array
from harnessrl_jax.trajectories.formats.said import Found, Malformed, Said, ToolBlock, read_marked

TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

_ELEMENT = JsonCall(other_keys=("id",))
_WORD = re.compile(r"[ \t\n\r]*([^\s\[\]{}\"]+)[ \t\n\r]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistral:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]NAME[ARGS]{...}` for each call.

    `[ARGS]` may be missing, and `[CALL_ID]` with an id may stand before it. Each call is closed by its own brace.

    Attributes:
      served: see `ToolFormat`.

    References:
      Tokenizers v3 (array), v11 and v13 (name and arguments) of https://github.com/mistralai/mistral-common
    """

    served: bool = True

    @property
    def marks(self) -> tuple[str, ...]:
        """The three marks."""
        return TOOL_CALLS, CALL_ID, ARGS

    @property
    def opening(self) -> tuple[str, ...]:
        """The first mark."""
        return (TOOL_CALLS,)

    def read(self, said: Said) -> Found:
        """The calls in a text."""
        return read_marked(said, (TOOL_CALLS,), lambda start, mark: _calls(said, start, start + len(mark)))


def _calls(said: Said, start: int, at: int) -> Iterator[ToolBlock]:
    text = said.text
    first = json_text.skip(text, at)
    if text.startswith("[", first):
        yield from call_array(said, start, first, _ELEMENT)
        return
    name, name_span, at = _word(text, at)
    if said.marked(CALL_ID, at):
        at = _word(text, at + len(CALL_ID))[2]
    if said.marked(ARGS, at):
        at += len(ARGS)
    at = json_text.expect(text, at, "{") - 1
    end = json_text.value_end(text, at)
    yield ToolBlock(
        name=name,
        arguments=text[at:end],
        name_span=name_span,
        arguments_span=(at, end),
        span=(start, end),
        closed=True,
    )


def _word(text: str, at: int) -> tuple[str, tuple[int, int], int]:
    """The word at `at`, its span, and where the space after it ends."""
    word = _WORD.match(text, at)
    if word is None:
        raise Malformed(at)
    return word.group(1), word.span(1), word.end()


MISTRAL = Mistral()
