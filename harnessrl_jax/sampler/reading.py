"""Prompts -> the slots that read them: which chunks share a call. Used by every driver of an Engine."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from harnessrl_jax.models import Params
from harnessrl_jax.sampler.engine import Chunks, Engine, Pages, Prefix
from harnessrl_jax.sampler.pages import SCRATCH


class Unread(NamedTuple):
    """What a slot has to read of a prompt."""

    slot: int
    prompt: Int32[np.ndarray, " token"]
    pages: Sequence[int]  # where each chunk is kept that was not read before; those are the prompt's last


def read(
    engine: Engine,
    params: Params,
    prefix: Prefix,
    pages: Pages,
    prompts: Sequence[Unread],
    settle: Callable[[Any], Any] = lambda tree: tree,
) -> tuple[Prefix, Pages]:
    """Reads prompts into their slots. Chunks share a call, whether they are of one prompt or of several.

    Args:
      engine: sizes.
      params: the weights.
      prefix: what the slots have read. Donated, like `pages`.
      pages: kept chunks.
      prompts: what is to be read; no two of one slot.
      settle: puts results where they belong, see `Placement`.

    Returns:
      The prefix with all prompts, and the pages.
    """
    rows = [row for unread in prompts for row in _rows(unread, engine.chunk)]
    for at in range(0, len(rows), engine.rows):
        chunks = _together(rows[at : at + engine.rows], engine)
        prefix, pages = settle(engine.prefill(params, prefix, pages, chunks))
    return prefix, pages


def _rows(unread: Unread, size: int) -> Iterator[Chunks]:
    """One chunk after the other, without the axis of the rows."""
    number = -(-len(unread.prompt) // size)
    for i, page in zip(range(number - len(unread.pages), number), unread.pages, strict=True):
        part = unread.prompt[i * size : (i + 1) * size]
        token = np.pad(part, (0, size - len(part)))
        yield Chunks(token, *map(np.int32, (unread.slot, i * size, len(part), page)))


def _together(rows: Sequence[Chunks], engine: Engine) -> Chunks:
    """The rows of one call, padded with rows that are of no slot."""
    nothing = np.zeros(engine.chunk, np.int32)
    padding = range(engine.slots, engine.slots + engine.rows - len(rows))
    more = [Chunks(nothing, *map(np.int32, (slot, 0, 1, SCRATCH))) for slot in padding]
    return Chunks(*map(np.stack, zip(*rows, *more, strict=True)))
