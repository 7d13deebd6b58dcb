"""Rewards -> advantages and loss weights: pure functions of plain arrays, float64 inside. NumPy only."""

from harnessrl_jax.trajectories.credit.assemble import (
    Compared,
    CreditedCall,
    CreditedCalls,
    FlatGroups,
    call_advantages,
    supervised_calls,
)
from harnessrl_jax.trajectories.credit.baselines import Estimator, group_mean, group_std, leave_one_out, rloo
from harnessrl_jax.trajectories.credit.branches import branch_advantages
from harnessrl_jax.trajectories.credit.frontier import enabling_credit, frontier_credit, scaled_credit
from harnessrl_jax.trajectories.credit.groups import groups_within
from harnessrl_jax.trajectories.credit.likelihood import max_rl
from harnessrl_jax.trajectories.credit.prefix_values import prefix_advantages, prefix_values
from harnessrl_jax.trajectories.credit.process import process_by_call_index, stage_normalised
from harnessrl_jax.trajectories.credit.report import GroupReport, group_report
from harnessrl_jax.trajectories.credit.tree_values import TreeAdvantages, tree_gae
from harnessrl_jax.trajectories.credit.turns import turn_relative
from harnessrl_jax.trajectories.credit.verification import verification_advantages, verification_weights
from harnessrl_jax.trajectories.credit.weights import LossMean, LossWeights, loss_weights, sequence_sum

__all__ = [
    "Compared",
    "CreditedCall",
    "CreditedCalls",
    "Estimator",
    "FlatGroups",
    "GroupReport",
    "LossMean",
    "LossWeights",
    "TreeAdvantages",
    "branch_advantages",
    "call_advantages",
    "enabling_credit",
    "frontier_credit",
    "group_mean",
    "group_report",
    "group_std",
    "groups_within",
    "leave_one_out",
    "loss_weights",
    "max_rl",
    "prefix_advantages",
    "prefix_values",
    "process_by_call_index",
    "rloo",
    "scaled_credit",
    "sequence_sum",
    "stage_normalised",
    "supervised_calls",
    "tree_gae",
    "turn_relative",
    "verification_advantages",
    "verification_weights",
]
