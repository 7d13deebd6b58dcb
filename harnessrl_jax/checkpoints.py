"""The whole state of a run -> a folder that survives `kill -9`, and back onto any mesh (Orbax)."""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from harnessrl_jax.errors import CheckpointError

__all__ = ["Checkpoints"]

_FORMAT = 1
_MARKER = "harnessrl_checkpoints.json"
_MARKER_TEXT = json.dumps({"format": _FORMAT})
_DISK_ERRORS = (OSError, ValueError, KeyError)  # what Orbax, TensorStore and json raise on damaged or missing files


class _QuietOrbax(logging.Filter):
    """Orbax tells some fifty INFO lines a save; an application that logs at INFO should not have to read them."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or "orbax" not in record.pathname


_QUIET = _QuietOrbax()


class Checkpoints:
    """The checkpoints of one run, newest last.

    A checkpoint appears whole or not at all: it is written beside its place, synced and renamed, and `save` returns
    after that. The oldest is deleted only when the newest is complete. What a killed process left half written is
    removed when the folder is opened again. With several JAX processes, each of them makes the same calls.
    """

    def __init__(self, folder: Path, keep: int, *, read_only: bool = False) -> None:
        """Open or create the folder.

        Args:
          folder: belongs to this class alone; an existing one must be empty or written by it.
          keep: how many checkpoints to keep, at least 1.
          read_only: change nothing on disk, also not the leftovers of a run that may still be saving.

        Raises:
          CheckpointError: the folder is not ours, is missing (read only), or `keep` is below 1.
        """
        if keep < 1:
            raise CheckpointError(f"checkpoints {folder}: keep must be at least 1, got {keep}")
        self.folder = folder.absolute()
        self._read_only = read_only
        logging.getLogger("absl").addFilter(_QUIET)
        if not read_only and jax.process_index() == 0:
            _claim(self.folder)
        ocp.multihost.sync_global_processes("harnessrl_jax: checkpoint folder")
        _check_marker(self.folder)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=preservation_policy.LatestN(n=keep),
            create=not read_only,
            cleanup_tmp_directories=not read_only,
            enable_async_checkpointing=False,  # a step is finished when its checkpoint is; simple and exact
            save_root_metadata=False,
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_names=("state", "record"))

    def steps(self) -> tuple[int, ...]:
        """The steps that have a complete checkpoint, ascending."""
        return tuple(sorted(self._manager.all_steps()))

    def latest(self) -> int | None:
        """The newest step that has a complete checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, extra: Mapping[str, Any]) -> None:
        """Write one checkpoint; it is complete on disk when this returns.

        Args:
          step: number of finished optimiser steps; larger than that of every checkpoint in the folder.
          state: pytree of arrays (parameters, optimiser, CAPO masks, random keys), sharded or not.
          extra: what is not an array (data position, counters, versions, config digest), as plain JSON values.

        Raises:
          CheckpointError: the step is not new, a leaf is no array, `extra` would not come back equal, or the disk
            refuses.
        """
        where = self._where(step)
        if self._read_only:
            raise CheckpointError(f"{where}: the folder was opened read only; open it without read_only to save")
        newest = self.latest()
        if newest is not None and step <= newest:
            raise CheckpointError(f"{where}: step {newest} is already saved and steps must grow; use a new run folder")
        _check_json(where, extra)
        record = {"format": _FORMAT, "step": step, "layout": _layout(where, state), "extra": dict(extra)}
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record))
        with _explained(f"{where}: cannot be written; look at free space and permissions"):
            self._manager.save(step, args=items, force=True)

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """Read one checkpoint back.

        Args:
          step: one of `steps()`.
          like: pytree of the state wanted, with arrays or `jax.ShapeDtypeStruct` leaves that carry a sharding. The mesh
            may differ from the one that saved.

        Returns:
          The state in the structure and shardings of `like`, bit for bit as saved, and the `extra` of the save.

        Raises:
          CheckpointError: no such step, another structure, shape or dtype than saved, or damaged files.
        """
        where = self._where(step)
        if step not in self.steps():
            found = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"{where}: there is no such checkpoint; complete ones: {found}")
        advice = "the files are damaged; restore an older step or start a new run folder"
        with _explained(f"{where}: cannot be read; {advice}"):
            record = self._manager.restore(step, args=ocp.args.Composite(record=ocp.args.JsonRestore()))["record"]
            saved_format, layout, extra = record["format"], record["layout"], record["extra"]
        if saved_format != _FORMAT:
            raise CheckpointError(f"{where}: has format {saved_format}, this version reads format {_FORMAT}")
        _check_layout(where, layout, _layout(where, like))
        abstract = jax.tree_util.tree_map_with_path(lambda path, leaf: _abstract(where, path, leaf), like)
        with _explained(f"{where}: cannot be read; {advice}"):
            restored = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract)))
        return restored["state"], extra

    def close(self) -> None:
        """Release Orbax's threads. Nothing is pending: every `save` was complete."""
        self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _where(self, step: int) -> str:
        return f"checkpoint {self.folder}, step {step}"


