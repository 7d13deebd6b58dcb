"""A history and a prompt that takes it up without extending it -> where they part, and why. NumPy only.

The requests say what the harness changed; where they say nothing, a decoder tells whether the text changed or only its
ids. The tree branches at that place whatever the reason is: nothing sampled is encoded again.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

from harnessrl_jax.trajectories.evidence import Fork, ForkCategory
from harnessrl_jax.trajectories.prefixes import common_prefix, history
from harnessrl_jax.trajectories.records import Call
from harnessrl_jax.trajectories.requests import Asked, Message
from harnessrl_jax.trajectories.takeovers import changed_text

Decode: TypeAlias = Callable[[Sequence[int]], str]

SHOWN_IDS = 16
_REASONING = re.compile(r"<think(?:ing)?>.*?</think(?:ing)?>|^(?:(?!<think).)*?</think(?:ing)?>", re.DOTALL)


def find_fork(before: Call, after: Call, requests: tuple[Asked | None, Asked | None], decode: Decode | None) -> Fork:
    """Compares the history of one call with the prompt of another.

    Args:
      before: the call whose prompt and output are the history.
      after: the call that takes it up.
      requests: what both asked; None where it could not be read.
      decode: ids -> text, control tokens spelled out; None if there is none.

    Returns:
      The fork.
    """
    old = history(before)
    position = common_prefix(old, after.prompt_ids)
    ends = [ids[position : position + SHOWN_IDS].tolist() for ids in (old, after.prompt_ids)]
    return Fork(
        from_call_id=before.call_id,
        category=_category(before, after, position, requests, decode),
        position=position,
        before=tuple(ends[0]),
        after=tuple(ends[1]),
        before_text=None if decode is None else decode(ends[0]),
        after_text=None if decode is None else decode(ends[1]),
    )


def _category(
    before: Call, after: Call, position: int, requests: tuple[Asked | None, Asked | None], decode: Decode | None
) -> ForkCategory:
    """The requests come first: they say what the harness did. The texts tell apart what it did not say."""
    old, new = requests
    asked: ForkCategory | None = None
    repeated = False
    if old is not None and new is not None:
        if old.instructions != new.instructions or old.tools != new.tools:
            return _other_head(old, new)
        asked = _other_messages(before, old, new, None if decode is None else decode(before.output_ids.tolist()))
        repeated = asked is None and (position < len(before.prompt_ids) or _keeps_reasoning(old, new))
    if asked in ("arguments", "dropped") or decode is None:
        # If it repeats every message and they part before the answer, it is the rendering that differs.
        return asked or ("template" if repeated and position < len(before.prompt_ids) else "unknown")
    text = _other_text(decode(history(before)[position:].tolist()), decode(after.prompt_ids[position:].tolist()))
    if repeated and text != "retokenised":
        return "template"
    return text or asked or "edited"


def _other_head(old: Asked, new: Asked) -> ForkCategory:
    """What changed before the first message."""
    if old.instructions == new.instructions:
        return "tools"
    if old.tools != new.tools or changed_text(old.instructions, new.instructions):
        return "handoff"
    return "instructions"


def _other_messages(before: Call, old: Asked, new: Asked, answer: str | None) -> ForkCategory | None:
    """What changed in the messages; None if nothing did. Without its text the answer is not compared."""
    pairs = zip(old.messages, new.messages, strict=False)
    place = next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(old.messages), len(new.messages)))
    if place < len(old.messages):
        left = new.messages[place] if place < len(new.messages) else None
        if left is None or left in old.messages[place + 1 :]:
            return "dropped"
        return _other_turn(old.messages[place], left)
    echo = _echo(old, new)
    if echo is None:
        return "dropped"
    made = tuple((call.name, call.arguments) for call in before.tool_calls)
    if echo.calls != made:
        return "arguments" if _same_calls(echo.calls, made) else "edited"
    return None if answer is None or _bare(echo.text) in _bare(answer) else "edited"


def _echo(old: Asked, new: Asked) -> Message | None:
    """The turn that stands where the answer to the old request belongs."""
    echo = new.messages[len(old.messages)] if len(new.messages) > len(old.messages) else None
    return echo if echo is not None and echo.role == "assistant" else None


def _keeps_reasoning(old: Asked, new: Asked) -> bool:
    echo = _echo(old, new)
    return echo is not None and (echo.reasoning != "" or "<think" in echo.text)


def _other_turn(old: Message, new: Message) -> ForkCategory:
    if old.role == new.role and _same_calls(old.calls, new.calls):
        if old.calls != new.calls:
            return "arguments"
        if _bare(old.text) == _bare(new.text):
            return "whitespace"
        if _bare(_REASONING.sub("", old.text)) == _bare(new.text):
            return "reasoning"
    return "edited"


def _other_text(old: str, new: str) -> ForkCategory | None:
    """What the texts from the fork on say; None if they are simply different."""
    if new.startswith(old):
        return "retokenised"
    if _bare(new).startswith(_bare(old)):
        return "whitespace"
    without = _REASONING.sub("", old)
    if without != old and _bare(_REASONING.sub("", new)).startswith(_bare(without)):
        return "reasoning"
    return None


def _same_calls(a: Sequence[tuple[str, str]], b: Sequence[tuple[str, str]]) -> bool:
    return len(a) == len(b) and all(x[0] == y[0] and _same_json(x[1], y[1]) for x, y in zip(a, b, strict=True))


def _same_json(a: str, b: str) -> bool:
    """Whether two argument texts mean the same value: order of keys, spaces and 1 against 1.0 do not matter."""
    try:
        return a == b or _value(a) == _value(b)
    except (ValueError, RecursionError):
        return False


def _value(text: str) -> str:
    return json.dumps(json.loads(text, parse_float=_number), sort_keys=True)


def _number(digits: str) -> int | float:
    value = float(digits)
    return int(value) if value.is_integer() else value


def _bare(text: str) -> str:
    return "".join(text.split())
