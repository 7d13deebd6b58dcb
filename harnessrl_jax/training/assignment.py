"""(objective, batch) -> which gradient each target belongs to, and the global weight of each loss."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from harnessrl_jax.capo import gradient_roles, probe_targets
from harnessrl_jax.training.objectives import Objective, capo_of, roles_of
from harnessrl_jax.training.rows import Row
from harnessrl_jax.trajectories import PackedBatch


class AssignedRows(NamedTuple):
    """Rows of a batch with what the whole batch says about their targets. Every array has a leading row axis."""

    rows: Row
    role: Int[Array, "row target"]
    """Index of the loss; below 0 for targets of no loss."""
    probed: Bool[Array, "row target"]


class Assignment(NamedTuple):
    """A batch, ready to be cut into micro-batches: nothing global is left to find out."""

    assigned: AssignedRows
    denominator: Float[Array, " role"]
    """What each summed loss is divided by; 1 where the role is absent, so that its loss and gradient are 0."""
    rollouts: Int[Array, ""]
    """Rollouts that the probe reads."""


def assign(objective: Objective, batch: PackedBatch, rows_used: Int[Array, ""]) -> Assignment:
    """Finds each target's loss. Rows from `rows_used` on count as padding."""
    used = jnp.arange(batch.weight.shape[0]) < rows_used
    rows = Row(*jax.tree.map(jnp.asarray, batch))
    rows = rows._replace(weight=jnp.where(used[:, None], rows.weight, 0))
    counted = rows.weight > 0
    capo = capo_of(objective)
    if capo:
        role = gradient_roles(rows.role, rows.call, counted, other_role=capo.other_role)
        probed, rollouts = probe_targets(role, rows.rollout, rows.success)
    else:
        role = jnp.where(counted, 0, -1)
        probed, rollouts = jnp.zeros_like(counted), jnp.zeros((), jnp.int32)
    weight = jnp.stack([jnp.where(role == each, rows.weight, 0).sum() for each in range(roles_of(objective))])
    if capo and capo.denominator == "shared":
        weight = jnp.full_like(weight, weight.sum())
    return Assignment(AssignedRows(rows, role, probed), jnp.where(weight > 0, weight, 1), rollouts)
