"""Calls as nested tags, one for the function and one for each parameter: Qwen3-Coder, GLM, OpenHands. Pure."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from harnessrl_jax.errors import RecordError
from harnessrl_jax.trajectories.formats import json_text
from harnessrl_jax.trajectories.formats.said import Found, Malformed, Said, ToolBlock, read_marked, stripped

# How templates in Python write these values besides JSON.
_WORDS = {"True": "true", "False": "false", "None": "null"}


class Between(NamedTuple):
    """A tag that carries a name: `before NAME after CONTENT close`."""

    before: str
    after: str
    close: str


FUNCTION = Between("<function=", ">", "</function>")
PARAMETER = Between("<parameter=", ">", "</parameter>")


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTags:
    """`<function=NAME> <parameter=KEY>VALUE</parameter> ... </function>`, with other tags where they differ.

    White space between tags is free. One line break at either end of a value belongs to the tags. A value is text:
    it is handed over as a string, or as the JSON it spells where the tool's schema allows no string. It may hold
    anything but the closing tag of a parameter and the wrapping marks. A call is closed by its function's closing tag.

    Attributes:
      function: the tags around a call.
      parameter: the tags around a value.
      wrap: marks around one or more calls, or None.
      served: see `ToolFormat`.
    """

    function: Between = FUNCTION
    parameter: Between = PARAMETER
    wrap: tuple[str, str] | None = None
    served: bool = True

    def __post_init__(self) -> None:
        given = (*self.function, *self.parameter, *(self.wrap or ()))
        if "" in given:
            raise RecordError(f"FunctionTags: every mark must hold at least one character, got {given}.")

    @property
    def marks(self) -> tuple[str, ...]:
        """The wrapping marks, and the closing tags of function and parameter."""
        return (
            *(self.wrap or ()),
            self.function.before,
            self.function.close,
            self.parameter.before,
            self.parameter.close,
        )

    @property
    def opening(self) -> tuple[str, ...]:
        """The wrapping mark, or the function's tag where there is none."""
        return self.wrap[:1] if self.wrap else (self.function.before,)

    def read(self, said: Said) -> Found:
        """The calls in a text."""
        if self.wrap is None:
            return read_marked(said, self.opening, lambda start, _: iter((self._function(said, start, start),)))
        return read_marked(said, self.opening, lambda start, _: self._wrapped(said, start), self.wrap[1:])

    def _wrapped(self, said: Said, start: int) -> Iterator[ToolBlock]:
        opening, closing = self.wrap or ("", "")
        at = start + len(opening)
        while True:
            found = self._function(said, start, json_text.skip(said.text, at))
            start = at = found.span[1]
            end = json_text.skip(said.text, at)
            if said.marked(closing, end):
                yield found._replace(span=(found.span[0], end + len(closing)))
                return
            yield found

    def _function(self, said: Said, start: int, at: int) -> ToolBlock:
        """The call whose function tag stands at `at`, as a block that begins at `start`."""
        name, name_span, at = _name(said, at, self.function)
        values: dict[str, str] = {}
        first = last = at
        while True:
            at = json_text.skip(said.text, at)
            if said.marked(self.function.close, at):
                break
            first = first if values else at
            key, _, value_at = _name(said, at, self.parameter)
            if key in values:
                raise Malformed(at)
            values[key], at = self._value(said, value_at)
            last = at
        return ToolBlock(
            name=name,
            arguments=_arguments(values, said.schemas.get(name, {})),
            name_span=name_span,
            arguments_span=(first, last),
            span=(start, at + len(self.function.close)),
            closed=True,
        )

    def _value(self, said: Said, at: int) -> tuple[str, int]:
        """The text of a value, and where its closing tag ends."""
        hit = said.find((self.parameter.close, *(self.wrap or ())), at)
        if hit is None:
            raise Malformed(len(said.text))
        if hit[1] != self.parameter.close:
            raise Malformed(hit[0])
        text = said.text[at : hit[0]]
        return text.removeprefix("\n").removesuffix("\n"), hit[0] + len(hit[1])


def _name(said: Said, at: int, tag: Between) -> tuple[str, tuple[int, int], int]:
    """The name in the tag at `at`, its span, and where the tag ends."""
    start = said.expect(tag.before, at)
    end = said.text.find(tag.after, start)
    name, span = stripped(said.text, start, max(start, end))
    if not name or any(letter in name for letter in '\n<>{}"'):
        raise Malformed(start)
    return name, span, end + len(tag.after)


def _arguments(values: Mapping[str, str], schema: Mapping[str, Any]) -> str:
    """The JSON object of the values. A schema that is no schema decides nothing: the harness wrote it."""
    known = _table(schema.get("properties"))
    written = (f"{_string(key)}: {_value(text, known.get(key))}" for key, text in values.items())
    return "{" + ", ".join(written) + "}"


def _value(text: str, schema: Any) -> str:
    kinds = _kinds(schema)
    if not kinds or "string" in kinds:
        return _string(text)
    bare = text.strip()
    word = _WORDS.get(bare, bare)
    return word if json_text.is_json(word) else _string(text)


def _kinds(schema: Any) -> set[str]:
    """The JSON types that a schema allows; none if it does not say."""
    table = _table(schema)
    kinds = {kind for kind in _items(table.get("type")) if isinstance(kind, str)}
    return kinds.union(*map(_kinds, _items(table.get("anyOf", []))))


def _table(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


def _items(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else [value]


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


QWEN3_CODER = FunctionTags(wrap=("<tool_call>", "</tool_call>"))
GLM4 = FunctionTags(
    function=Between("<tool_call>", "\n", "</tool_call>"),
    parameter=Between("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
)
