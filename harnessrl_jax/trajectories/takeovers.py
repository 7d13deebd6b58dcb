"""Requests of one agent -> the earlier call whose messages a new conversation takes up. Pure.

A prompt that extends no earlier one may still go on with an earlier conversation: the harness changed its history, or
another agent took over. What shows it are turns that were sampled there. A preamble that both were merely given shows
nothing.
"""

from collections.abc import Sequence

from harnessrl_jax.trajectories.records import Call
from harnessrl_jax.trajectories.requests import Asked, Message


class Conversations:
    """The conversations seen so far, found by what a request repeats of them."""

    def __init__(self) -> None:
        self._made: dict[str, int] = {}
        self._whole: dict[tuple[Message, ...], int] = {}
        self._turns: dict[Message, int] = {}

    def add_call(self, number: int, call: Call) -> None:
        """Makes the tool calls of a call known."""
        self._made.update((made.id, number) for made in call.tool_calls)

    def add_request(self, number: int, asked: Asked, given: int) -> None:
        """Makes the messages of a call known.

        Args:
          number: of the call.
          asked: its request.
          given: how many messages its conversation began with.
        """
        self._whole[asked.messages] = number
        self._turns.update((turn, number) for turn in asked.messages[given:] if turn.role != "user" or turn.ids)

    def made_by(self, asked: Asked) -> list[int]:
        """The calls that made the tool calls which a request speaks of."""
        return [self._made[tool_id] for turn in asked.messages for tool_id in turn.ids if tool_id in self._made]

    def find(self, asked: Asked) -> int | None:
        """The latest call whose conversation a request takes up; None if it repeats nothing of any.

        Args:
          asked: a request whose prompt extends no earlier one.
        """
        made = self.made_by(asked)
        turns = [self._turns[turn] for turn in asked.messages if turn in self._turns]
        if made or turns:
            return max(made + turns)
        return next(
            (
                self._whole[asked.messages[:length]]
                for length in range(len(asked.messages) - 1, 0, -1)
                if asked.messages[:length] in self._whole
            ),
            None,
        )


def changed_text(a: str, b: str) -> bool:
    """Whether two instructions are two texts, and not one with some lines changed: less than half is common."""
    longer = max(len(a), len(b))
    start = _common(a, b)
    end = _common(a[start:][::-1], b[start:][::-1])
    return 2 * (start + end) < longer


def _common(a: Sequence[str], b: Sequence[str]) -> int:
    return next((place for place, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
