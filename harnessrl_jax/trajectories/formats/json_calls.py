"""JSON objects in a text -> tool calls, by the keys that hold name and arguments. Pure."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from harnessrl_jax.errors import RecordError
from harnessrl_jax.trajectories.formats import json_text
from harnessrl_jax.trajectories.formats.said import Malformed, Said, ToolBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCall:
    """One call as a JSON object with exactly these keys, in any order.

    Attributes:
      name_key: holds the tool's name, a non-empty string.
      arguments_key: holds its arguments, an object.
      other_keys: may be there too, with any value.
      any_arguments: whether the arguments may be any JSON value. Only for calls that a harness reads itself.
    """

    name_key: str = "name"
    arguments_key: str = "arguments"
    other_keys: tuple[str, ...] = ()
    any_arguments: bool = False

    def __post_init__(self) -> None:
        keys = (self.name_key, self.arguments_key, *self.other_keys)
        if "" in keys or len(set(keys)) < len(keys):
            raise RecordError(f"JsonCall: keys must be non-empty and differ, got {', '.join(map(repr, keys))}.")

    def block(self, text: str, start: int, at: int) -> ToolBlock:
        """The call whose object stands at `at`, as a block that begins at `start` and is not closed.

        Raises:
          Malformed: it is no such call.
        """
        found, end = json_text.members(text, at)
        required = {self.name_key, self.arguments_key}
        if not required <= found.keys() <= required.union(self.other_keys):
            raise Malformed(end)
        name_start, name_end = found[self.name_key]
        arguments = found[self.arguments_key]
        name = json.loads(text[name_start:name_end]) if text[name_start] == '"' else ""
        if not (name and _encodable(name)):
            raise Malformed(end)
        if text[arguments[0]] != "{" and not self.any_arguments:
            raise Malformed(end)
        quoted = text[arguments[0]] == '"'
        return ToolBlock(
            name=name,
            arguments=text[slice(*arguments)],
            name_span=(name_start + 1, name_end - 1),
            arguments_span=(arguments[0] + quoted, arguments[1] - quoted),
            span=(start, end),
            closed=False,
        )

    @property
    def head(self) -> str:
        """Pattern of what a call, or an array of calls, begins with; it tells calls from other JSON."""
        keys = "|".join(re.escape(json.dumps(key)) for key in (self.name_key, self.arguments_key, *self.other_keys))
        return rf"(?:\[[ \t\n\r]*)?\{{[ \t\n\r]*(?:{keys})[ \t\n\r]*:"


NAME_AND_ARGUMENTS = JsonCall()


def call_array(said: Said, start: int, at: int, call: JsonCall) -> Iterator[ToolBlock]:
    """Calls of the JSON array at `at`, each closed by its own brace; the commas and the bracket belong to them.

    Args:
      said: the text.
      start: where the first block begins, its marks included.
      at: where the array stands.
      call: how one call is written.

    Yields:
      The calls.

    Raises:
      Malformed: an element is no call, or the array is broken; also if it is empty.
    """
    text = said.text
    at = json_text.expect(text, at, "[")
    while True:
        block = call.block(text, start, json_text.skip(text, at))
        start = at = json_text.skip(text, block.span[1])
        more = text.startswith(",", at)
        if more or text.startswith("]", at):
            start = at = at + 1
        yield block._replace(span=(block.span[0], start), closed=True)
        if not more:
            break
    if text[at - 1] != "]":
        raise Malformed(at)


def call_run(said: Said, start: int, at: int, call: JsonCall, separator: str = "") -> Iterator[ToolBlock]:
    """Calls one after another, or one array of them, each closed by its own brace.

    Args:
      said: the text.
      start: where the first block begins, its marks included.
      at: where the first object or the array stands.
      call: how one call is written.
      separator: may stand between two calls, besides white space.

    Yields:
      The calls.

    Raises:
      Malformed: what stands there is no call.
    """
    text, head = said.text, re.compile(call.head)
    at = json_text.skip(text, at)
    if text.startswith("[", at):
        yield from call_array(said, start, at, call)
        return
    while True:
        block = call.block(text, start, at)
        yield block._replace(closed=True)
        start = block.span[1]
        at = json_text.skip(text, start)
        if text.startswith(separator, at):
            at = json_text.skip(text, at + len(separator))
        if not head.match(text, at):
            return


def _encodable(name: str) -> bool:
    """False for a lone surrogate, which JSON can escape and UTF-8 cannot carry."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)
