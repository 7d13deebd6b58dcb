"""The tokenizer and chat template inside a GGUF file -> the text files of a model folder."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from harnessrl_jax.errors import WeightsError
from harnessrl_jax.weights.gguf_tensors import field

CONTROL, USER_DEFINED = 3, 4  # token types of llama.cpp
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def text_files(file: Path, reader: Any) -> dict[str, str]:
    """Name and content of the text files of a model folder: tokenizer, its settings, stop ids, chat template.

    Args:
      file: what to call the file in messages.
      reader: the open file.

    Raises:
      WeightsError: the tokenizer is of a kind that is not read here.
    """
    kind, split = field(reader, "tokenizer.ggml.model"), field(reader, "tokenizer.ggml.pre")
    if kind != "gpt2" or split not in ("smollm", "qwen2"):
        raise WeightsError(
            f"{file}: tokenizer {kind!r} with pre-tokenizer {split!r}; byte-level BPE of smollm and qwen2 can be read. "
            "Take tokenizer.json from the model's own folder."
        )
    tokens, end = field(reader, "tokenizer.ggml.tokens"), field(reader, "tokenizer.ggml.eos_token_id")
    settings = {"eos_token": tokens[end]} if end is not None else {}
    if (start := field(reader, "tokenizer.ggml.bos_token_id")) is not None:
        settings["bos_token"] = tokens[start]
    files = {
        "tokenizer.json": _tokenizer(reader, tokens, split).to_str(pretty=False),
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
    }
    if end is not None:
        files["generation_config.json"] = json.dumps({"eos_token_id": end}, indent=2) + "\n"
    if template := field(reader, "tokenizer.chat_template"):
        files["chat_template.jinja"] = template
    return files


def _tokenizer(reader: Any, tokens: list[str], split: str) -> Tokenizer:
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in field(reader, "tokenizer.ggml.merges"))]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _words(split)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = field(reader, "tokenizer.ggml.token_type")
    added = lambda wanted: [
        AddedToken(token, special=wanted == CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind == wanted
    ]
    tokenizer.add_special_tokens(added(CONTROL))
    tokenizer.add_tokens(added(USER_DEFINED))
    return tokenizer


def _words(split: str) -> Any:
    """How text is cut before the merges."""
    if split == "smollm":
        first = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([first, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    first = pre_tokenizers.Split(Regex(QWEN2_WORDS), "isolated")
    return pre_tokenizers.Sequence([first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
