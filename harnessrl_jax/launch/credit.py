"""The [credit] section -> the estimator it names, and the credited calls of a step."""

from collections.abc import Sequence
from functools import partial

from harnessrl_jax.config import Credit
from harnessrl_jax.errors import ConfigError
from harnessrl_jax.trajectories import CreditedCalls, Lineage, Rollout, call_advantages
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
