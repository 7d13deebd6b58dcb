"""A tokenizer's ids -> the bytes that each of them stands for. Pure."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"  # how SentencePiece writes a space


def bytes_of(tokenizer: Tokenizer, decoder: Mapping[str, Any] | None) -> Callable[[int], bytes | None]:
    """What each id adds to a text, also where it is a part of a character. Joined, they are the text.

    Args:
      tokenizer: byte-level BPE, or SentencePiece's BPE with its bytes as a fallback.
      decoder: the part of that name of its `tokenizer.json`.

    Returns:
      id -> its bytes, those of its name where it is an added token; None for an id that the tokenizer does not have.

    References:
      The letters that stand for bytes: GPT-2's `bytes_to_unicode`.
    """
    added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
    letters = _byte_of_letter() if _has(decoder, "ByteLevel") else {}

    def of(token: int) -> bytes | None:
        if token in added:
            return added[token].encode()
        literal = tokenizer.id_to_token(token)
        if literal is None:
            return None
        if letters and all(letter in letters for letter in literal):
            return bytes(letters[letter] for letter in literal)
        byte = _BYTE.fullmatch(literal)
        return bytes([int(byte[1], 16)]) if byte else literal.replace(_SPACE, " ").encode()

    return of


def whole_characters(
    tokenizer: Tokenizer, decoder: Mapping[str, Any] | None
) -> Callable[[Sequence[int]], Sequence[int]]:
    """Lets a decoder with bytes as a fallback lose no character that is whole.

    Such a decoder takes all bytes in a row together: if the last character of them is cut, every byte becomes U+FFFD,
    also those of characters before it. So a text could not be shown before its end.

    Args:
      tokenizer: the one that decodes.
      decoder: the part of that name of its `tokenizer.json`.

    Returns:
      ids -> ids to decode instead, in which one U+FFFD stands for each part that is no character.
    """
    found = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    tokens = [token for token in found if token is not None]
    if not _has(decoder, "ByteFallback") or len(tokens) < len(found):
        return lambda ids: ids
    byte_of = {token: byte for byte, token in enumerate(tokens)}

    def of(ids: Sequence[int]) -> Sequence[int]:
        if byte_of.keys().isdisjoint(ids):
            return ids
        out: list[int] = []
        for in_bytes, run in itertools.groupby(ids, byte_of.__contains__):
            if in_bytes:
                text = bytes(map(byte_of.__getitem__, run)).decode(errors="replace")
                out += map(tokens.__getitem__, text.encode())
            else:
                out += run
        return out

    return of


def _has(decoder: Mapping[str, Any] | None, kind: str) -> bool:
    parts = (decoder or {}).get("decoders") or [decoder or {}]
    return any(part.get("type") == kind for part in parts)


def _byte_of_letter() -> dict[str, int]:
    """Printable Latin-1 stands for itself; the other bytes, in order, are the letters from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(rest)}
