"""`model.path` of a Config -> a folder, a decoder's sizes and parameters."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np

from harnessrl_jax.config import Config
from harnessrl_jax.errors import ConfigError
from harnessrl_jax.models import DecoderConfig, init_params
from harnessrl_jax.weights import load_model, save_model

BUILTIN = Path(__file__).parents[1] / "assets"
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def model_folder(config: Config) -> Path:
    """The folder that `model.path` names. Raises ConfigError if there is none."""
    name = config.model.path
    kind, _, builtin = name.partition(":")
    folder = BUILTIN / builtin if kind == "builtin" else Path(name)
    if not (folder / "config.json").is_file():
        known = ", ".join(f"builtin:{path.parent.name}" for path in sorted(BUILTIN.glob("*/config.json")))
        raise ConfigError(
            f"model.path = {name!r}: {folder} has no config.json. Give a model folder in Hugging Face layout, "
            f"or one of {known}."
        )
    return folder


def first_params(config: Config, folder: Path) -> tuple[DecoderConfig, Any]:
    """The decoder and the parameters a run starts from: those of the folder, or random ones from the seed."""
    if config.model.init == "pretrained":
        return load_model(folder)
    model = DecoderConfig.from_huggingface(json.loads((folder / "config.json").read_text()))
    return model, jax.tree.map(np.asarray, init_params(model, jax.random.key(config.seed)))


def export(model: DecoderConfig, params: Any, source: Path, folder: Path) -> None:
    """Writes a model folder: the parameters, and the text files of the model it came from."""
    save_model(folder, model, params)
    for name in TEXT_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
