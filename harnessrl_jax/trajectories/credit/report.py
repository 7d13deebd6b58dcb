"""The rollouts of a step -> how many of its groups can teach anything. NumPy only."""

from collections.abc import Sequence
from typing import NamedTuple

from harnessrl_jax.trajectories.accounting import baseline_rollouts
from harnessrl_jax.trajectories.credit.groups import flat
from harnessrl_jax.trajectories.records import Rollout


class GroupReport(NamedTuple):
    """The groups of a step as a baseline sees them.

    Attributes:
      given: groups of rollouts.
      counted: rollouts that are in a baseline.
      alone: groups with only one rollout that counts.
      flat: groups with several, whose rewards are all equal.
      empty: groups in which no rollout counts.
    """

    given: int
    counted: int
    alone: int
    flat: int
    empty: int


def group_report(rollouts: Sequence[Rollout]) -> GroupReport:
    """How many groups of a step can teach anything; LineageError if a rollout is given twice."""
    rewards: dict[tuple[str, str], list[float]] = {(r.run_id, r.group_id): [] for r in rollouts}
    for rollout in baseline_rollouts(rollouts):
        if rollout.reward is not None:
            rewards[rollout.run_id, rollout.group_id].append(rollout.reward)
    sizes = [len(own) for own in rewards.values()]
    return GroupReport(
        given=len(rewards),
        counted=sum(sizes),
        alone=sizes.count(1),
        flat=sum(len(own) > 1 and flat(own) for own in rewards.values()),
        empty=sizes.count(0),
    )
