"""A tokenizer's ids -> the bytes that each of them stands for. Pure."""

import re
from collections.abc import Callable, Mapping
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
    letters = _byte_of_letter() if _is_byte_level(decoder) else {}

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


def _is_byte_level(decoder: Mapping[str, Any] | None) -> bool:
    parts = (decoder or {}).get("decoders") or [decoder or {}]
    return any(part.get("type") == "ByteLevel" for part in parts)


def _byte_of_letter() -> dict[str, int]:
    """Printable Latin-1 stands for itself; the other bytes, in order, are the letters from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(rest)}
