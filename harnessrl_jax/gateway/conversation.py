"""Messages, tools and the turns sampled before -> prompt ids.

An assistant turn that the harness echoes comes back as the ids that were sampled, never as text that is encoded again;
everything around it equals the canonical render.
"""

from collections.abc import Sequence
from typing import NamedTuple

from harnessrl_jax.errors import TextError
from harnessrl_jax.gateway.exchange import TURN
from harnessrl_jax.gateway.text import TextCodec
from harnessrl_jax.gateway.turns import Match, Message, Turn, Turns


class Prompt(NamedTuple):
    """What the sampler will read, and how it came about.

    Attributes:
      ids: the prompt.
      spliced: call ids of the turns whose sampled ids stand in it, in order.
      rewrites: why each other assistant turn was rendered as text: `unknown` (never sampled here), `content`, `calls`,
        `arguments` or `reasoning` (sampled, but changed or left out by the harness), `template` (it writes such a turn
        in a way that sampled ids cannot replace).
    """

    ids: list[int]
    spliced: tuple[str, ...]
    rewrites: tuple[str, ...]


def build_prompt(
    codec: TextCodec, turns: Turns, session_id: str, messages: Sequence[Message], tools: Sequence[Message]
) -> Prompt:
    """The ids that a request asks the model to continue.

    A turn found by a tool-call id or by its name is that turn. Content alone may have been sampled several times: the
    turn whose prompt is exactly what stands before it wins, then the turn of the same session that stood there in an
    earlier prompt, then its latest; a turn of another session counts only with its exact prompt, so that the result
    does not depend on what runs at the same time.

    Args:
      codec: the model's tokenizer and template.
      turns: what was sampled in this attempt.
      session_id: the conversation that asks.
      messages: chat messages with parsed tool-call arguments.
      tools: tool definitions.

    Raises:
      TextError: the template refuses the messages.
    """
    found, rewrites = _find(turns, messages)
    shown = [{key: value for key, value in message.items() if key != TURN} for message in messages]
    guarded = codec.protect(shown, tools)
    canonical = codec.render(guarded)
    borders: list[str] = [canonical]
    bodies: list[str] = []
    if found:
        try:
            borders = _up_to_header(codec.render(guarded, found).split(guarded.mark), codec.header)
        except TextError:
            borders = []
        bodies = _bodies(canonical, borders, len(found))
        if not bodies:
            rewrites += ["template"] * len(found)
            borders, found = [canonical], {}
    texts = _Texts(guarded.breaker, borders, bodies)
    ids, spliced, unmatched = _splice(codec, turns, texts, list(found.values()), session_id)
    return Prompt(ids, spliced, (*rewrites, *unmatched))


def _find(turns: Turns, messages: Sequence[Message]) -> tuple[dict[int, Match], list[str]]:
    """Turns that each assistant message may stand for, by its index, and why others stand for none."""
    found: dict[int, Match] = {}
    rewrites: list[str] = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            match = turns.find(message)
            if match.turns:
                found[index] = match
            else:
                rewrites.append(match.reason)
    return found, rewrites


class _Texts(NamedTuple):
    """A rendered conversation: border, turn, border, ..., and the mark that breaks control tokens in all of it."""

    breaker: str
    borders: list[str]
    bodies: list[str]


def _splice(
    codec: TextCodec, turns: Turns, texts: _Texts, matches: list[Match], session_id: str
) -> tuple[list[int], tuple[str, ...], list[str]]:
    """Ids of border, turn, border, ..., each turn as sampled where one fits and as text where none does."""
    ids: list[int] = []
    spliced: list[str] = []
    unmatched: list[str] = []
    pending, ended = texts.borders[0], False
    for body, border, match in zip(texts.bodies, texts.borders[1:], matches, strict=True):
        before = ids + _after(codec, pending, texts.breaker, ended)
        turn = _choose(turns, match, before, session_id)
        if turn is None:
            unmatched.append("unknown")
            pending += body + border
            continue
        spliced.append(turn.call_id)
        ids = before + list(turn.output_ids)
        pending, ended = border, turn.output_ids[-1] in codec.stop_ids
    return ids + _after(codec, pending, texts.breaker, ended), tuple(spliced), unmatched


def _after(codec: TextCodec, text: str, breaker: str, ended: bool) -> list[int]:
    """Ids of a border. The template closes the turn before it, which a sampled end of turn has done already."""
    ids = codec.encode(text, breaker)
    return ids[1:] if ended and ids and ids[0] in codec.stop_ids else ids


def _choose(turns: Turns, match: Match, before: list[int], session_id: str) -> Turn | None:
    if match.sure:
        return match.turns[0]
    read = tuple(before)
    exact = next((turn for turn in match.turns if turn.prompt_ids == read), None)
    own = [turn for turn in match.turns if turn.session_id == session_id]
    if exact is not None or not own:
        return exact
    placed = (turn for turn in own if turns.stood(session_id, read + turn.output_ids))
    return next(placed, own[-1]) if len(own) > 1 else own[0]


def _up_to_header(borders: list[str], header: str) -> list[str]:
    """Borders that each end with the header of the turn after them; [] if one lacks it.

    Some templates write the beginning of a turn themselves, such as empty reasoning. The sampled ids are the whole
    turn, from the header on.
    """
    if not header:
        return borders
    cut = [border.rpartition(header) for border in borders[:-1]]
    if not all(found for _, found, _ in cut):
        return []
    return [*(before + found for before, found, _ in cut), borders[-1]]


def _bodies(canonical: str, borders: list[str], count: int) -> list[str]:
    """What the canonical render holds between the borders; [] if the borders do not frame it."""
    if len(borders) != count + 1 or not canonical.startswith(borders[0]):
        return []
    bodies: list[str] = []
    at = len(borders[0])
    for border in borders[1:-1]:
        end = canonical.find(border, at)
        if end < 0:
            return []
        bodies.append(canonical[at:end])
        at = end + len(border)
    end = len(canonical) - len(borders[-1])
    if end < at or not canonical.endswith(borders[-1]):
        return []
    return [*bodies, canonical[at:end]]
