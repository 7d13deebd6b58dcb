"""Outcome and process rewards -> one advantage for each call that is trained, and a count for each that is not.

The mathematics is float64 on the host and independent of order: sums are correctly rounded (`math.fsum`), equality of
rewards is tested before any mean is taken.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int

from harnessrl_jax.errors import RecordError
from harnessrl_jax.trajectories.accounting import Drop, Truncated, UsedCall, baseline_rollouts, rollout_key, used_calls
from harnessrl_jax.trajectories.lineage import Lineage
from harnessrl_jax.trajectories.records import Call, Rollout

LossMean = Literal["rollout", "token"]


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
        "no_rollout".
    """

    calls: tuple[CreditedCall, ...]
    dropped: Mapping[str, Drop]

    def advantages(self) -> dict[str, float]:
        """Advantage by call_id."""
        return {credited.call.call_id: credited.advantage for credited in self.calls}


def leave_one_out(
    reward: Float64[np.ndarray, " rollout"], group: Int[np.ndarray, " rollout"], counted: Bool[np.ndarray, " rollout"]
) -> Float64[np.ndarray, " rollout"]:
    """Reward of each rollout minus the mean of the others in its group.

        A_i = r_i - 1/(n-1) Σ_{j≠i} r_j          over the n counted rollouts of the group

    Exactly 0 for a rollout that is not counted, for a group of one, and for a group whose rewards are all equal.

    Args:
      reward: outcome reward; never read where `counted` is False, so it may be NaN there.
      group: number of the group.
      counted: False for infrastructure failures and rollouts without a reward.

    Returns:
      The advantages.

    Raises:
      RecordError: a counted reward is not finite.

    References:
      Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!"
    """
    out = np.zeros(len(reward), np.float64)
    for members in _groups(group, counted):
        values = _finite("leave_one_out", reward[members])
        if len(values) > 1 and min(values) < max(values):
            total = math.fsum(values)
            out[members] = [value - (total - value) / (len(values) - 1) for value in values]
    return out


def process_by_call_index(
    reward: Float64[np.ndarray, " call"],
    group: Int[np.ndarray, " call"],
    call_index: Int[np.ndarray, " call"],
    *,
    std_floor: float = 1e-6,
) -> Float64[np.ndarray, " call"]:
    """Process reward of each call, standardised over the rollouts of its group that reach the same call index.

        A_{i,k} = (p_{i,k} - mean_k) / (std_k + floor)

    with the population standard deviation, so no value exceeds sqrt(n-1). Exactly 0 where fewer than two members
    reach index k, and where all are equal.

    Args:
      reward: process reward p of the call.
      group: number of the group: one for each task and agent.
      call_index: k, position of the call among the calls of its agent in its rollout.
      std_floor: added to the standard deviation.

    Returns:
      The advantages.

    Raises:
      RecordError: a reward is not finite.

    References:
      Harness-RL, arXiv 2608.29641, as its published re-implementation has it.
    """
    out = np.zeros(len(reward), np.float64)
    _, place = np.unique(np.stack([group, call_index]), axis=1, return_inverse=True)
    for members in _groups(place.reshape(-1), np.ones(len(reward), np.bool_)):
        values = _finite("process_by_call_index", reward[members])
        if len(values) > 1 and min(values) < max(values):
            mean = math.fsum(values) / len(values)
            std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
            out[members] = [(value - mean) / (std + std_floor) for value in values]
    return out


def loss_weights(rollout: Int[np.ndarray, " target"], mode: LossMean) -> Float32[np.ndarray, " target"]:
    """Loss weight of each target; the loss divides by their global sum.

    "rollout": 1 / (targets of the rollout), so each rollout weighs 1 however many calls or rows it has, and the sum of
    weights is the number of rollouts. "token": 1, so each token weighs the same.

    Args:
      rollout: number of the rollout of each target; all targets of a rollout must be given together.
      mode: the unit of the mean.

    Returns:
      The weights, above 0.

    Raises:
      RecordError: the mode is unknown.

    References:
      Agent Lightning v1, arXiv 2608.17528, "per rollout mean".
    """
    if mode == "token":
        return np.ones(len(rollout), np.float32)
    if mode == "rollout":
        _, place, size = np.unique(rollout, return_inverse=True, return_counts=True)
        return (1.0 / size[place.reshape(-1)]).astype(np.float32)
    raise RecordError(f"loss_weights: unknown mode {mode!r}. Known modes: rollout, token.")


def call_advantages(
    rollouts: Sequence[Rollout], lineages: Sequence[Lineage], *, process_weight: float, truncated: Truncated = "keep"
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

    Returns:
      The trained calls and the count of every other.

    Raises:
      LineageError: a rollout or lineage twice, records that disagree about the group, or a process reward for a call
        that does not exist.
    """
    counted = baseline_rollouts(rollouts)
    reward = np.array([rollout.reward for rollout in counted], np.float64)
    group = _numbers([(rollout.run_id, rollout.group_id) for rollout in counted])
    outcome = leave_one_out(reward, group, np.ones(len(counted), np.bool_)).tolist()
    of_rollout = {rollout_key(rollout): value for rollout, value in zip(counted, outcome, strict=True)}
    used, dropped = used_calls(rollouts, lineages, truncated=truncated)
    process = _process(used)
    credit = [of_rollout[rollout_key(u.rollout)] + process_weight * process.get(u.call.call_id, 0.0) for u in used]
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


def _groups(group: Int[np.ndarray, " member"], counted: Bool[np.ndarray, " member"]) -> list[Int[np.ndarray, " m"]]:
    """Positions of the counted members of each group that has any."""
    places = np.flatnonzero(counted)
    _, number = np.unique(group[places], return_inverse=True)
    order = np.argsort(number, kind="stable")
    return np.split(places[order], np.flatnonzero(np.diff(number[order])) + 1) if len(places) else []


def _finite(where: str, values: Float64[np.ndarray, " member"]) -> list[float]:
    out = values.tolist()
    if not all(map(math.isfinite, out)):
        raise RecordError(f"{where}: rewards must be finite, got {out}. Do not count members that have no reward.")
    return out
