"""Untrusted text -> the same text in which no control token can be spelled, and back. Pure.

A control token is one that the tokenizer recognises in text by its literal, such as `<|im_end|>`. Before rendering,
every literal inside untrusted text is broken by a private-use character that occurs nowhere in the request. What still
reads as a control token after rendering was written by the template.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from harnessrl_jax.errors import TextError

# Private-use characters, and halves of surrogate pairs, which are no text and which no tokenizer accepts.
_UNUSUAL = re.compile("[\ud800-\uf8ff]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_PRIVATE_USE = range(0xE000, 0xF900)
MAX_DEPTH = 100
_TOO_DEEP = f"The request nests values more than {MAX_DEPTH} deep; send flatter messages or tools."


class Guarded(NamedTuple):
    """Messages and tools that are safe to render, and the two characters that are free to use as marks."""

    messages: list[Any]
    tools: list[Any]
    breaker: str
    """Remove it from rendered text, after looking for control tokens and before encoding."""
    mark: str
    """Stands for an assistant turn whose ids are known."""


class Guard:
    """Breaks the literals of one tokenizer's control tokens.

    Args:
      literals: text of each control token, two characters or more.
      reserved: text whose characters must not be used as marks (the template's source).
    """

    def __init__(self, literals: Iterable[str], reserved: str) -> None:
        known = sorted(set(literals), key=lambda literal: (-len(literal), literal))
        alternatives = "|".join(map(re.escape, known))
        self._start = re.compile(f"(?=(?:{alternatives}))(.)", re.DOTALL) if known else None
        self._reserved = set(_UNUSUAL.findall(reserved))
        self._heads = {literal[:size] for literal in known for size in range(1, len(literal))}
        self._tails = {literal[size:] for literal in known for size in range(1, len(literal))}
        # One character decides almost every text: those that hold none of these are safe.
        self._first = _any_of(literal[0] for literal in known)
        self._last = _any_of(literal[-1] for literal in known)
        self._edge = _any_of(literal[at] for literal in known for at in (0, -1))
        self._dangerous = functools.lru_cache(16384)(self._can_spell)
        self._reach = max(map(len, known), default=1) - 1

    def protect(self, messages: list[Any], tools: list[Any]) -> Guarded:
        """Safe forms of everything that came with a request: JSON values, arguments of tool calls parsed.

        Raises:
          TextError: values nested deeper than MAX_DEPTH.
        """
        texts = self._texts(messages, tools)
        unusual = {character for text in texts if not text.isascii() for character in _UNUSUAL.findall(text)}
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in unusual and chr(code) not in self._reserved)
        breaker, mark = next(free), next(free)
        torn = any(_SURROGATE.match(character) for character in unusual)
        if torn or any(map(self._dangerous, texts)):
            clean: Callable[[str], str] = lambda text: self._break(_SURROGATE.sub("\ufffd", text), breaker)
            messages, tools = _changed([messages, tools], clean)
        return Guarded(list(messages), list(tools), breaker, mark)

    def _texts(self, messages: list[Any], tools: list[Any]) -> list[str]:
        """Every text that has to be looked at; none if a glance at the whole shows that nothing can be wrong."""
        try:
            whole = json.dumps([messages, tools], ensure_ascii=False)
        except RecursionError as error:
            raise TextError(_TOO_DEEP) from error
        if whole.isascii() and not self._edge.search(whole):
            return []
        texts: list[str] = []
        _collect([messages, tools], texts, 0)
        return texts

    def _can_spell(self, text: str) -> bool:
        """Whether `text` spells a control token, or an end of it may become part of one."""
        if self._start is None:
            return False
        if self._first.search(text) and self._start.search(text):
            return True
        return bool(self._open_ends(text)) or self._closes(text)

    def _break(self, text: str, breaker: str) -> str:
        if self._start is None:
            return text
        # A literal may also be completed by what the template writes before or after the text.
        for position in self._open_ends(text):
            text = text[: position + 1] + breaker + text[position + 1 :]
        text = self._start.sub(rf"\1{breaker}", text)
        if self._closes(text):
            lead = len(text) - len(text.lstrip())
            text = text[:lead] + breaker + text[lead:]
        return text

    def _open_ends(self, text: str) -> list[int]:
        """Where the end of `text` begins a literal that what follows could complete; last position first."""
        bare = text.rstrip()
        if not self._first.search(bare, max(0, len(bare) - self._reach)):
            return []
        window = range(len(bare) - 1, max(-1, len(bare) - 1 - self._reach), -1)
        return [at for at in window if bare[at:] in self._heads]

    def _closes(self, text: str) -> bool:
        """Whether the start of `text` could complete a literal that what stands before began."""
        bare = text.lstrip()[: self._reach]
        if not self._last.search(bare):
            return False
        return any(bare[: at + 1] in self._tails for at in range(len(bare)))


def _any_of(characters: Iterable[str]) -> re.Pattern[str]:
    members = "".join(sorted(set(characters)))
    return re.compile(f"[{re.escape(members)}]" if members else "(?!)")


def _collect(value: Any, texts: list[str], depth: int) -> None:
    """Appends every string of a JSON value, keys included."""
    if isinstance(value, str):
        texts.append(value)
    elif isinstance(value, (dict, list)):
        if depth > MAX_DEPTH:
            raise TextError(_TOO_DEEP)
        if isinstance(value, dict):
            texts.extend(value)
            value = value.values()
        for item in value:
            _collect(item, texts, depth + 1)


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a JSON value with every string, keys included, passed through `change`."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _changed(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_changed(item, change) for item in value]
    return value
