"""Token ids as they are sampled -> text that can be sent at once."""

import bisect
from collections.abc import Callable, Sequence

from harnessrl_jax.gateway.exchange import Kind
from harnessrl_jax.gateway.visible import THINK, certain, settled
from harnessrl_jax.trajectories.roles import REPLACEMENT

_WINDOW_TOKENS = 16


class Live:
    """What of one choice can be shown, and what of that is new.

    Args:
      decode: ids -> text, control tokens spelled out.
      thinks: whether a turn with these first ids begins inside its reasoning.
      opened: whether the prompt opened it.
      marks: texts after whose beginning nothing is certain.
      stop_ids: tokens that end a turn; they are not part of its text.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        thinks: Callable[[Sequence[int]], bool],
        *,
        opened: bool,
        marks: Sequence[str],
        stop_ids: Sequence[int],
    ) -> None:
        self._decode = decode
        self._thinks = thinks
        self._opened = opened
        self._marks = marks
        self._stop_ids = frozenset(stop_ids)
        self._ids: list[int] = []
        self._ends: list[int] = []  # how long the text was when each of them was known
        self.certain = 0
        """How many of the ids so far stay part of the turn, whatever comes."""
        self._text, self._shown = "", ""
        self._before = 0
        self._sent: dict[Kind, int] = {"reasoning": 0, "content": 0}

    def feed(self, ids: Sequence[int]) -> list[tuple[Kind, str]]:
        """Takes the next ids; returns the text that they settle, by kind."""
        self._ids += [i for i in ids if i not in self._stop_ids]
        text = self._decoded()
        self._ends += [len(text)] * (len(self._ids) - len(self._ends))
        self.certain = bisect.bisect_right(self._ends, certain(text, self._marks), self.certain)
        if not self._opened and THINK.startswith(text.strip()):
            return []
        # Only a text that begins so is worth a look at its tokens.
        thinking = self._opened or (text.lstrip().startswith(THINK) and self._thinks(self._ids))
        out: list[tuple[Kind, str]] = []
        parts = settled(text, thinking=thinking, marks=self._marks)
        kinds: tuple[tuple[Kind, str], ...] = (("reasoning", parts.reasoning), ("content", parts.content))
        for kind, known in kinds:
            if len(known) > self._sent[kind]:
                out.append((kind, known[self._sent[kind] :]))
                self._sent[kind] = len(known)
        return out

    def _decoded(self) -> str:
        """The text so far. A window that slides keeps the cost of a long turn down; see `token_characters`."""
        window = self._decode(self._ids[self._before :])
        piece = window[len(self._shown) :]
        if piece.endswith(REPLACEMENT):
            return self._text + piece
        self._text, self._shown = self._text + piece, window
        if len(self._ids) - self._before >= _WINDOW_TOKENS:
            middle = (self._before + len(self._ids)) // 2
            self._before, self._shown = middle, self._decode(self._ids[middle:])
        return self._text
