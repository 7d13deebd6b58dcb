"""`inspect`: what a rollout did, and what of it is trained, in the terminal."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harnessrl_jax import config as configuration
from harnessrl_jax.config import Config
from harnessrl_jax.errors import ConfigError
from harnessrl_jax.gateway import Store, TextCodec
from harnessrl_jax.launch.credit import credited_calls
from harnessrl_jax.launch.problems import known_tasks
from harnessrl_jax.launch.run_folder import RunFolder
from harnessrl_jax.launch.text import text_codec
from harnessrl_jax.monitor import RolloutView, print_rollout, print_rollouts, view
from harnessrl_jax.trajectories import Call, Lineage, Rollout, build_lineage


def inspect(run: Path, rollout_id: str | None) -> int:
    """Shows one rollout, or the list of them."""
    folder = RunFolder(run)
    if not folder.config.exists() or not folder.store.exists():
        raise ConfigError(f"{run}: not a run folder (no {folder.config.name} or no {folder.store.name}).")
    config, console = configuration.load(folder.config), Console(highlight=False)
    store = Store(folder.store, read_only=True)
    try:
        rollouts = _rollouts(store, config)
        codec = text_codec(config)
        if rollout_id is None:
            print_rollouts(console, [view(rollout, _lineage(store, rollout), codec.decode) for rollout in rollouts])
            return 0
        chosen = [rollout for rollout in rollouts if rollout.rollout_id == rollout_id]
        if not chosen:
            raise ConfigError(f"{run}: no rollout {rollout_id!r}. List them: inspect {run}")
        for rollout in chosen:
            print_rollout(console, _view(config, store, codec, rollout))
    finally:
        store.close()
    return 0


def _view(config: Config, store: Store, codec: TextCodec, rollout: Rollout) -> RolloutView:
    group = store.rollouts(rollout.group_id)
    lineages = [lineage for member in group if (lineage := _lineage(store, member)) is not None]
    trained = credited_calls(config.credit, group, lineages) if len(group) > 1 else None
    return view(
        rollout,
        _lineage(store, rollout),
        codec.decode,
        task=known_tasks(config).get(rollout.task_id),
        advantages=trained.advantages() if trained is not None else {},
        untrained="no group to compare with" if trained is None else "see the reasons in metrics.jsonl",
    )


def _lineage(store: Store, rollout: Rollout) -> Lineage | None:
    calls = _calls(store, rollout)
    return build_lineage(calls) if calls else None


def _calls(store: Store, rollout: Rollout) -> list[Call]:
    return [stored.call for stored in store.calls(rollout.rollout_id, rollout.attempt)]


def _rollouts(store: Store, config: Config) -> Sequence[Rollout]:
    """The recorded rollouts; `serve` records none, so its one endless rollout is shown as it stands."""
    recorded = store.rollouts()
    calls = [] if recorded else [stored.call for stored in store.calls("served", 0)]
    if not calls:
        return recorded
    first = calls[0]
    return [
        Rollout(
            run_id=config.name,
            task_id=first.task_id,
            group_id=first.group_id,
            rollout_id=first.rollout_id,
            attempt=0,
            harness=first.harness,
            status="completed",
            reward=None,
            process_rewards={},
            answer=None,
            detail="",
            version=first.version_start,
            started_s=first.started_s,
            finished_s=calls[-1].finished_s,
        )
    ]
