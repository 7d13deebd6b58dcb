"""Calls as JSON without marks of its own, or in a Markdown fence: coder models, harnesses that ask for JSON. Pure."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from harnessrl_jax.trajectories.formats import json_text
from harnessrl_jax.trajectories.formats.json_calls import NAME_AND_ARGUMENTS, JsonCall, call_run
from harnessrl_jax.trajectories.formats.said import Found, Malformed, Said, ToolBlock

_FENCE = r"(?m:^)```[a-z_]*[ \t]*\n[ \t\n]*"
_FENCE_END = "```"


@dataclass(frozen=True, slots=True, kw_only=True)
class BareJson:
    """`{"name": ..., "arguments": {...}}`, several in a row, or an array of them.

    Nothing but its place shows that such JSON is a call: it begins the output or follows the
    reasoning, or it stands in a fence. JSON elsewhere
    is quoted, and JSON that does not begin with a key of a call is an answer. Each call is closed by its own brace.

    Attributes:
      call: how the JSON names a call.
      separator: may stand between two calls.
      served: see `ToolFormat`.
    """

    call: JsonCall = NAME_AND_ARGUMENTS
    separator: str = ""
    served: bool = True

    @property
    def marks(self) -> tuple[str, ...]:
        """None."""
        return ()

    @property
    def opening(self) -> tuple[str, ...]:
        """An object, an array or a fence."""
        return "{", "[", "```"

    def read(self, said: Said) -> Found:
        """The calls in a text."""
        opening = re.compile(rf"(?:(?:\A|</think>)[ \t\n\r]*|(?P<fence>{_FENCE}))(?={self.call.head})")
        blocks: list[ToolBlock] = []
        tried, sound, at = False, True, 0
        while (hit := opening.search(said.text, at)) is not None:
            tried = True
            at = hit.end()
            try:
                for block in self._calls(said, hit):
                    blocks.append(block)
                    at = block.span[1]
            except Malformed as fault:
                sound, at = False, max(at, fault.at)
        return Found(tuple(blocks), tried, sound)

    def _calls(self, said: Said, hit: re.Match[str]) -> Iterator[ToolBlock]:
        text, fenced, end = said.text, hit.group("fence") is not None, hit.end()
        for block in call_run(said, hit.start(), hit.end(), self.call, self.separator):
            end = block.span[1]
            fence = json_text.skip(text, end)
            if fenced and text.startswith(_FENCE_END, fence):
                yield block._replace(span=(block.span[0], fence + len(_FENCE_END)))
                return
            yield block
        if fenced:
            said.expect(_FENCE_END, json_text.skip(text, end))


BARE_JSON = BareJson()
