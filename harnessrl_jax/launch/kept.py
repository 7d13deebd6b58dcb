"""A run folder or a call store -> the file, the tokenizer that reads its ids, and the calls of every attempt."""

from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import quote

from rich.console import Console
from rich.text import Text

from harnessrl_jax import config as configuration
from harnessrl_jax.config import Config
from harnessrl_jax.errors import ConfigError
from harnessrl_jax.gateway import Store, TextCodec
from harnessrl_jax.gateway.store import ANSWERED
from harnessrl_jax.launch.run_folder import RunFolder
from harnessrl_jax.launch.text import text_codec
from harnessrl_jax.monitor.views import printable
from harnessrl_jax.trajectories import Rollout
from harnessrl_jax.trajectories.interchange import KeptCall

Format = Literal["jsonl", "atif"]


class Kept(NamedTuple):
    """Where calls are kept.

    Attributes:
      store: the call store.
      folder: the run folder it lies in; None for a store given by itself.
      config: the run's configuration; None for a store given by itself.
      model: folder of the tokenizer, where the command line names one.
    """

    store: Path
    folder: RunFolder | None
    config: Config | None
    model: Path | None

    def codec(self) -> TextCodec | None:
        """The tokenizer that captured the calls; None if nobody says which. Raises ConfigError or TextError."""
        if self.model is not None:
            return TextCodec(self.model)
        return None if self.config is None else text_codec(self.config)


class Attempt(NamedTuple):
    """One attempt of a rollout: its outcome if there is one, and what was sampled in it, late calls included."""

    rollout: Rollout | None
    calls: tuple[KeptCall, ...]


def locate(target: Path, model: Path | None) -> Kept:
    """What a path given on the command line names.

    Args:
      target: a run folder, or a call store.
      model: folder of the tokenizer; None takes that of the run.

    Raises:
      ConfigError: there is no store, or the run's configuration cannot be read.
    """
    folder = RunFolder(target) if target.is_dir() else None
    store = folder.store if folder is not None else target
    if not store.is_file():
        raise ConfigError(f"{store}: no such file. Give a run folder, or the path of a call store.")
    config = configuration.load(folder.config) if folder is not None and folder.config.exists() else None
    return Kept(store, folder, config, model)


def attempts(store: Store) -> Iterator[Attempt]:
    """Every attempt that has a call or an outcome, group by group, so that one group is in memory at a time."""
    for group in store.groups():
        outcome = {(rollout.rollout_id, rollout.attempt): rollout for rollout in store.rollouts(group)}
        stored = store.calls_of_group(group, (*ANSWERED, "late"))
        for key, own in groupby(stored, key=lambda item: (item.call.rollout_id, item.call.attempt)):
            calls = tuple(KeptCall(item.call, item.state, item.notes) for item in own)
            yield Attempt(outcome.pop(key, None), calls)
        yield from (Attempt(rollout, ()) for rollout in outcome.values())


def file_name(attempt: Attempt) -> str:
    """A name for the file of an attempt that has a call, without its ending."""
    first = attempt.calls[0].call
    return f"{quote(first.rollout_id, safe='')}.{first.attempt}"


def report(done: str, heading: str, notes: Counter[str]) -> None:
    """Prints what was done, and under a heading what was lost on the way, each with how often."""
    console = Console(highlight=False)
    console.print(Text(printable(done)), soft_wrap=True)
    if notes:
        console.print(Text(f"{heading}:", style="yellow"))
    for note, number in sorted(notes.items()):
        console.print(Text(f"  {number:,} {printable(note)}"), soft_wrap=True)
