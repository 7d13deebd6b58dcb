"""Positions in a text -> where the JSON there ends. Strict (RFC 8259), without recursion, nothing is evaluated.

Where there is no JSON, Malformed says at which character it stops being some: the end of the text, or the beginning of
its last token, if the text is only cut.
"""

import json
import re

from harnessrl_jax.trajectories.formats.said import Malformed

MAX_DEPTH = 64
"""Containers inside containers. A harness must be able to read the arguments, and to send them back in a message."""
MAX_DIGITS = 4300
"""Of one integer: Python's own limit, so that a harness in Python can read it."""

_SPACE = re.compile(r"[ \t\n\r]*")
_STRING = re.compile(r'"[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*+')
_WORD_OR_NUMBER = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")


def skip(text: str, at: int) -> int:
    """The first position at or after `at` that is no JSON white space."""
    space = _SPACE.match(text, at)
    return space.end() if space else at


def expect(text: str, at: int, mark: str) -> int:
    """One past this character, which must be the next that is no space. Raises Malformed."""
    at = skip(text, at)
    if not text.startswith(mark, at):
        raise Malformed(at)
    return at + 1


def string_end(text: str, at: int) -> int:
    """Where the string literal at `at` ends. Raises Malformed."""
    body = _STRING.match(text, at)
    end = body.end() if body else at
    if body is None or not text.startswith('"', end):
        raise Malformed(end)
    return end + 1


def value_end(text: str, at: int) -> int:
    """Where the value at `at` ends. Raises Malformed."""
    closing: list[str] = []
    while True:
        head = text[at : at + 1]
        if head in ("{", "["):
            if len(closing) == MAX_DEPTH:
                raise Malformed(at)
            closing.append("}" if head == "{" else "]")
            at = skip(text, at + 1)
            if not text.startswith(closing[-1], at):
                at = _key_end(text, at) if head == "{" else at
                continue
        else:
            at = string_end(text, at) if head == '"' else _scalar_end(text, at)
        at, more = _after_value(text, at, closing)
        if not more:
            return at


def members(text: str, at: int) -> tuple[dict[str, tuple[int, int]], int]:
    """Span of the value of each member of the object at `at`, and where the object ends; no key may come twice.

    Raises:
      Malformed: there is no such object.
    """
    out: dict[str, tuple[int, int]] = {}
    at = skip(text, expect(text, at, "{"))
    if text.startswith("}", at):
        return out, at + 1
    while True:
        end = string_end(text, at)
        key = json.loads(text[at:end])
        if key in out:
            raise Malformed(at)
        start = skip(text, expect(text, end, ":"))
        out[key] = (start, value_end(text, start))
        at = skip(text, out[key][1])
        if text.startswith("}", at):
            return out, at + 1
        at = skip(text, expect(text, at, ","))


def is_json(text: str) -> bool:
    """Whether the text is one value, space around it aside."""
    try:
        return skip(text, value_end(text, skip(text, 0))) == len(text)
    except Malformed:
        return False


def _key_end(text: str, at: int) -> int:
    """The start of the value that belongs to the key at `at`."""
    return skip(text, expect(text, string_end(text, at), ":"))


def _after_value(text: str, at: int, closing: list[str]) -> tuple[int, bool]:
    """Closes what ends after a value; where the next value begins, or where all ends, and which of the two."""
    while closing:
        at = skip(text, at)
        if text.startswith(",", at):
            at = skip(text, at + 1)
            return (_key_end(text, at) if closing[-1] == "}" else at), True
        at = expect(text, at, closing.pop())
    return at, False


def _scalar_end(text: str, at: int) -> int:
    scalar = _WORD_OR_NUMBER.match(text, at)
    if scalar is None or len(scalar.group(1) or "") > MAX_DIGITS:
        raise Malformed(at)
    return scalar.end()
