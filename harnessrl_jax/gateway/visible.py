"""Sampled text -> what the harness sees of it: reasoning, content, and where a stop text ends it. Pure.

`split` reads a whole turn. `settled` reads a turn that is still being sampled, and gives only what no further token can
change, so that it can be sent at once.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from harnessrl_jax.sampler.protocol import Sample
from harnessrl_jax.trajectories.roles import REPLACEMENT, token_characters

THINK = "<think>"
THINK_END = "</think>"


class Split(NamedTuple):
    """The two kinds of text of a turn, both without white space around them."""

    reasoning: str
    content: str


class Stop(NamedTuple):
    """Where a stop text ended a turn.

    Attributes:
      text: the stop text.
      rest: what the sampled text holds from there on.
    """

    text: str
    rest: str


def split(text: str, *, thinking: bool) -> Split:
    """Reasoning and content of a turn.

    Args:
      text: what was sampled, tool calls taken out.
      thinking: whether the turn begins inside its reasoning, because the prompt or its first token opened it.

    Example:
      >>> split("<think>Kenya.</think> Nairobi.", thinking=True)
      Split(reasoning='Kenya.', content='Nairobi.')
    """
    if not thinking:
        return Split("", text.strip())
    reasoning, _, content = _without_opening(text).partition(THINK_END)
    return Split(reasoning.strip(), content.strip())


def settled(text: str, *, thinking: bool, marks: Sequence[str]) -> Split:
    """The part of `split` that holds for every continuation of `text`.

    Args:
      text: what was sampled so far.
      thinking: as for `split`.
      marks: texts after whose beginning nothing is certain: marks of tool calls, stop texts.
    """
    text = text[: certain(text, marks)]
    if not thinking:
        return Split("", text.strip())
    if THINK.startswith(text.strip()):
        return Split("", "")
    reasoning, closed, content = _without_opening(text).partition(THINK_END)
    if not closed:
        return Split(_before(reasoning, [THINK_END]).strip(), "")
    return Split(reasoning.strip(), content.strip())


def certain(text: str, marks: Sequence[str]) -> int:
    """How many characters of a turn no further token can change or take back; `marks` as for `settled`."""
    return len(_before(text.removesuffix(REPLACEMENT), marks))


def reasoning_tokens(ids: Sequence[int], decode: Callable[[Sequence[int]], str], *, thinking: bool) -> int:
    """How many of the sampled ids are reasoning, its marks included."""
    if not thinking:
        return 0
    text, low, _ = token_characters(ids, decode)
    end = text.find(THINK_END)
    return len(ids) if end < 0 else int((low < end + len(THINK_END)).sum())


def cut_at_stop(
    sample: Sample, decode: Callable[[Sequence[int]], str], stops: Sequence[str]
) -> tuple[Sample, Stop | None]:
    """The sample up to the token that completes the first stop text, as an engine would have ended it.

    The tokens of the stop text stay: they were sampled. What came after them was never shown to anybody.
    """
    if not stops:
        return sample, None
    text, _, high = token_characters(sample.output_ids.tolist(), decode)
    ends = [(at + len(stop), at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not ends:
        return sample, None
    end, at, stop = min(ends)
    size = int((high < end).sum()) + 1
    # Every array of a sample has one entry per token at its end; experts also of what stands before.
    values = {field.name: getattr(sample, field.name) for field in dataclasses.fields(sample)}
    gone = len(sample.output_ids) - size
    shorter = {name: value[: len(value) - gone] for name, value in values.items() if isinstance(value, np.ndarray)}
    cut = dataclasses.replace(sample, **shorter, finish="stop")
    return cut, Stop(stop, text[at : int(high[size - 1])])


def _without_opening(text: str) -> str:
    return text.lstrip().removeprefix(THINK)


def _before(text: str, marks: Sequence[str]) -> str:
    """`text` up to where a mark stands, or may be beginning at its end."""
    for mark in marks:
        at = text.find(mark)
        if at < 0:
            at = _beginning(text, mark)
        text = text[:at]
    return text


def _beginning(text: str, mark: str) -> int:
    """Where the end of `text` may be the beginning of `mark`; the length of `text` if nowhere."""
    at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while at >= 0 and not mark.startswith(text[at:]):
        at = text.find(mark[0], at + 1)
    return len(text) if at < 0 else at
