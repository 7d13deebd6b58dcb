"""Calls whose name is a single tag, such as `<search>query</search>` or `<|finish|>`. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from harnessrl_jax.errors import RecordError
from harnessrl_jax.trajectories.formats.delimited import handed_over
from harnessrl_jax.trajectories.formats.said import Found, Malformed, Said, ToolBlock, read_marked, stripped


class Tag(NamedTuple):
    """One action.

    Attributes:
      name: what the action is called.
      open: the tag that takes it: the ACTION.
      close: ends its content; None: the next opening tag or the end of the output does.
    """

    name: str
    open: str
    close: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTags:
    """Each tag is an action, and the text up to its end is the arguments. Tags do not nest.

    Attributes:
      tags: the actions.
      text_key: where calls are served, the content becomes a JSON object with this one key.
      served: see `ToolFormat`.
    """

    tags: tuple[Tag, ...]
    text_key: str = "input"
    served: bool = False

    def __post_init__(self) -> None:
        opening = [tag.open for tag in self.tags]
        if not opening or "" in self.marks or len(set(opening)) < len(opening):
            raise RecordError(
                f"SpecialTags: opening tags must be there, differ, and hold at least one character, as must closing "
                f"tags; got {self.tags}."
            )

    @property
    def marks(self) -> tuple[str, ...]:
        """All opening and closing tags."""
        return (*self.opening, *self._closing)

    @property
    def opening(self) -> tuple[str, ...]:
        """The opening tags."""
        return tuple(tag.open for tag in self.tags)

    @property
    def _closing(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(tag.close for tag in self.tags if tag.close is not None and tag.close != tag.open))

    def read(self, said: Said) -> Found:
        """The calls in a text; a closing tag outside a call is a fault."""
        return read_marked(said, self.opening, lambda start, mark: self._block(said, start, mark), self._closing)

    def _block(self, said: Said, start: int, mark: str) -> Iterator[ToolBlock]:
        tag = next(tag for tag in self.tags if tag.open == mark)
        at = start + len(mark)
        ends = self.opening if tag.close is None else (tag.close, *self.opening)
        hit = said.find(ends, at)
        if hit is None and (tag.close is not None or not said.whole):
            raise Malformed(len(said.text))
        stop, found = hit or (len(said.text), "")
        if tag.close is not None and found != tag.close:
            raise Malformed(stop)
        end = stop if tag.close is None else stop + len(found)
        text, span = stripped(said.text, at, stop)
        yield ToolBlock(
            name=tag.name,
            arguments=handed_over(text, self.text_key, self.served),
            name_span=(start, at),
            arguments_span=span,
            span=(start, end),
            closed=True,
        )
