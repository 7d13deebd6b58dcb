"""A Config and the rollouts of a step -> credited calls, rows, and why any call is not trained; no device is needed."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from harnessrl_jax.config import Config, Credit
from harnessrl_jax.errors import ConfigError
from harnessrl_jax.trajectories import CreditedCalls, Lineage, PackedStep, Rollout, call_advantages, pack_groups
from harnessrl_jax.trajectories.accounting import drop_reasons
from harnessrl_jax.trajectories.credit import Estimator, group_mean, group_std, leave_one_out, max_rl


def credited_calls(credit: Credit, rollouts: Sequence[Rollout], lineages: Sequence[Lineage]) -> CreditedCalls:
    """What is trained of a step and with which advantage; the same for training and for `inspect`."""
    return call_advantages(
        rollouts,
        lineages,
        process_weight=credit.process_weight,
        truncated=credit.truncated,
        estimator=estimator(credit),
        compared=credit.compared,
        flat_groups=credit.flat_groups,
    )


def packed_step(config: Config, rollouts: Sequence[Rollout], lineages: Sequence[Lineage]) -> PackedStep:
    """Credit and layout of a step's calls; the same for training and for `inspect`."""
    packing = config.packing
    return pack_groups(
        credited_calls(config.credit, rollouts, lineages),
        loss_mean=config.credit.mean,
        row_slots=packing.row_slots,
        row_targets=packing.row_targets,
        max_rows=packing.max_rows,
    )


def mask_reasons(
    config: Config, rollouts: Sequence[Rollout], lineages: Sequence[Lineage], step: PackedStep
) -> dict[str, str]:
    """Why each call of a step that has no target has none, by call_id."""
    targets = set(np.unique(step.batch.call[step.batch.weight > 0]).tolist())
    reasons = drop_reasons(rollouts, lineages, truncated=config.credit.truncated)
    for number, credited in enumerate(step.calls):
        if number not in targets:
            long = len(credited.call.prompt_ids) + len(credited.call.output_ids) - 1 > config.packing.row_slots
            reasons[credited.call.call_id] = "too_long" if long else "no_room"
    kept = {credited.call.call_id for credited in step.calls}
    live = [linked.call.call_id for lineage in lineages for linked in lineage.calls]
    return {name: "flat_group" for name in live if name not in kept} | reasons


def estimator(credit: Credit) -> Estimator:
    """The function that the section names, with its numbers."""
    match credit.baseline:
        case "leave_one_out":
            return leave_one_out
        case "group_mean":
            return group_mean
        case "max_rl":
            return max_rl
        case "group_std":
            if credit.std_floor is None or credit.std_unbiased is None:
                raise ConfigError("credit.baseline = 'group_std' needs credit.std_floor and credit.std_unbiased.")
            return partial(group_std, floor=credit.std_floor, unbiased=credit.std_unbiased)
