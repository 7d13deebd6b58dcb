"""A GGUF file of llama.cpp -> our configuration and parameters; quantised tensors become plain numbers."""

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from harnessrl_jax.errors import WeightsError
from harnessrl_jax.models.config import DecoderConfig
from harnessrl_jax.weights.layout import by_tensor, fill, some

FAMILIES = {"llama": {}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}
"""Architectures of GGUF files that are read, with what a DecoderConfig says of them."""
OUTSIDE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
IN_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def open_gguf(file: Path) -> Any:
    """The file's fields and tensors, as a `gguf.GGUFReader`.

    Raises:
      WeightsError: the package `gguf` is not installed, or the file is not a GGUF file.
    """
    try:
        import gguf
    except ImportError as error:
        raise WeightsError(
            "Reading GGUF needs the package gguf: pip install 'harnessrl-jax[gguf]', or pip install gguf."
        ) from error
    try:
        return gguf.GGUFReader(file)
    except FileNotFoundError as error:
        raise WeightsError(f"{file}: no such file. Give a GGUF file.") from error
    except (ValueError, IndexError, KeyError) as error:
        raise WeightsError(f"{file}: not a whole GGUF file ({error}). Copy or download it again.") from error


def field(reader: Any, name: str, default: Any = None) -> Any:
    """The value of one field of the file, or the default where it has none."""
    return reader.fields[name].contents() if name in reader.fields else default


def load_gguf(file: Path | str, *, dtype: DTypeLike = np.float32) -> tuple[DecoderConfig, dict[str, Any]]:
    """Reads the network of a GGUF file.

    The embeddings are tied where the file has no output projection of its own. Where it has one it is kept, also if
    it is only a finer copy of a tied embedding, so that the numbers are those that llama.cpp computes with.

    Args:
      file: of the architectures llama, qwen2 or qwen3; any quantisation that the package `gguf` reads.
      dtype: what the parameters are converted to.

    Returns:
      The configuration, and the parameters as NumPy arrays in our nested dict (kernels [in, out]).

    Raises:
      WeightsError: the file cannot be read, or holds a network or a tensor this decoder has not.
    """
    file = Path(file)
    reader = open_gguf(file)
    from gguf.quants import dequantize  # after `open_gguf`, which says what to do where the package is missing

    config = gguf_config(file, reader)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    wanted = by_tensor(config)
    names = {name: _gguf_name(name) for name in wanted}
    _check_names(file, set(tensors), set(names.values()))
    paired = field(reader, "general.architecture") == "llama"
    params: dict[str, Any] = {}
    for name, parts in wanted.items():
        tensor = tensors[names[name]]
        value = dequantize(tensor.data, tensor.tensor_type)
        if paired and (heads := {"q": config.heads, "k": config.kv_heads}.get(parts[0].path[-2])):
            value = _half_split(value, heads)
        for entry in parts:
            fill(params, entry, file, value, dtype)
    return config, params


def gguf_config(file: Path, reader: Any) -> DecoderConfig:
    """The configuration of a GGUF file. Raises WeightsError where it is of a network this decoder is not."""
    kind = field(reader, "general.architecture")
    if kind not in FAMILIES:
        raise WeightsError(f"{file}: architecture is {kind!r}; GGUF files of {', '.join(FAMILIES)} can be read.")
    if (scaling := field(reader, f"{kind}.rope.scaling.type", "none")) != "none":
        raise WeightsError(f"{file}: rope scaling {scaling!r} of GGUF files is not read. Use the safetensors folder.")
    if field(reader, f"{kind}.expert_count", 0):
        raise WeightsError(f"{file}: experts of GGUF files are not read. Use the safetensors folder of the model.")

    def size(name: str) -> int:
        value = field(reader, f"{kind}.{name}")
        if value is None:
            raise WeightsError(f"{file}: the field {kind}.{name} is missing. Convert the model to GGUF again.")
        return int(value)

    heads, width = size("attention.head_count"), size("embedding_length")
    return DecoderConfig(
        vocab_size=len(field(reader, "tokenizer.ggml.tokens", ())) or size("vocab_size"),
        hidden_size=width,
        layers=size("block_count"),
        heads=heads,
        kv_heads=int(field(reader, f"{kind}.attention.head_count_kv", heads)),
        head_dim=int(field(reader, f"{kind}.attention.key_length", width // heads)),
        mlp_size=size("feed_forward_length"),
        rope_theta=float(field(reader, f"{kind}.rope.freq_base", 10_000.0)),
        rms_eps=float(np.float32(field(reader, f"{kind}.attention.layer_norm_rms_epsilon", 1e-6)).astype(str)),
        tie_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
        **FAMILIES[kind],
    )


def _gguf_name(name: str) -> str:
    """The name of a Hugging Face tensor in a GGUF file."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    if name == "lm_head.weight":
        return "output.weight"
    parts = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    assert parts is not None, name
    return f"blk.{parts[1]}.{IN_LAYER[parts[2]]}.{parts[3]}"


def _check_names(file: Path, given: set[str], wanted: set[str]) -> None:
    if given != wanted:
        raise WeightsError(
            f"{file}: the tensors do not fit the fields. Missing: {some(sorted(wanted - given))}. "
            f"Unexpected: {some(sorted(given - wanted))}."
        )


def _half_split(value: np.ndarray, heads: int) -> np.ndarray:
    """Undoes what llama.cpp does to queries and keys of Llama: it lays the two of each rotary pair side by side."""
    pairs = value.reshape(heads, value.shape[0] // heads // 2, 2, *value.shape[1:])
    return pairs.swapaxes(1, 2).reshape(value.shape)
