"""Calls as JSON between two tags: Hermes 2 Pro, Qwen2.5, Qwen3 and many others. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from harnessrl_jax.trajectories.formats import json_text
from harnessrl_jax.trajectories.formats.json_calls import NAME_AND_ARGUMENTS, JsonCall
from harnessrl_jax.trajectories.formats.said import Found, Said, ToolBlock, read_marked


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonTags:
    """`open {"name": ..., "arguments": {...}} close`. A block is closed by its closing tag.

    Attributes:
      open: the opening tag.
      close: the closing tag; outside a block it is a fault.
      call: how the JSON names a call.
      served: see `ToolFormat`.
    """

    open: str
    close: str
    call: JsonCall = NAME_AND_ARGUMENTS
    served: bool = True

    @property
    def marks(self) -> tuple[str, ...]:
        """Both tags."""
        return self.open, self.close

    @property
    def opening(self) -> tuple[str, ...]:
        """The opening tag."""
        return (self.open,)

    def read(self, said: Said) -> Found:
        """The calls in a text; a tag inside a JSON string is text."""

        def block(start: int, mark: str) -> Iterator[ToolBlock]:
            found = self.call.block(said.text, start, json_text.skip(said.text, start + len(mark)))
            end = json_text.skip(said.text, found.span[1])
            if said.marked(self.close, end):
                yield found._replace(span=(start, end + len(self.close)), closed=True)
                return
            yield found
            said.expect(self.close, end)

        return read_marked(said, (self.open,), block, (self.close,))


HERMES = JsonTags(open="<tool_call>", close="</tool_call>")
