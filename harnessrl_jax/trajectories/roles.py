"""Sampled ids -> ACTION, ARGS or OTHER for each token, from the ids themselves: text is never encoded again."""

import itertools
from collections.abc import Callable, Container, Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int8, Int64

from harnessrl_jax.errors import RecordError
from harnessrl_jax.trajectories.parsing import ParsedOutput, parse_tool_calls
from harnessrl_jax.trajectories.records import Call, Finish, Role, Span

Format = Literal["hermes"]

# What a decoder shows for bytes that are not yet, or never become, a character.
REPLACEMENT = "\ufffd"


class OutputRoles(NamedTuple):
    """Roles of one output.

    Attributes:
      role: `Role` of each sampled token.
      spans: its ACTION and ARGS runs, ascending; what they leave out is OTHER.
      parsed: the tool calls they come from.
    """

    role: Int8[np.ndarray, " o"]
    spans: tuple[Span, ...]
    parsed: ParsedOutput


def assign_roles(
    output_ids: Sequence[int],
    decode: Callable[[Sequence[int]], str],
    format: Format = "hermes",
    *,
    finish: Finish = "stop",
    control_ids: Container[int] | None = None,
) -> OutputRoles:
    """Labels each sampled token by what its characters belong to.

    ACTION: overlaps a tool's name. ARGS: overlaps the arguments (braces included) and no name. OTHER: thoughts, keys,
    quotes, tags, end of turn, and everything in a block whose JSON cannot be read: an error is trained, not guessed.

    Args:
      output_ids: the ids as sampled.
      decode: ids -> text, special tokens rendered (`skip_special_tokens=False`).
      format: how the model writes calls.
      finish: why sampling ended.
      control_ids: ids of the control tokens that may delimit a call; a tag spelled by other tokens is quoted text.
        None accepts any spelling.

    Returns:
      Role of each token, the spans for the record, and the parsed calls.

    Raises:
      RecordError: the format is unknown.

    References:
      Masks from the sampled ids by character overlap, straddling tokens to the action: Harness-RL's published
      re-implementation; unreadable output kept and trained.
    """
    if format != "hermes":
        raise RecordError(f"assign_roles: unknown format {format!r}. Known formats: hermes.")
    text, low, high = token_characters(output_ids, decode)
    control = None
    if control_ids is not None:
        control = {int(start) for start, token in zip(low, output_ids, strict=True) if token in control_ids}
    parsed = parse_tool_calls(text, finish=finish, control=control)
    role = np.full(len(output_ids), Role.OTHER, np.int8)
    for block in parsed.blocks:
        for kind, (start, end) in ((Role.ARGS, block.arguments_span), (Role.ACTION, block.name_span)):
            role[(low < end) & (high > start)] = kind
    return OutputRoles(role=role, spans=_runs(role), parsed=parsed)


def call_roles(call: Call) -> Int8[np.ndarray, " o"]:
    """`Role` of each token of `call.output_ids`, as its spans say."""
    role = np.full(len(call.output_ids), int(Role.OTHER), np.int8)
    for span in call.spans:
        role[span.start : span.end] = span.role
    return role


def token_characters(
    output_ids: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> tuple[str, Int64[np.ndarray, " o"], Int64[np.ndarray, " o"]]:
    """The text of the ids, and for each token the characters `text[low:high]` it takes part in.

    Decodes a sliding window, so the cost grows with the tokens. Tokens that hold only some bytes of a character each
    get that whole character. The window keeps the last finished piece, because some tokenizers render a token
    differently at the start of a text.

    Args:
      output_ids: token ids.
      decode: ids -> text.

    Returns:
      The text, first character and one past the last character of each token.
    """
    low = np.zeros(len(output_ids), np.int64)
    high = np.zeros(len(output_ids), np.int64)
    text, shown, piece = "", "", ""
    before = read = complete = 0
    for index in range(len(output_ids)):
        piece = decode(output_ids[before : index + 1])[len(shown) :]
        low[index] = len(text) + complete
        high[index] = len(text) + len(piece)
        if piece.endswith(REPLACEMENT):
            complete = len(piece) - 1
            continue
        text += piece
        before, read = read, index + 1
        shown, piece, complete = decode(output_ids[before:read]), "", 0
    return text + piece, low, high


def _runs(role: Int8[np.ndarray, " o"]) -> tuple[Span, ...]:
    edges = np.flatnonzero(np.diff(role, prepend=Role.NONE, append=Role.NONE)).tolist()
    return tuple(
        Span(role=Role(int(role[start])), start=start, end=end)
        for start, end in itertools.pairwise(edges)
        if role[start] != Role.OTHER
    )
