"""Calls of a harness -> trees, roles, advantages and packed rows. NumPy only: usable where JAX is absent."""

from harnessrl_jax.trajectories.packing import PackedBatch, Targets
from harnessrl_jax.trajectories.records import Call, LogpKind, Role, Rollout, Span, Task, ToolCall
from harnessrl_jax.trajectories.trees import ROOT, PrefixTree, ancestor, build, path

__all__ = [
    "ROOT",
    "Call",
    "LogpKind",
    "PackedBatch",
    "PrefixTree",
    "Role",
    "Rollout",
    "Span",
    "Targets",
    "Task",
    "ToolCall",
    "ancestor",
    "build",
    "path",
]
