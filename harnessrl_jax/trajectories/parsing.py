"""Sampled text -> tool calls with their character spans. JSON only, nothing is guessed and nothing is evaluated.

The one parser: the gateway returns what it finds, and the roles of tokens come from the same spans, so training and
serving never disagree about what a call is.
"""

import json
import re
from collections.abc import Container
from typing import Any, NamedTuple

from harnessrl_jax.trajectories.records import Finish, ParseStatus

OPEN = "<tool_call>"
CLOSE = "</tool_call>"

_MARK = re.compile(f"{OPEN}|{CLOSE}")
_SPACE = re.compile(r"[ \t\n\r]*")


class ToolBlock(NamedTuple):
    """One tool call found in a text. Spans are character ranges `text[start:end]`.

    Attributes:
      name: the tool's name.
      arguments: its arguments, the JSON object exactly as written.
      name_span: the name, without its quotes.
      arguments_span: the arguments.
      span: the whole block with its tags.
      closed: whether the closing tag follows; only a closed block is a call.
    """

    name: str
    arguments: str
    name_span: tuple[int, int]
    arguments_span: tuple[int, int]
    span: tuple[int, int]
    closed: bool


class ParsedOutput(NamedTuple):
    """What a sampled text says.

    Attributes:
      content: the text that is not part of a returned call, stripped; malformed calls stay in it.
      blocks: every block whose JSON is complete, returned or not.
      status: "none" = no call in it; "ok"; "malformed" = some block or tag is no call; "truncated" = sampling hit the
        length limit, whatever was found.
    """

    content: str
    blocks: tuple[ToolBlock, ...]
    status: ParseStatus

    @property
    def calls(self) -> tuple[ToolBlock, ...]:
        """The calls to hand to the harness: closed blocks; none of a truncated output."""
        return () if self.status == "truncated" else tuple(block for block in self.blocks if block.closed)


def parse_tool_calls(text: str, *, finish: Finish = "stop", control: Container[int] | None = None) -> ParsedOutput:
    """Finds calls in Hermes form, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    A block must hold one JSON object with exactly the keys "name" (a non-empty string) and "arguments" (an object).

    Args:
      text: the sampled text, special tokens rendered.
      finish: why sampling ended; "length" wins over every call that was found.
      control: character positions where a real control token starts. A tag elsewhere is quoted text. None accepts
        tags anywhere, for tokenizers that spell them with ordinary tokens.

    Returns:
      The calls, the remaining text and the status.

    Example:
      >>> out = parse_tool_calls('Look.<tool_call>{"name": "find", "arguments": {"q": 1}}</tool_call>')
      >>> out.content, out.calls[0].name, out.calls[0].arguments, out.status
      ('Look.', 'find', '{"q": 1}', 'ok')
    """
    marks = [m for m in _MARK.finditer(text) if control is None or m.start() in control]
    blocks: list[ToolBlock] = []
    sound = True
    for mark in marks:
        if blocks and mark.start() < blocks[-1].span[1]:
            continue  # a tag inside the strings of the last block, or its own closing tag
        block = _block(text, mark.start(), control) if mark.group() == OPEN else None
        sound = sound and block is not None and block.closed
        if block is not None:
            blocks.append(block)
    status: ParseStatus = "none" if not marks else "ok" if sound else "malformed"
    if marks and finish == "length":
        status = "truncated"
    parsed = ParsedOutput(content="", blocks=tuple(blocks), status=status)
    return parsed._replace(content=_outside(text, parsed.calls))


def _outside(text: str, calls: tuple[ToolBlock, ...]) -> str:
    edges = [0, *(edge for call in calls for edge in call.span), len(text)]
    return "".join(text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)).strip()


def _block(text: str, start: int, control: Container[int] | None) -> ToolBlock | None:
    """The block that opens at `start`; None if what follows the tag is not the JSON of a call."""
    try:
        members, end = _members(text, start + len(OPEN))
    except (ValueError, RecursionError):  # not JSON, or nested beyond what the decoder can follow
        return None
    if members.keys() != {"name", "arguments"}:
        return None
    name, name_start, name_end = members["name"]
    arguments, arguments_start, arguments_end = members["arguments"]
    if not (isinstance(name, str) and name and isinstance(arguments, dict) and _encodable(name)):
        return None
    tag = _skip(text, end)
    closed = text.startswith(CLOSE, tag) and (control is None or tag in control)
    return ToolBlock(
        name=name,
        arguments=text[arguments_start:arguments_end],
        name_span=(name_start + 1, name_end - 1),
        arguments_span=(arguments_start, arguments_end),
        span=(start, tag + len(CLOSE) if closed else end),
        closed=closed,
    )


def _members(text: str, at: int) -> tuple[dict[str, tuple[Any, int, int]], int]:
    """Value and span of each member of the JSON object at `at`, and where the object ends; ValueError if none."""
    out: dict[str, tuple[Any, int, int]] = {}
    at = _expect(text, at, "{")
    while True:
        key, at = _DECODER.raw_decode(text, _skip(text, at))
        if not isinstance(key, str) or key in out:
            raise ValueError(f"not a new key: {key!r}")
        start = _skip(text, _expect(text, at, ":"))
        value, at = _DECODER.raw_decode(text, start)
        out[key] = (value, start, at)
        after = _skip(text, at)
        if text.startswith("}", after):
            return out, after + 1
        at = _expect(text, at, ",")


def _skip(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


def _expect(text: str, at: int, mark: str) -> int:
    at = _skip(text, at)
    if not text.startswith(mark, at):
        raise ValueError(f"no {mark!r} at {at}")
    return at + 1


def _encodable(name: str) -> bool:
    """False for a lone surrogate, which JSON can escape and UTF-8 cannot carry."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")  # Python's reader would take NaN and Infinity


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
