"""`open NAME between ARGUMENTS close`: what a harness asks for in its prompt and reads itself, ReAct for one. Pure."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from harnessrl_jax.errors import RecordError
from harnessrl_jax.trajectories.formats import json_text
from harnessrl_jax.trajectories.formats.said import Found, Malformed, Said, ToolBlock, read_marked, stripped


@dataclass(frozen=True, slots=True, kw_only=True)
class Delimited:
    """A harness's own marks around a name and its arguments.

    Attributes:
      open: stands before the name.
      between: stands between name and arguments; the name holds no line break, so this may begin with one.
      close: any of these ends the arguments and belongs to the call.
      until: any of these ends the arguments and begins something else.
      end_closes: whether the end of the output ends the arguments too, if sampling was not cut. Harnesses that stop
        sampling at their own mark never see it.
      line_start: whether `open` counts only at the start of a line.
      text_key: None if the arguments are a JSON object. Otherwise they are plain text, and where they are served they
        become a JSON object with this one key.
      served: see `ToolFormat`.

    Example:
      >>> from harnessrl_jax.trajectories import parse_tool_calls
      >>> tag = Delimited(open="<function=", between=">", close=("</function>",))
      >>> block = parse_tool_calls('<function=find>{"q": 1}</function>', tag).blocks[0]
      >>> block.name, block.arguments
      ('find', '{"q": 1}')
    """

    open: str
    between: str
    close: tuple[str, ...] = ()
    until: tuple[str, ...] = ()
    end_closes: bool = False
    line_start: bool = False
    text_key: str | None = None
    served: bool = False

    def __post_init__(self) -> None:
        if "" in self.marks:
            raise RecordError(
                f"Delimited: a mark needs at least one character, got open {self.open!r}, between {self.between!r}, "
                f"close {self.close}, until {self.until}."
            )
        if not (self.close or self.until or self.end_closes):
            raise RecordError("Delimited: nothing ends the arguments. Give `close` or `until`, or set `end_closes`.")

    @property
    def marks(self) -> tuple[str, ...]:
        """All of them."""
        return (self.open, self.between, *self.close, *self.until)

    @property
    def opening(self) -> tuple[str, ...]:
        """The first mark."""
        return (self.open,)

    def read(self, said: Said) -> Found:
        """The calls in a text."""
        return read_marked(
            said,
            self.opening,
            lambda start, mark: self._block(said, start, start + len(mark)),
            line_start=self.line_start,
        )

    def _block(self, said: Said, start: int, at: int) -> Iterator[ToolBlock]:
        hit = said.find((self.between,), at)
        if hit is None:
            raise Malformed(len(said.text))
        name, name_span = stripped(said.text, at, hit[0])
        if not name or "\n" in name:
            raise Malformed(at)
        at = hit[0] + len(self.between)
        if self.text_key is None:
            first = json_text.expect(said.text, at, "{") - 1
            stop = json_text.value_end(said.text, first)
            block = ToolBlock(name, said.text[first:stop], name_span, (first, stop), (start, stop), False)
            yield from self._closed(said, block)
            return
        stop, end = self._end(said, at)
        text, span = stripped(said.text, at, stop)
        yield ToolBlock(name, handed_over(text, self.text_key, self.served), name_span, span, (start, end), True)

    def _closed(self, said: Said, block: ToolBlock) -> Iterator[ToolBlock]:
        """The block with what closes it; if nothing does, a fault after it."""
        stop = block.span[1]
        hit = said.find((*self.close, *self.until), stop)
        if said.text[stop : hit[0] if hit else len(said.text)].strip():
            yield block
            raise Malformed(stop)
        if hit is None and not (self.end_closes and said.whole):
            yield block
            raise Malformed(len(said.text))
        yield block._replace(span=(block.span[0], self._end(said, stop)[1]), closed=True)

    def _end(self, said: Said, at: int) -> tuple[int, int]:
        """Where the arguments end, and where the call does."""
        hit = said.find((*self.close, *self.until), at)
        if hit is not None:
            return hit[0], hit[0] + (len(hit[1]) if hit[1] in self.close else 0)
        if self.end_closes and said.whole:
            return len(said.text), len(said.text)
        raise Malformed(len(said.text))


def handed_over(text: str, key: str, served: bool) -> str:
    """Plain-text arguments: as written, or as the JSON object that a served call carries."""
    return json.dumps({key: text}, ensure_ascii=False) if served else text


REACT = Delimited(
    open="Action:",
    between="\nAction Input:",
    until=("\nObservation:", "\nThought:", "\nAction:", "\nFinal Answer:"),
    end_closes=True,
    line_start=True,
    text_key="input",
)