@contextmanager
def _explained(message: str) -> Iterator[None]:
    """Turns what the disk layers raise into a CheckpointError with our words in front."""
    try:
        yield
    except _DISK_ERRORS as error:
        raise CheckpointError(f"{message}.\n  {type(error).__name__}: {error}") from error


def _claim(folder: Path) -> None:
    """Marks an empty or new folder as ours. The rename makes the marker appear whole."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"checkpoints {folder}: is a file, a folder is wanted; choose another place")
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"{_MARKER}.draft"
    if set(os.listdir(folder)) - {draft.name}:
        return
    draft.write_text(_MARKER_TEXT, encoding="utf-8")
    draft.replace(folder / _MARKER)


def _check_marker(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(f"checkpoints {folder}: there is no such folder; has this run saved anything yet?")
    marker = folder / _MARKER
    if not marker.exists():
        found = ", ".join(sorted(os.listdir(folder))[:3])
        raise CheckpointError(
            f"checkpoints {folder}: holds files of something else ({found}) and no {_MARKER}; "
            "give an empty folder, or one that a run of this library made"
        )
    text = marker.read_text(encoding="utf-8")
    if text != _MARKER_TEXT:
        raise CheckpointError(
            f"checkpoints {folder}: {_MARKER} says {text[:40]!r}, this version reads {_MARKER_TEXT!r}; "
            "use the version of the library that wrote it, or another folder"
        )


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _layout(where: str, state: Any) -> dict[str, str]:
    """What each leaf is, for example {"params/embed/embedding": "float32[2048, 128]"}."""
    layout = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if not isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            raise CheckpointError(
                f"{where}: state leaf {_name(path)} is {type(leaf).__name__} {leaf!r}; every leaf must be an array, "
                "other values belong in `extra`"
            )
        layout[_name(path)] = f"{leaf.dtype}{list(leaf.shape)}"
    return layout


def _check_layout(where: str, saved: dict[str, str], wanted: dict[str, str]) -> None:
    both = [name for name in wanted if name in saved and saved[name] != wanted[name]]
    lines = [f"{name}: saved {saved[name]}, wanted {wanted[name]}" for name in both]
    lines += [f"{name}: not in the checkpoint, wanted {wanted[name]}" for name in wanted if name not in saved]
    lines += [f"{name}: saved {saved[name]}, not wanted" for name in saved if name not in wanted]
    if lines:
        shown = "".join(f"\n  {line}" for line in lines[:8])
        rest = f"\n  and {len(lines) - 8} more" if len(lines) > 8 else ""
        raise CheckpointError(
            f"{where}: does not fit this run's state; model, optimiser or CAPO settings changed since it was saved. "
            f"Resume with the config that the run folder keeps, or use a new run folder.{shown}{rest}"
        )


def _abstract(where: str, path: tuple[Any, ...], leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        raise CheckpointError(f"{where}: `like` says no sharding for {_name(path)}; give the one that leaf should get")
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _check_json(where: str, extra: Mapping[str, Any]) -> None:
    try:
        back = json.loads(json.dumps(dict(extra), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: `extra` must hold JSON values only: {error}") from error
    for key, value in extra.items():
        if back.get(key) != value:
            raise CheckpointError(
                f"{where}: extra[{key!r}] would come back as {back.get(key)!r}, not {value!r}; "
                "use string keys, lists instead of tuples"
            )
