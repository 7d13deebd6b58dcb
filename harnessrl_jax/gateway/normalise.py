"""Named moving parts of known harnesses -> gone, so that the prompts of a conversation extend each other. Pure.

Only text that tells the model nothing about its task may be listed here. The raw request stays in the record, and each
call notes the names of what was taken out.
"""

import re
from collections.abc import Callable
from typing import NamedTuple


class Normaliser(NamedTuple):
    """One moving part of system prompts."""

    name: str
    apply: Callable[[str], str]


# A line with a hash that differs between conversations and changes with the history.
_BILLING_LINE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*(\n|\Z)")

NORMALISERS = (Normaliser("claude-code-billing-line", lambda text: _BILLING_LINE.sub("", text)),)


def normalise(text: str) -> tuple[str, tuple[str, ...]]:
    """A part of a system prompt without its moving parts, and the names of those it had.

    Example:
      >>> normalise("x-anthropic-billing-header: cc_version=2.1; cch=5f0;")
      ('', ('claude-code-billing-line',))
    """
    names: list[str] = []
    for normaliser in NORMALISERS:
        changed = normaliser.apply(text)
        if changed != text:
            names.append(normaliser.name)
            text = changed
    return text, tuple(names)
