"""A sampled text, with where its control tokens stand, and the calls that a format finds in it. Pure.

Formats read from left to right and decide on what they have seen: what follows never changes a block that is closed.
"""

import functools
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

Schemas = Mapping[str, Mapping[str, Any]]
"""Tool name -> JSON schema of its parameters."""


class ToolBlock(NamedTuple):
    """One tool call found in a text. Spans are character ranges `text[start:end]`.

    Attributes:
      name: the tool's name.
      arguments: its arguments as they are handed over. JSON is kept exactly as written; a format without JSON is
        rewritten as a JSON object where it is served, and kept as written where it is not.
      name_span: the name, without its quotes; the tag itself where a tag is the name.
      arguments_span: the arguments as written, braces included; a plain string without its quotes.
      span: the whole block with its marks.
      closed: whether the block is over; only a closed block is a call.
    """

    name: str
    arguments: str
    name_span: tuple[int, int]
    arguments_span: tuple[int, int]
    span: tuple[int, int]
    closed: bool


class Found(NamedTuple):
    """What a format finds in a text.

    Attributes:
      blocks: every block that could be read, in order, none inside another.
      tried: whether anything in the text is a call or was meant as one.
      sound: whether all of that could be read.
    """

    blocks: tuple[ToolBlock, ...]
    tried: bool
    sound: bool


class Malformed(Exception):
    """The block is no call; reading goes on at `at`, which is the end of the text where that ends inside the block."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at


class Said(NamedTuple):
    """What formats read.

    Attributes:
      text: the sampled text, control tokens spelled out.
      control: for each mark that the tokenizer has as a control token, the positions where that token stands; the same
        letters elsewhere are quoted text. Marks that are not in it are read wherever they are spelled.
      whole: False if sampling was cut, so that the end of the text closes nothing.
      schemas: the tools on offer, for formats that write values without types.
    """

    text: str
    control: Mapping[str, Container[int]]
    whole: bool
    schemas: Schemas

    def marked(self, mark: str, at: int) -> bool:
        """Whether this mark stands at `at`."""
        return self.text.startswith(mark, at) and (mark not in self.control or at in self.control[mark])

    def find(self, marks: Sequence[str], at: int) -> tuple[int, str] | None:
        """The next place at or after `at` where one of the marks stands, and which: the first of `marks` that fits."""
        for hit in _any_of(tuple(marks)).finditer(self.text, at):
            for mark in marks:
                if self.marked(mark, hit.start()):
                    return hit.start(), mark
        return None

    def expect(self, mark: str, at: int) -> int:
        """Where the mark that must stand at `at` ends; Malformed if it does not."""
        if not self.marked(mark, at):
            raise Malformed(at)
        return at + len(mark)


class ToolFormat(Protocol):
    """How a model writes tool calls. Formats are plain values; a user's own needs only these members."""

    @property
    def marks(self) -> tuple[str, ...]:
        """The literals that delimit calls: only the control token counts where the tokenizer has one."""
        ...

    @property
    def opening(self) -> tuple[str, ...]:
        """What a call may begin with: a stream of the output shows nothing from there on until the turn is over."""
        ...

    @property
    def served(self) -> bool:
        """Whether calls leave the text and are handed to the harness; False where the harness reads the text itself."""
        ...

    def read(self, said: Said) -> Found:
        """The calls in a text."""
        ...


def read_marked(
    said: Said,
    opening: Sequence[str],
    read: Callable[[int, str], Iterator[ToolBlock]],
    stray: Sequence[str] = (),
    *,
    line_start: bool = False,
) -> Found:
    """Reads a block at each opening mark outside the blocks before it.

    Args:
      said: the text.
      opening: marks that open a block.
      read: (position of the mark, the mark) -> its blocks; raises Malformed after what it could read.
      stray: marks that have no place outside a block.
      line_start: whether marks inside a line are text.

    Returns:
      The blocks.
    """
    blocks: list[ToolBlock] = []
    tried, sound, at = False, True, 0
    while (hit := said.find((*opening, *stray), at)) is not None:
        start, mark = hit
        at = start + len(mark)
        if line_start and said.text[max(0, start - 1) : start] not in ("", "\n"):
            continue
        tried = True
        if mark in stray:
            sound = False
            continue
        try:
            for block in read(start, mark):
                blocks.append(block)
                at = max(at, block.span[1])
        except Malformed as fault:
            sound, at = False, max(at, fault.at)
    return Found(tuple(blocks), tried, sound)


def stripped(text: str, start: int, end: int) -> tuple[str, tuple[int, int]]:
    """`text[start:end]` without white space around it, and its span."""
    bare = text[start:end].strip()
    first = start + text[start:end].index(bare)
    return bare, (first, first + len(bare))


@functools.lru_cache(64)
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    # A lookahead, so that a mark which is only quoted hides none that begins inside it.
    return re.compile(f"(?={'|'.join(map(re.escape, marks))})")
