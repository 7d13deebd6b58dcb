"""Calls of a harness -> trees, roles, advantages and packed rows. NumPy only: usable where JAX is absent."""

from harnessrl_jax.trajectories.packing import PackedBatch, Targets
from harnessrl_jax.trajectories.parsing import ParsedOutput, ToolBlock, parse_tool_calls
from harnessrl_jax.trajectories.records import Call, LogpKind, Role, Rollout, Span, Task, ToolCall
from harnessrl_jax.trajectories.roles import OutputRoles, assign_roles, call_roles
from harnessrl_jax.trajectories.trees import ROOT, PrefixTree, ancestor, build, path

__all__ = [
    "ROOT",
    "Call",
    "LogpKind",
    "OutputRoles",
    "PackedBatch",
    "ParsedOutput",
    "PrefixTree",
    "Role",
    "Rollout",
    "Span",
    "Targets",
    "Task",
    "ToolBlock",
    "ToolCall",
    "ancestor",
    "assign_roles",
    "build",
    "call_roles",
    "parse_tool_calls",
    "path",
]
