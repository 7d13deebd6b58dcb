"""`convert`: a GGUF file -> a model folder that `model.path` can name."""

from pathlib import Path

from harnessrl_jax.errors import ConfigError
from harnessrl_jax.launch.model import BUILTIN
from harnessrl_jax.weights import convert_gguf, packaged_gguf


def convert(source: str, folder: Path, chat_template: str | None) -> int:
    """Writes the folder; `source` and `chat_template` are as on the command line.

    Raises:
      ConfigError: there is no such chat template.
      WeightsError: the file cannot be read, or the folder holds a model.
    """
    kind, _, package = source.partition(":")
    file = packaged_gguf(package) if kind == "package" else Path(source)
    config = convert_gguf(file, folder, chat_template=None if chat_template is None else _template(chat_template))
    print(f"{folder}: {config.layers} layers of {config.hidden_size}, {config.vocab_size:,} tokens, from {file.name}")
    return 0


def _template(name: str) -> str:
    kind, _, builtin = name.partition(":")
    file = BUILTIN / builtin / "chat_template.jinja" if kind == "builtin" else Path(name)
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--chat-template {name}: {file} cannot be read ({error.strerror}). Give a file.") from error
