"""Tasks -> scored rollouts: warm harness processes, deadlines, attempts, failure classes, groups."""

from harnessrl_jax.rollouts.jobs import Job, Outcome, read_result
from harnessrl_jax.rollouts.pool import HarnessPool
from harnessrl_jax.rollouts.process import minimal_environment
from harnessrl_jax.rollouts.run import (
    Effects,
    Endpoint,
    Identity,
    Verdict,
    classify,
    failure_counts,
    limits_reached,
    refuse_lost,
    run_groups,
)

__all__ = [
    "Effects",
    "Endpoint",
    "HarnessPool",
    "Identity",
    "Job",
    "Outcome",
    "Verdict",
    "classify",
    "failure_counts",
    "limits_reached",
    "minimal_environment",
    "read_result",
    "refuse_lost",
    "run_groups",
]
