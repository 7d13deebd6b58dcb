"""Prompt tokens -> which of their chunks are kept, and on which page: the host's side of the prefix cache. No JAX."""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

SCRATCH = 0  # the page that is written when a chunk is not kept


def chunk_keys(prompt: Int32[np.ndarray, " token"], chunk: int) -> list[bytes]:
    """One key a chunk: a digest of every token up to the chunk's end.

    The last chunk may be short; its key then stands for exactly this prompt.
    """
    digest, keys = hashlib.blake2b(digest_size=16), []
    for start in range(0, len(prompt), chunk):
        digest.update(prompt[start : start + chunk].tobytes())
        keys.append(digest.digest())
    return keys


class PageTable:
    """Which page holds which chunk; the least recently used page is given away first.

    The table belongs to one version of the weights: `clear` it when they change.

    Args:
      pages: their number; they are counted from 1, after the scratch page.
    """

    def __init__(self, pages: int) -> None:
        self._free = list(range(pages, 0, -1))
        self._page: OrderedDict[bytes, int] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        """Chunks that are kept."""
        return len(self._page)

    def leading(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest kept run of chunks from the start of a prompt."""
        found = []
        for key in keys:
            if key not in self._page:
                break
            found.append(self._page[key])
        # The start of a prompt is touched last: it is shared by more prompts, so it must outlive the rest.
        for key in reversed(keys[: len(found)]):
            self._page.move_to_end(key)
        return found

    def claim(self, key: bytes) -> int:
        """A page to write this chunk to; takes it from the chunk used longest ago. SCRATCH if there are no pages."""
        if key in self._page:
            self._page.move_to_end(key)
            return self._page[key]
        if self._free:
            page = self._free.pop()
        elif self._page:
            page = self._page.popitem(last=False)[1]
        else:
            return SCRATCH
        self._page[key] = page
        return page

    def clear(self) -> None:
        """Forgets every chunk."""
        self._free.extend(self._page.values())
        self._page.clear()
