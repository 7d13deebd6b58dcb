"""A GGUF file -> a model folder in Hugging Face layout."""

import importlib.util
from pathlib import Path

from harnessrl_jax.errors import WeightsError
from harnessrl_jax.models.config import DecoderConfig
from harnessrl_jax.weights.folder import save_model
from harnessrl_jax.weights.gguf_tensors import load_gguf, open_gguf
from harnessrl_jax.weights.gguf_text import text_files


def convert_gguf(file: Path | str, folder: Path | str, *, chat_template: str | None = None) -> DecoderConfig:
    """Writes weights in f32, config.json, tokenizer and chat template; `load_model` and `transformers` read them.

    Args:
      file: the GGUF file.
      folder: created; must not hold a model yet.
      chat_template: the text of one to write instead of the file's own, which may have no place for tools.

    Returns:
      The configuration.

    Raises:
      WeightsError: the file cannot be read, the folder holds a model, or there is no chat template.
    """
    file, folder = Path(file), Path(folder)
    if (folder / "config.json").exists():
        raise WeightsError(f"{folder}: holds a model already. Give a new folder.")
    files = text_files(file, open_gguf(file))
    if chat_template is not None:
        files["chat_template.jinja"] = chat_template
    if "chat_template.jinja" not in files:
        raise WeightsError(f"{file}: has no chat template. Give one, in the form the model was trained on.")
    config, params = load_gguf(file)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    save_model(folder, config, params)
    return config


def packaged_gguf(package: str) -> Path:
    """The one GGUF file that an installed Python package carries. Raises WeightsError if there is none or several."""
    found = importlib.util.find_spec(package)  # does not run the package
    places = list(found.submodule_search_locations or ()) if found else []
    files = sorted(file for place in places for file in Path(place).rglob("*.gguf"))
    if len(files) != 1:
        state = f"it has {len(files)}" if found else "it is not installed"
        raise WeightsError(f"package:{package}: wanted a package with one GGUF file, {state}. Name the file instead.")
    return files[0]
