"""Sampled text -> tool calls with their character spans. Nothing is guessed and nothing is evaluated.

The one parser: the gateway returns what it finds, and the roles of tokens come from the same spans, so training and
serving never disagree about what a call is.
"""

from collections.abc import Container, Mapping
from typing import NamedTuple

from harnessrl_jax.trajectories.formats import Said, Schemas, ToolBlock, ToolFormat
from harnessrl_jax.trajectories.records import Finish, ParseStatus


class ParsedOutput(NamedTuple):
    """What a sampled text says.

    Attributes:
      content: the text that is not part of a returned call, stripped; malformed calls stay in it, and so does
        everything where the harness reads the text itself.
      blocks: every block that could be read, returned or not.
      status: "none" = no call in it; "ok"; "malformed" = something in it was meant as a call and is none; "truncated" =
        sampling hit the length limit after something that looks like a call, whatever was found.
      served: whether the format hands calls over.
    """

    content: str
    blocks: tuple[ToolBlock, ...]
    status: ParseStatus
    served: bool

    @property
    def calls(self) -> tuple[ToolBlock, ...]:
        """The calls to hand to the harness: closed blocks; none of a truncated output."""
        handed = self.served and self.status != "truncated"
        return tuple(block for block in self.blocks if block.closed) if handed else ()


def parse_tool_calls(
    text: str,
    format: ToolFormat,
    *,
    finish: Finish = "stop",
    control: Mapping[str, Container[int]] | None = None,
    schemas: Schemas | None = None,
) -> ParsedOutput:
    """Finds the calls in a sampled text.

    Args:
      text: the sampled text, special tokens rendered, without the token that ended the turn.
      format: how the model writes calls.
      finish: why sampling ended; "length" wins over every call that was found.
      control: for each mark of the format that the tokenizer has as a control token, the character positions where
        that token starts; the same letters elsewhere are quoted text. None: all marks are spelled by ordinary tokens.
      schemas: JSON schema of each tool's parameters, for formats that write values without types.

    Returns:
      The calls, the remaining text and the status.

    Example:
      >>> from harnessrl_jax.trajectories.formats import HERMES
      >>> said = 'Look.<tool_call>{"name": "find", "arguments": {"q": 1}}</tool_call>'
      >>> out = parse_tool_calls(said, HERMES)
      >>> out.content, out.calls[0].name, out.calls[0].arguments, out.status
      ('Look.', 'find', '{"q": 1}', 'ok')
    """
    found = format.read(Said(text=text, control=control or {}, whole=finish != "length", schemas=schemas or {}))
    status: ParseStatus = "none" if not found.tried else "ok" if found.sound else "malformed"
    if found.tried and finish == "length":
        status = "truncated"
    parsed = ParsedOutput(content="", blocks=found.blocks, status=status, served=format.served)
    return parsed._replace(content=_outside(text, parsed.calls))


def _outside(text: str, calls: tuple[ToolBlock, ...]) -> str:
    edges = [0, *(edge for call in calls for edge in call.span), len(text)]
    return "".join(text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)).strip()
