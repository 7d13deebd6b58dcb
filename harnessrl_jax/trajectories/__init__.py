"""Calls of a harness -> trees, roles, advantages and packed rows. NumPy only: usable where JAX is absent."""

from harnessrl_jax.trajectories.accounting import Drop
from harnessrl_jax.trajectories.credit import (
    CreditedCall,
    CreditedCalls,
    call_advantages,
    leave_one_out,
    loss_weights,
    process_by_call_index,
    supervised_calls,
)
from harnessrl_jax.trajectories.evidence import Agent, Evidence, Fork
from harnessrl_jax.trajectories.fitting import Bucket
from harnessrl_jax.trajectories.formats import Schemas, ToolBlock, ToolFormat, format_of_template
from harnessrl_jax.trajectories.grouping import GroupTrees, PackedStep, group_trees, pack_groups
from harnessrl_jax.trajectories.lineage import Lineage, LinkedCall, build_lineage
from harnessrl_jax.trajectories.packing import PackingReport, RowReport, pack, pack_buckets
from harnessrl_jax.trajectories.parsing import ParsedOutput, parse_tool_calls
from harnessrl_jax.trajectories.records import Call, LogpKind, Role, Rollout, Span, Task, ToolCall
from harnessrl_jax.trajectories.roles import OutputRoles, assign_roles, call_roles
from harnessrl_jax.trajectories.rows import PackedBatch, target_context
from harnessrl_jax.trajectories.targets import Targets, build_targets
from harnessrl_jax.trajectories.trees import ROOT, PrefixTree, ancestor, build, path
from harnessrl_jax.trajectories.valued import call_parents, with_values

__all__ = [
    "ROOT",
    "Agent",
    "Bucket",
    "Call",
    "CreditedCall",
    "CreditedCalls",
    "Drop",
    "Evidence",
    "Fork",
    "GroupTrees",
    "Lineage",
    "LinkedCall",
    "LogpKind",
    "OutputRoles",
    "PackedBatch",
    "PackedStep",
    "PackingReport",
    "ParsedOutput",
    "PrefixTree",
    "Role",
    "Rollout",
    "RowReport",
    "Schemas",
    "Span",
    "Targets",
    "Task",
    "ToolBlock",
    "ToolCall",
    "ToolFormat",
    "ancestor",
    "assign_roles",
    "build",
    "build_lineage",
    "build_targets",
    "call_advantages",
    "call_parents",
    "call_roles",
    "format_of_template",
    "group_trees",
    "leave_one_out",
    "loss_weights",
    "pack",
    "pack_buckets",
    "pack_groups",
    "parse_tool_calls",
    "path",
    "process_by_call_index",
    "supervised_calls",
    "target_context",
    "with_values",
]
