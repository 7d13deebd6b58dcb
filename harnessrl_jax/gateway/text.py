"""A model folder's tokenizer and chat template -> prompt ids from messages, and text from sampled ids.

Only the template can write a control token: text from users, tools and models is encoded as ordinary pieces.
"""

import functools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from harnessrl_jax.errors import TextError
from harnessrl_jax.gateway.guard import Guard, Guarded
from harnessrl_jax.gateway.template import ChatTemplate
from harnessrl_jax.gateway.token_bytes import bytes_of, whole_characters
from harnessrl_jax.trajectories.formats import ToolFormat, format_of_template

_CACHED_PIECES = 8192
_CACHED_CHARACTERS = 1 << 16


class TextCodec:
    """Renders, encodes and decodes for one model.

    The prompt of a conversation equals the tokenizer's own encoding of the rendered text whenever no control token is
    spelled in untrusted text.

    Args:
      folder: holds `tokenizer.json` and `chat_template.jinja`; `tokenizer_config.json` and `generation_config.json`
        are read where present (names for the template, further stop ids).
      tool_format: how the model writes tool calls; None: as its template does, see `format_of_template`.

    Raises:
      TextError: a file is missing or cannot be used, or the template cannot be extended turn by turn.

    Attributes:
      header: text that begins an assistant turn; "" if the template does not write it on request.
      stop_ids: tokens that end an assistant turn, the template's own first.
      vocab_size: number of ids, added tokens included.
    """

    def __init__(self, folder: Path, *, tool_format: ToolFormat | None = None) -> None:
        self._where = str(folder)
        self._tool_format = tool_format
        document = _read_json(folder / "tokenizer.json")
        settings = _read_json(folder / "tokenizer_config.json", optional=True)
        generation = _read_json(folder / "generation_config.json", optional=True)
        self._full = _tokenizer(folder, document)
        added = [token for token in document.get("added_tokens", ()) if _is_control(token)]
        self._control = {token["content"]: token for token in added}
        rest = [token for token in document.get("added_tokens", ()) if not _is_control(token)]
        self._plain = _tokenizer(folder, document | {"added_tokens": rest, "post_processor": None})
        unknown = (document.get("model") or {}).get("unk_token")
        self._never = {token["id"] for token in added if token["content"] != unknown}
        self._template = ChatTemplate(_template_source(folder, settings), f"{folder}: chat template", _names(settings))
        self._guard = Guard(self._control, self._template.source)
        self.bytes_of = bytes_of(self._full, document.get("decoder"))
        self._whole_characters = whole_characters(self._full, document.get("decoder"))
        self.encode_plain = functools.lru_cache(_CACHED_PIECES)(self._encode_plain)
        self.vocab_size: int = self._full.get_vocab_size(with_added_tokens=True)
        self.stop_ids = self._stop_ids(settings, generation)
        self.header = self._header()

    @functools.cached_property
    def tool_format(self) -> ToolFormat:
        """How the model writes tool calls. Raises TextError if it was not given and the template does not show it."""
        if self._tool_format is not None:
            return self._tool_format
        render = lambda messages, tools, *, generate: self.render(self.protect(messages, tools), generate=generate)
        return format_of_template(render, f"{self._where}: the chat template")

    @functools.cached_property
    def control(self) -> dict[str, int]:
        """Id of each control token, by its text."""
        return {literal: token["id"] for literal, token in self._control.items()}

    def tags(self, *literals: str) -> frozenset[int] | None:
        """Ids of these control tokens; None unless the tokenizer has them all, so that text must spell them."""
        known = [self._control[literal]["id"] for literal in literals if literal in self._control]
        return frozenset(known) if len(known) == len(literals) else None

    def protect(self, messages: Sequence[Any], tools: Sequence[Any] = ()) -> Guarded:
        """Messages and tools in which no control token is spelled; see `Guard`."""
        return self._guard.protect(list(messages), list(tools))

    def render(self, guarded: Guarded, marked: Iterable[int] = (), *, generate: bool = True) -> str:
        """The conversation as text, still with breakers.

        Args:
          guarded: what `protect` gave.
          marked: indices of assistant messages whose turn is written as `guarded.mark`.
          generate: whether to end with the header of the next assistant turn.

        Raises:
          TextError: the template refuses the messages.
        """
        messages = list(guarded.messages)
        for index in marked:
            messages[index] = {"role": "assistant", "content": guarded.mark}
        return self._template.render(messages, guarded.tools, generate=generate)

    def encode(self, text: str, breaker: str) -> list[int]:
        """Ids of rendered text: control tokens where the template wrote them, ordinary pieces everywhere else."""
        ids: list[int] = []
        pieces = self._splitter.split(text) if self._control else [text]
        for at, piece in enumerate(pieces):
            if at % 2:
                ids.append(self._control[piece]["id"])
            elif piece:
                plain = self._stripped(piece, pieces, at).replace(breaker, "")
                ids.extend(self.encode_plain(plain) if len(plain) <= _CACHED_CHARACTERS else self._encode_plain(plain))
        return ids

    def prompt(self, messages: Sequence[Any], tools: Sequence[Any] = ()) -> list[int]:
        """Ids of a conversation that ends with the header of the next assistant turn."""
        guarded = self.protect(messages, tools)
        return self.encode(self.render(guarded), guarded.breaker)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens spelled out; bytes that are no text become U+FFFD."""
        return self._full.decode(list(self._whole_characters(ids)), skip_special_tokens=False)

    def _encode_plain(self, text: str) -> tuple[int, ...]:
        ids = tuple(self._plain.encode(text, add_special_tokens=False).ids)
        if not self._never.isdisjoint(ids):
            token = self._full.id_to_token(next(i for i in ids if i in self._never))
            raise TextError(
                f"{self._where}: the tokenizer turns plain text into the control token {token!r}. Use a tokenizer "
                "whose merges cannot build its control tokens."
            )
        return ids

    @functools.cached_property
    def _splitter(self) -> re.Pattern[str]:
        longest_first = sorted(self._control, key=lambda literal: (-len(literal), literal))
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def _stripped(self, piece: str, pieces: Sequence[str], at: int) -> str:
        """Without the white space that a neighbouring control token swallows, as its `lstrip` and `rstrip` say."""
        if at > 0 and self._control[pieces[at - 1]].get("rstrip"):
            piece = piece.lstrip()
        if at + 1 < len(pieces) and self._control[pieces[at + 1]].get("lstrip"):
            piece = piece.rstrip()
        return piece

    def _header(self) -> str:
        """What the template writes when it asks for the next turn; "" if it always does."""
        probe = self.protect([{"role": "user", "content": "a"}])
        closed, asking = (self.render(probe, generate=generate) for generate in (False, True))
        return asking[len(closed) :] if asking.startswith(closed) else ""

    def _stop_ids(self, settings: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
        """Close of turn, found by rendering a probe, and the ends of text that the folder declares."""
        probe = self.protect([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        after = [*probe.messages, {"role": "user", "content": "c"}]
        history = self.render(probe._replace(messages=after), [1])
        if history.partition(probe.mark)[0] != self.render(probe._replace(messages=after[:1])):
            raise TextError(
                f"{self._where}: the chat template does not write an earlier assistant turn as it prompted for it, so "
                "sampled ids cannot be put back. Use one whose generation prompt equals the header of a past turn."
            )
        closing = self.render(probe, [1], generate=False).partition(probe.mark)[2]
        close = self._splitter.search(closing) if self._control else None
        declared = generation.get("eos_token_id", [])
        ends = [self._control[close.group()]["id"]] if close else []
        ends += declared if isinstance(declared, list) else [declared]
        if (literal := _literal(settings.get("eos_token"))) in self._control:
            ends.append(self._control[literal]["id"])
        if not ends:
            raise TextError(
                f"{self._where}: no token ends an assistant turn. The template must close it with an added token, or "
                "generation_config.json must give eos_token_id."
            )
        return tuple(dict.fromkeys(ends))


def _is_control(token: dict[str, Any]) -> bool:
    """Whether an added token steers the model. Runs of white space are text; so is a single ordinary character."""
    content = token["content"]
    if len(content) < 2 and token.get("special"):
        raise TextError(
            f"The special token {content!r} is a single character, which text cannot be kept from spelling."
        )
    return len(content) >= 2 and not content.isspace()


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TextError(
            f"{path}: {error.strerror}. A model folder holds tokenizer.json and chat_template.jinja."
        ) from error
    except ValueError as error:
        raise TextError(f"{path}: not JSON ({error}). Copy the file again from the model's publisher.") from error
    if not isinstance(value, dict):
        raise TextError(f"{path}: expected a JSON object, got {type(value).__name__}.")
    return value


def _tokenizer(folder: Path, document: dict[str, Any]) -> Tokenizer:
    # Truncation and padding would change a prompt unseen.
    text = json.dumps(document | {"truncation": None, "padding": None})
    # The library raises bare Exception for a document it cannot use.
    try:
        return Tokenizer.from_str(text)
    except Exception as error:
        raise TextError(f"{folder / 'tokenizer.json'}: {error}. A Hugging Face `tokenizers` file is wanted.") from error


def _template_source(folder: Path, settings: dict[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    if isinstance(settings.get("chat_template"), str):
        return settings["chat_template"]
    raise TextError(f"{path}: no such file, and tokenizer_config.json holds no chat_template. A chat model has one.")


def _literal(value: Any) -> str:
    """A token as `tokenizer_config.json` writes it, text or object; "" where there is none."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _names(settings: dict[str, Any]) -> dict[str, str]:
    return {name: _literal(settings.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
