"""A path and a Config -> a locked run folder: new, to be resumed, or finished."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from harnessrl_jax import config as configuration
from harnessrl_jax.config import Config, HTTPServer, JetStreamProcess
from harnessrl_jax.errors import ConfigError

WAYS = {f"sampler.{name}" for name in (*HTTPServer.model_fields, *JetStreamProcess.model_fields)} - {"sampler.kind"}
"""How an engine is reached, which may change while a run rests: no number depends on it."""


class RunFolder(NamedTuple):
    """Names inside one run's folder."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.toml"

    @property
    def summary(self) -> Path:
        """Written last: a folder that has it is finished."""
        return self.path / "summary.json"

    @property
    def store(self) -> Path:
        """The call store."""
        return self.path / "calls.sqlite"

    @property
    def checkpoints(self) -> Path:
        """The folder of Orbax checkpoints."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """The trained model, in Hugging Face layout."""
        return self.path / "model"

    @property
    def weights(self) -> Path:
        """The weights that an engine outside this process loads, one folder a version."""
        return self.path / "weights"

    @property
    def logs(self) -> Path:
        """What the harness processes wrote to standard error."""
        return self.path / "logs"

    def finished(self) -> Mapping[str, Any] | None:
        """The summary of a finished run, None otherwise."""
        return json.loads(self.summary.read_text()) if self.summary.exists() else None

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Writes the summary in one step, so that it is whole or absent."""
        write_whole(self.summary, json.dumps(summary, indent=2) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is never seen half written."""
    part = path.with_suffix(path.suffix + ".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


@contextmanager
def open_run(path: Path, config: Config) -> Iterator[RunFolder]:
    """Creates or reopens a run folder and holds its lock.

    Raises:
      ConfigError: another process runs there, or the folder belongs to a run with another configuration.
    """
    path.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(path)
    with (path / "run.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{path}: another process is using this run folder. Wait for it, or give --run-dir."
            ) from None
        _same_config(folder, config)
        yield folder


def _same_config(folder: RunFolder, config: Config) -> None:
    if not folder.config.exists():
        write_whole(folder.config, configuration.to_toml(config))
        return
    old, new = _flat(configuration.load(folder.config).model_dump()), _flat(config.model_dump())
    changed = [
        f"  {key}: {old.get(key)!r} there, {new.get(key)!r} now"
        for key in sorted((old | new).keys() - WAYS)
        if old.get(key) != new.get(key)
    ]
    if not changed:
        return
    raise ConfigError(
        f"{folder.path}: this folder belongs to a run with another configuration.\n" + "\n".join(changed)
        + "\nGive another --run-dir, or the configuration it was started with."
    )  # fmt: skip


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat
