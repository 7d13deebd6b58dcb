"""Rollouts and their lineages -> one advantage for each call that is trained, and a count for each that is not.

The rollout is the unit of every baseline. Rewards stay float64 until the targets are made.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int

from harnessrl_jax.trajectories.accounting import (
    Drop,
    Key,
    Truncated,
    UsedCall,
    baseline_rollouts,
    merge_drops,
    rollout_key,
    used_calls,
)
from harnessrl_jax.trajectories.credit.baselines import Estimator, leave_one_out
from harnessrl_jax.trajectories.credit.process import process_by_call_index
from harnessrl_jax.trajectories.lineage import Lineage
from harnessrl_jax.trajectories.records import Call, Rollout

Compared = Literal["group", "harness", "agent"]
FlatGroups = Literal["keep", "drop"]


class CreditedCall(NamedTuple):
    """A call whose sampled tokens are trained.

    Attributes:
      call: the record.
      advantage: credit of each of its tokens.
      success: whether its rollout had an outcome reward above 0.
    """

    call: Call
    advantage: float
    success: bool


class CreditedCalls(NamedTuple):
    """The calls of a step that are trained, in canonical order, and what was dropped.

    Attributes:
      calls: sorted by run, group, rollout, session, prompt, output and seq.
      dropped: calls and sampled tokens by reason: "frozen_agent", "superseded", "rejected", "auxiliary",
        "undelivered", "empty_output", "infra_failure", "no_reward", "truncated_rollout", "earlier_attempt",
        "no_rollout", "flat_group".
    """

    calls: tuple[CreditedCall, ...]
    dropped: Mapping[str, Drop]

    def advantages(self) -> dict[str, float]:
        """Advantage by call_id."""
        return {credited.call.call_id: credited.advantage for credited in self.calls}


def call_advantages(
    rollouts: Sequence[Rollout],
    lineages: Sequence[Lineage],
    *,
    process_weight: float,
    truncated: Truncated = "keep",
    estimator: Estimator = leave_one_out,
    compared: Compared = "group",
    flat_groups: FlatGroups = "keep",
) -> CreditedCalls:
    """Credit of each live call of a trainable agent.

        A = A_outcome(rollout) + process_weight * A_process(call)

    The rollout is the unit of the baseline: it counts once, however many calls it made, also if it made none.
    Infrastructure failures and rollouts without a reward are in neither the loss nor the baseline; a policy failure
    keeps its reward. Of several attempts only the last one is used.

    Args:
      rollouts: the rollouts of a step, all groups together, in any order.
      lineages: of their attempts, in any order.
      process_weight: c_p, weight of the process advantage.
      truncated: what becomes of truncated rollouts: "keep" trains them with their reward; "mask" leaves their tokens
        out of the loss and their reward in the baseline.
      estimator: outcome rewards -> advantages.
      compared: with what a rollout is compared: all rollouts of its "group"; those of the group that ran the same
        "harness"; or, for the calls of each "agent", those of the group in which that agent made a live call.
      flat_groups: what becomes of groups in which every advantage is exactly 0: "keep" leaves their tokens in the
        loss, where they only share the denominator; "drop" leaves them out as "flat_group".

    Returns:
      The trained calls and the count of every other.

    Raises:
      LineageError: a rollout or lineage twice, records that disagree about the group, or a process reward for a call
        that does not exist.
    """
    used, dropped = used_calls(rollouts, lineages, truncated=truncated)
    outcome = _outcome(baseline_rollouts(rollouts), lineages, estimator, compared)
    process = _process(used)
    credit = [
        outcome[rollout_key(item.rollout), _label(item.rollout, item.call.agent, compared)]
        + process_weight * process.get(item.call.call_id, 0.0)
        for item in used
    ]
    if flat_groups == "drop":
        used, credit, removed = _without_flat_groups(used, credit)
        dropped = merge_drops(dropped, removed)
    return CreditedCalls(calls=_credited(used, credit), dropped=dropped)


def supervised_calls(rollouts: Sequence[Rollout], lineages: Sequence[Lineage]) -> CreditedCalls:
    """Advantage 1 for each live call of a trainable agent: imitation of rollouts that the caller chose.

    Args:
      rollouts: verified rollouts, in any order.
      lineages: of their attempts, in any order.

    Returns:
      The trained calls and the count of every other, as `call_advantages`.
    """
    used, dropped = used_calls(rollouts, lineages, truncated="keep")
    return CreditedCalls(calls=_credited(used, [1.0] * len(used)), dropped=dropped)


def _outcome(
    counted: Sequence[Rollout], lineages: Sequence[Lineage], estimator: Estimator, compared: Compared
) -> dict[tuple[Key, str], float]:
    """Outcome advantage by rollout and label; the label is what `_label` says of the calls it is for."""
    agents = {rollout_key(lineage): _live_agents(lineage) for lineage in lineages} if compared == "agent" else {}
    rows = [
        (rollout, _label(rollout, agent, compared))
        for rollout in counted
        for agent in (agents.get(rollout_key(rollout), ()) if compared == "agent" else ("",))
    ]
    reward = np.array([rollout.reward for rollout, _ in rows], np.float64)
    group = _numbers([(rollout.run_id, rollout.group_id, label) for rollout, label in rows])
    value = estimator(reward, group, np.ones(len(rows), np.bool_)).tolist()
    return {(rollout_key(rollout), label): v for (rollout, label), v in zip(rows, value, strict=True)}


def _label(rollout: Rollout, agent: str, compared: Compared) -> str:
    match compared:
        case "group":
            return ""
        case "harness":
            return rollout.harness
        case "agent":
            return agent


def _live_agents(lineage: Lineage) -> list[str]:
    return sorted({linked.call.agent for linked in lineage.calls if linked.state == "live"})


def _without_flat_groups(
    used: Sequence[UsedCall], credit: Sequence[float]
) -> tuple[list[UsedCall], list[float], dict[str, Drop]]:
    group = [(item.rollout.run_id, item.rollout.group_id) for item in used]
    taught = {name for name, value in zip(group, credit, strict=True) if value != 0}
    kept = [(item, value) for item, value, name in zip(used, credit, group, strict=True) if name in taught]
    tokens = [len(item.call.output_ids) for item, name in zip(used, group, strict=True) if name not in taught]
    removed = {"flat_group": Drop(calls=len(tokens), tokens=sum(tokens))} if tokens else {}
    return [item for item, _ in kept], [value for _, value in kept], removed


def _credited(used: Sequence[UsedCall], advantage: Sequence[float]) -> tuple[CreditedCall, ...]:
    return tuple(
        CreditedCall(call=item.call, advantage=value, success=(item.rollout.reward or 0.0) > 0)
        for item, value in zip(used, advantage, strict=True)
    )


def _process(used: Sequence[UsedCall]) -> dict[str, float]:
    """Process advantage by call_id, of the trained calls that have a process reward."""
    given = [item for item in used if item.call.call_id in item.rollout.process_rewards]
    reward = np.array([item.rollout.process_rewards[item.call.call_id] for item in given], np.float64)
    group = _numbers([(item.call.run_id, item.call.group_id, item.call.agent) for item in given])
    index = np.array([item.agent_index for item in given], np.int64)
    value = process_by_call_index(reward, group, index).tolist()
    return {item.call.call_id: v for item, v in zip(given, value, strict=True)}


def _numbers(names: Sequence[tuple[str, ...]]) -> Int[np.ndarray, " name"]:
    """Equal names -> equal numbers."""
    number = {name: place for place, name in enumerate(dict.fromkeys(names))}
    return np.array([number[name] for name in names], np.int64)
