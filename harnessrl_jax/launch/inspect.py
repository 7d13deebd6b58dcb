"""`inspect`: what rollouts did, and what of them is trained, in the terminal or as a page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from harnessrl_jax.config import Config
from harnessrl_jax.errors import ConfigError
from harnessrl_jax.gateway import Store, TextCodec
from harnessrl_jax.launch.credit import credited_calls, mask_reasons, packed_step
from harnessrl_jax.launch.kept import locate
from harnessrl_jax.launch.problems import known_tasks
from harnessrl_jax.launch.run_folder import write_whole
from harnessrl_jax.monitor import RolloutView, forests_html, html_page, print_rollout, print_rollouts, view
from harnessrl_jax.trajectories import Call, Lineage, Rollout, build_lineage
from harnessrl_jax.trajectories.accounting import drop_reasons


class Training(NamedTuple):
    """How a rollout is trained: credit of its calls, and why the others have none, by call_id."""

    advantages: Mapping[str, float]
    reasons: Mapping[str, str]
    otherwise: str
    """The reason where `reasons` has none."""


def inspect(target: Path, chosen: Sequence[str], *, model: Path | None = None, html: Path | None = None) -> int:
    """Shows rollouts, or the list of them.

    Args:
      target: a run folder, or a call store.
      chosen: rollout ids; none lists all.
      model: folder of the tokenizer; a run folder knows its own.
      html: writes a page to this file instead of printing.

    Raises:
      ConfigError: there is no such store or rollout, or nobody says which tokenizer it is.
    """
    kept = locate(target, model)
    codec = kept.codec()
    if codec is None:
        raise ConfigError(f"{target}: give the folder of the tokenizer with --model; only a run folder knows its own.")
    if html is not None and not chosen:
        raise ConfigError("--html shows chosen rollouts: add --rollout ID, once or more often.")
    console = Console(highlight=False)
    with Store(kept.store, read_only=True) as store:
        rollouts = _rollouts(store)
        if not chosen:
            print_rollouts(
                console, [view(rollout, _lineage(store, codec, rollout), codec.decode) for rollout in rollouts]
            )
            return 0
        seen = [
            _view(kept.config, store, codec, rollouts, rollout)
            for name in chosen
            for rollout in _named(target, rollouts, name)
        ]
    if html is None:
        for rollout in seen:
            print_rollout(console, rollout)
        return 0
    title = "One rollout" if len(seen) == 1 else f"{len(seen)} rollouts"
    write_whole(html, html_page(title, "", forests_html(seen)))
    console.print(f"{html}", markup=False)
    return 0


def _named(target: Path, rollouts: Sequence[Rollout], name: str) -> list[Rollout]:
    """Every attempt of a rollout."""
    found = [rollout for rollout in rollouts if rollout.rollout_id == name]
    if not found:
        raise ConfigError(f"{target}: no rollout {name!r}. List them: inspect {target}")
    return found


def _view(
    config: Config | None, store: Store, codec: TextCodec, rollouts: Sequence[Rollout], rollout: Rollout
) -> RolloutView:
    trained = _training(config, store, codec, rollouts, rollout)
    return view(
        rollout,
        _lineage(store, codec, rollout),
        codec.decode,
        task=None if config is None else known_tasks(config).get(rollout.task_id),
        advantages=trained.advantages,
        reasons=trained.reasons,
        untrained=trained.otherwise,
    )


def _training(
    config: Config | None, store: Store, codec: TextCodec, rollouts: Sequence[Rollout], rollout: Rollout
) -> Training:
    """Credits the rollout as its step did: beside the rollouts of its group, in the rows of its step."""
    if config is None:
        return Training({}, {}, "no configuration says how it is credited; give the run folder")
    step = _step(config, rollouts, rollout)
    lineages = [lineage for member in step if (lineage := _lineage(store, codec, member)) is not None]
    if config.algorithm.kind == "policy" and rollout.group_id.partition("-")[0].isdigit():
        packed = packed_step(config, step, lineages)
        reasons = mask_reasons(config, step, lineages, packed)
        advantages = {c.call.call_id: c.advantage for c in packed.calls if c.call.call_id not in reasons}
        return Training(advantages, reasons, "not in the step")
    reasons = drop_reasons(step, lineages, truncated=config.credit.truncated)
    if len(step) == 1:
        return Training({}, reasons, "no group to compare with")
    return Training(credited_calls(config.credit, step, lineages).advantages(), reasons, "flat_group")


def _step(config: Config, rollouts: Sequence[Rollout], rollout: Rollout) -> list[Rollout]:
    """The rollouts of the step that a rollout belongs to, which the label of its group names; else its group."""
    label = rollout.group_id.partition("-")[0]
    whole = config.algorithm.kind == "policy" and label.isdigit()
    same = lambda other: other.group_id.partition("-")[0] == label if whole else other.group_id == rollout.group_id
    return [other for other in rollouts if same(other)]


def _lineage(store: Store, codec: TextCodec, rollout: Rollout) -> Lineage | None:
    calls = _calls(store, rollout)
    return build_lineage(calls, codec.decode) if calls else None


def _calls(store: Store, rollout: Rollout) -> list[Call]:
    return [stored.call for stored in store.calls(rollout.rollout_id, rollout.attempt)]


def _rollouts(store: Store) -> list[Rollout]:
    """The recorded outcomes; groups without one, such as those of `serve`, are shown as they stand."""
    recorded = store.rollouts()
    known = {rollout.group_id for rollout in recorded}
    for group in store.groups():
        attempts: dict[tuple[str, int], list[Call]] = {}
        for stored in store.calls_of_group(group) if group not in known else ():
            attempts.setdefault((stored.call.rollout_id, stored.call.attempt), []).append(stored.call)
        recorded += [_undecided(calls) for calls in attempts.values()]
    return recorded


def _undecided(calls: Sequence[Call]) -> Rollout:
    """A rollout of which only the calls are known."""
    first = calls[0]
    return Rollout(
        run_id=first.run_id,
        task_id=first.task_id,
        group_id=first.group_id,
        rollout_id=first.rollout_id,
        attempt=first.attempt,
        harness=first.harness,
        status="completed",
        reward=None,
        process_rewards={},
        answer=None,
        detail="no outcome is recorded",
        version=first.version_start,
        started_s=first.started_s,
        finished_s=calls[-1].finished_s,
    )
