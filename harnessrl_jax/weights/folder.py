"""A Hugging Face model folder <-> our configuration and parameters: config.json and safetensors files."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import DTypeLike

from harnessrl_jax.errors import WeightsError
from harnessrl_jax.models.config import DecoderConfig
from harnessrl_jax.weights.layout import by_tensor, entries, fill, some, turned

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DERIVED = ".rotary_emb.inv_freq"  # old Llama files store the rotary frequencies, which follow from the config


def load_model(folder: Path | str, *, dtype: DTypeLike = np.float32) -> tuple[DecoderConfig, dict[str, Any]]:
    """Reads a model folder as `transformers` writes it.

    Args:
      folder: holds `config.json` and either `model.safetensors` or shards with `model.safetensors.index.json`.
      dtype: what the parameters are converted to.

    Returns:
      The configuration, and the parameters as NumPy arrays in our nested dict (kernels [in, out]).

    Raises:
      WeightsError: a file is absent or unreadable, or a tensor is missing, unexpected or of the wrong shape.
      ModelError: `config.json` describes a network this decoder is not.
    """
    folder = Path(folder)
    config = DecoderConfig.from_huggingface(_read_json(folder / "config.json"))
    where = _tensor_files(folder)
    wanted = by_tensor(config)
    _check_names(folder, config, set(where), set(wanted))
    params: dict[str, Any] = {}
    for file in sorted(set(where.values())):
        with _open(file) as tensors:
            for name in (n for n, held_in in where.items() if held_in == file and n in wanted):
                tensor = tensors.get_tensor(name)
                for entry in wanted[name]:
                    fill(params, entry, file, tensor, dtype)
    if config.tie_embeddings and "lm_head.weight" in where:
        _check_tied(where["lm_head.weight"], params["embed"]["embedding"], dtype)
    return config, params


def save_model(
    folder: Path | str, config: DecoderConfig, params: Mapping[str, Any], *, shard_bytes: int = 5_000_000_000
) -> None:
    """Writes a model folder that `transformers` and `load_model` read.

    Args:
      folder: created if absent; files of an earlier model in it are replaced.
      config: sizes.
      params: as from `init_params`; arrays of NumPy or JAX, whole on this host.
      shard_bytes: largest file; a bigger model is split and gets an index file.

    Raises:
      WeightsError: a parameter is missing, unexpected or of the wrong shape.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _theirs(config, params)
    shards = _split(tensors, shard_bytes)
    for stale in (*folder.glob("model-*-of-*.safetensors"), folder / SINGLE, folder / INDEX):
        stale.unlink(missing_ok=True)
    names = (
        [SINGLE]
        if len(shards) == 1
        else [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    )
    for name, shard in zip(names, shards, strict=True):
        safetensors.numpy.save_file(shard, folder / name, metadata={"format": "pt"})
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(folder / "config.json", config.to_huggingface())


def _theirs(config: DecoderConfig, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Our nested dict -> tensors under Hugging Face names and layout."""
    given = dict(_flatten(params))
    wanted = {entry.path: entry.shape for entry in entries(config)}
    if given.keys() != wanted.keys():
        slash = lambda paths: ", ".join(sorted("/".join(path) for path in paths)) or "none"
        raise WeightsError(
            f"save_model: the parameters do not fit the configuration. Missing: {slash(wanted.keys() - given.keys())}. "
            f"Unexpected: {slash(given.keys() - wanted.keys())}."
        )
    tensors: dict[str, np.ndarray] = {}
    for entry in entries(config):
        value = np.asarray(given[entry.path])
        if value.shape != entry.shape:
            raise WeightsError(
                f"save_model: {'/'.join(entry.path)} has shape {list(value.shape)}, "
                f"the configuration wants {list(entry.shape)}."
            )
        if entry.name not in tensors:
            tensors[entry.name] = np.empty(entry.stored, value.dtype)
        tensors[entry.name][entry.stored_part] = turned(entry, value[entry.part])
    return tensors


def _check_names(folder: Path, config: DecoderConfig, given: set[str], wanted: set[str]) -> None:
    missing = sorted(wanted - given)
    allowed = {"lm_head.weight"} if config.tie_embeddings else set()
    unexpected = sorted(n for n in given - wanted - allowed if not n.endswith(DERIVED))
    if missing or unexpected:
        raise WeightsError(
            f"{folder}: the tensors do not fit config.json. Missing: {some(missing)}. Unexpected: {some(unexpected)}."
        )


def _check_tied(file: Path, embedding: np.ndarray, dtype: DTypeLike) -> None:
    with _open(file) as tensors:
        if not np.array_equal(tensors.get_tensor("lm_head.weight").astype(dtype), embedding):
            raise WeightsError(
                f"{file}: lm_head.weight differs from model.embed_tokens.weight, but config.json has "
                "tie_word_embeddings true. Set it to false to keep both."
            )


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it."""
    if (folder / SINGLE).is_file():
        with _open(folder / SINGLE) as tensors:
            return dict.fromkeys(tensors.keys(), folder / SINGLE)
    if not (folder / INDEX).is_file():
        raise WeightsError(f"{folder}: neither {SINGLE} nor {INDEX} is there. Give the folder of a safetensors model.")
    weight_map = _read_json(folder / INDEX).get("weight_map", {})
    for name in set(weight_map.values()):
        if Path(name).name != name or not (folder / name).is_file():
            raise WeightsError(f"{folder / INDEX}: names the file {name!r}, which is not in the folder.")
    for name in sorted(set(weight_map.values())):
        with _open(folder / name) as tensors:
            absent = sorted({t for t, file in weight_map.items() if file == name} - set(tensors.keys()))
        if absent:
            raise WeightsError(f"{folder / name}: {INDEX} expects {some(absent)} in it.")
    return {tensor: folder / name for tensor, name in weight_map.items()}


def _open(file: Path) -> Any:
    try:
        return safetensors.safe_open(file, framework="np")
    except safetensors.SafetensorError as error:
        raise WeightsError(f"{file}: not a whole safetensors file ({error}). Copy or download it again.") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise WeightsError(f"{file}: no such file. Give the folder of a Hugging Face model.") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise WeightsError(f"{file}: not valid JSON ({error}).") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{file}: must hold one JSON object, got {type(value).__name__}.")
    return value


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _split(tensors: Mapping[str, np.ndarray], shard_bytes: int) -> list[dict[str, np.ndarray]]:
    """Tensors in order, cut into groups of at most `shard_bytes` (a single larger tensor gets its own)."""
    shards: list[dict[str, np.ndarray]] = [{}]
    room = shard_bytes
    for name, tensor in tensors.items():
        if shards[-1] and tensor.nbytes > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    return shards


def _flatten(tree: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, (*prefix, key))
        else:
            yield (*prefix, key), value
