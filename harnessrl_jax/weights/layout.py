"""A configuration -> every tensor of its Hugging Face file, and where its numbers lie in our parameters."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from harnessrl_jax.errors import WeightsError
from harnessrl_jax.models.config import DecoderConfig

Index = tuple[Any, ...]  # as in array[index]


class Entry(NamedTuple):
    """A part of one parameter and a part of one tensor that hold the same numbers; usually both are the whole."""

    path: tuple[str, ...]  # of the parameter in our dict
    shape: tuple[int, ...]  # of the parameter
    name: str  # of the tensor in Hugging Face files
    stored: tuple[int, ...]  # shape of the tensor
    transposed: bool = False  # the two parts are each other's transpose: Hugging Face stores kernels [out, in]
    part: Index = ()  # which part of the parameter
    stored_part: Index = ()  # which part of the tensor


def entries(config: DecoderConfig) -> Iterator[Entry]:
    """Every parameter a decoder of this configuration has, in file order."""
    width = config.hidden_size
    yield _whole(("embed", "embedding"), (config.vocab_size, width), "model.embed_tokens.weight")
    for i in range(config.layers):
        ours, theirs = f"layers_{i}", f"model.layers.{i}"
        yield _whole((ours, "input_norm", "scale"), (width,), f"{theirs}.input_layernorm.weight")
        yield _whole((ours, "post_norm", "scale"), (width,), f"{theirs}.post_attention_layernorm.weight")
        yield from _attention(config, (ours, "attn"), f"{theirs}.self_attn")
        match config.experts:
            case None:
                yield from _mlp(config, (ours, "mlp"), f"{theirs}.mlp")
            case experts if experts.form == "silu":
                yield from _silu_experts(config, experts.count, (ours, "experts"), f"{theirs}.mlp")
            case experts:
                yield from _clamped_experts(config, experts.count, (ours, "experts"), f"{theirs}.mlp")
    yield _whole(("final_norm", "scale"), (width,), "model.norm.weight")
    if not config.tie_embeddings:
        yield _kernel(("lm_head",), (width, config.vocab_size), "lm_head")


def by_tensor(config: DecoderConfig) -> dict[str, list[Entry]]:
    """The entries of every tensor, by its name."""
    tensors: dict[str, list[Entry]] = {}
    for entry in entries(config):
        tensors.setdefault(entry.name, []).append(entry)
    return tensors


def fill(params: dict[str, Any], entry: Entry, file: Path, tensor: np.ndarray, dtype: DTypeLike) -> None:
    """Copies what an entry says from one tensor of a file to our parameters, which grow as needed.

    Raises:
      WeightsError: the tensor has another shape than the configuration says.
    """
    if tensor.shape != entry.stored:
        raise WeightsError(
            f"{file}: {entry.name} has shape {list(tensor.shape)}, config.json wants {list(entry.stored)}. "
            "The file and config.json are of different models."
        )
    for key in entry.path[:-1]:
        params = params.setdefault(key, {})
    if entry.path[-1] not in params:
        params[entry.path[-1]] = np.empty(entry.shape, dtype)
    params[entry.path[-1]][entry.part] = turned(entry, tensor[entry.stored_part])


def turned(entry: Entry, part: np.ndarray) -> np.ndarray:
    """A part of a parameter as the tensor stores it, or the other way round."""
    return part.T if entry.transposed else part


def some(names: list[str]) -> str:
    """The first few names, for a message."""
    if not names:
        return "none"
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _whole(path: tuple[str, ...], shape: tuple[int, ...], name: str) -> Entry:
    return Entry(path, shape, name, shape)


def _kernel(path: tuple[str, ...], shape: tuple[int, int], name: str) -> Entry:
    return Entry((*path, "kernel"), shape, f"{name}.weight", shape[::-1], transposed=True)


def _attention(config: DecoderConfig, path: tuple[str, ...], name: str) -> Iterator[Entry]:
    width, head = config.hidden_size, config.head_dim
    queries, keys = config.heads * head, config.kv_heads * head
    shapes = {"q": (width, queries), "k": (width, keys), "v": (width, keys), "o": (queries, width)}
    for part, shape in shapes.items():
        yield _kernel((*path, part), shape, f"{name}.{part}_proj")
        if config.output_bias if part == "o" else config.qkv_bias:
            yield _whole((*path, part, "bias"), shape[1:], f"{name}.{part}_proj.bias")
    if config.qk_norm:
        for part in ("q_norm", "k_norm"):
            yield _whole((*path, part, "scale"), (head,), f"{name}.{part}.weight")
    if config.sinks:
        yield _whole((*path, "sinks"), (config.heads,), f"{name}.sinks")


def _mlp(config: DecoderConfig, path: tuple[str, ...], name: str) -> Iterator[Entry]:
    wide, narrow = (config.hidden_size, config.mlp_size), (config.mlp_size, config.hidden_size)
    for part, shape in (("gate", wide), ("up", wide), ("down", narrow)):
        yield _kernel((*path, part), shape, f"{name}.{part}_proj")


def _silu_experts(config: DecoderConfig, count: int, path: tuple[str, ...], name: str) -> Iterator[Entry]:
    """Qwen3-MoE stores each expert's kernels as tensors of their own; ours are stacked."""
    wide, narrow = (config.hidden_size, config.mlp_size), (config.mlp_size, config.hidden_size)
    yield _kernel((*path, "router"), (config.hidden_size, count), f"{name}.gate")
    for part, shape in (("gate", wide), ("up", wide), ("down", narrow)):
        for j in range(count):
            stored = f"{name}.experts.{j}.{part}_proj.weight"
            yield Entry((*path, part, "kernel"), (count, *shape), stored, shape[::-1], transposed=True, part=(j,))


def _clamped_experts(config: DecoderConfig, count: int, path: tuple[str, ...], name: str) -> Iterator[Entry]:
    """gpt-oss stacks its experts, as [in, out], and interleaves the columns of gate and up."""
    width, size = config.hidden_size, config.mlp_size
    yield _kernel((*path, "router"), (width, count), f"{name}.router")
    yield _whole((*path, "router", "bias"), (count,), f"{name}.router.bias")
    for first, part in enumerate(("gate", "up")):
        columns = (..., slice(first, None, 2))
        kernel, bias = (count, width, size), (count, size)
        stored = f"{name}.experts.gate_up_proj"
        yield Entry((*path, part, "kernel"), kernel, stored, (count, width, 2 * size), stored_part=columns)
        yield Entry((*path, part, "bias"), bias, f"{stored}_bias", (count, 2 * size), stored_part=columns)
    yield _whole((*path, "down", "kernel"), (count, size, width), f"{name}.experts.down_proj")
    yield _whole((*path, "down", "bias"), (count, width), f"{name}.experts.down_proj_bias")
