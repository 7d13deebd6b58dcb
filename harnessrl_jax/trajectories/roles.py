"""Sampled ids -> ACTION, ARGS or OTHER for each token, from the ids themselves: text is never encoded again."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int8, Int64

from harnessrl_jax.trajectories.formats import Schemas, ToolFormat
from harnessrl_jax.trajectories.parsing import ParsedOutput, parse_tool_calls
from harnessrl_jax.trajectories.records import Call, Finish, Role, Span

# What a decoder shows for bytes that are not yet, or never become, a character.
REPLACEMENT = "\ufffd"

# Bytes of one character that may still be to come. A window as long as this is halved, unless its later half shows so
# few characters that a character which is cut at its start could reach to its end.
_OPEN_BYTES = 3
_WINDOW_TOKENS = 16
_WINDOW_CHARACTERS = 8


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
    format: ToolFormat,
    *,
    finish: Finish = "stop",
    control: Mapping[str, int] | None = None,
    schemas: Schemas | None = None,
) -> OutputRoles:
    """Labels each sampled token by what its characters belong to.

    ACTION: overlaps a tool's name. ARGS: overlaps the arguments (braces included) and no name. OTHER: thoughts, keys,
    quotes, tags, end of turn, and everything in a block that cannot be read: an error is trained, not guessed.

    Args:
      output_ids: the ids as sampled, without the one that ended the turn.
      decode: ids -> text, special tokens rendered (`skip_special_tokens=False`).
      format: how the model writes calls.
      finish: why sampling ended.
      control: id of each control token of the tokenizer, by its text. A mark of the format that is one counts only as
        that token; spelled by other tokens it is quoted text. None: the tokenizer has none.
      schemas: JSON schema of each tool's parameters; the roles do not depend on it.

    Returns:
      Role of each token, the spans for the record, and the parsed calls.

    Example:
      >>> from harnessrl_jax.trajectories.formats import HERMES
      >>> said = '<tool_call>{"name": "find", "arguments": {}}</tool_call>'
      >>> read = assign_roles([ord(letter) for letter in said], lambda ids: "".join(map(chr, ids)), HERMES)
      >>> [(span.role.name, said[span.start : span.end]) for span in read.spans]
      [('ACTION', 'find'), ('ARGS', '{}')]

    References:
      Masks from the sampled ids by character overlap, straddling tokens to the action: Harness-RL's published
      re-implementation; unreadable output kept and trained.
    """
    text, low, high = token_characters(output_ids, decode)
    marks = {control[mark]: mark for mark in format.marks if mark in control} if control else {}
    standing: dict[str, set[int]] = {mark: set() for mark in marks.values()}
    for token, start, end in zip(output_ids, low.tolist(), high.tolist(), strict=True):
        if token in marks:
            standing[marks[token]].add(text.find(marks[token], start, end))
    parsed = parse_tool_calls(text, format, finish=finish, control=standing, schemas=schemas)
    role = np.full(len(output_ids), Role.OTHER, np.int8)
    spans = [(Role.ARGS, block.arguments_span) for block in parsed.blocks]
    spans += [(Role.ACTION, block.name_span) for block in parsed.blocks]
    for kind, (start, end) in spans:
        if start < end:
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

    A token's characters are what decoding grows by when it is added. Decodes a sliding window, so the cost grows with
    the tokens; the window is long enough that what stands before it has no say in its end. Tokens that hold only some
    bytes of a character each get that whole character; the token after bytes that never become one gets them too.

    Args:
      output_ids: token ids.
      decode: ids -> text. What it makes of a token may depend on the tokens beside it, and on being the first.

    Returns:
      The text, first character and one past the last character of each token.

    Example:
      >>> text, low, high = token_characters([0, 1], lambda ids: "".join(["ab", "c"][i] for i in ids))
      >>> text, low.tolist(), high.tolist()
      ('abc', [0, 2], [2, 3])
    """
    low = np.zeros(len(output_ids), np.int64)
    high = np.zeros(len(output_ids), np.int64)
    before, known, total = 0, "", 0
    for index in range(len(output_ids)):
        if index - before >= _WINDOW_TOKENS:
            middle = (before + index) // 2
            shorter = decode(output_ids[middle:index])
            if len(shorter) >= _WINDOW_CHARACTERS:
                before, known = middle, shorter
        more = decode(output_ids[before : index + 1])
        low[index] = total - min(len(known) - len(known.rstrip(REPLACEMENT)), _OPEN_BYTES)
        total += len(more) - len(known)
        high[index] = total
        known = more
    # Some decoders show a character that is not finished as several replacements, and take them back.
    return decode(output_ids), low, np.minimum.accumulate(high[::-1])[::-1]


def _runs(role: Int8[np.ndarray, " o"]) -> tuple[Span, ...]:
    edges = np.flatnonzero(np.diff(role, prepend=Role.NONE, append=Role.NONE)).tolist()
    return tuple(
        Span(role=Role(int(role[start])), start=start, end=end)
        for start, end in itertools.pairwise(edges)
        if role[start] != Role.OTHER
    )
