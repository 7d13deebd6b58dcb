"""(train state, assigned batch) -> the gradient to apply, each role's loss, and what was measured on the way."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from harnessrl_jax.capo import Capo, RoleMasks, conflict, reference_gradient, role_gradients, route
from harnessrl_jax.training.accumulate import Gradient, MicroLoss, accumulate, micro_batches, micro_loss, zero_tally
from harnessrl_jax.training.assignment import AssignedRows, Assignment
from harnessrl_jax.training.objectives import Objective, capo_of, roles_of
from harnessrl_jax.training.rows import RowFn
from harnessrl_jax.training.state import TrainState, widened
from harnessrl_jax.training.tally import Tally, conflict_metrics


class BatchGradient(NamedTuple):
    """What a whole batch says, divided by the global denominators."""

    gradient: PyTree
    """Routed where the objective is; float32 at least."""
    losses: Float[Array, " role"]
    tally: Tally
    conflict: dict[str, Array]
    """Metrics of the role gradients before routing; empty where there is one role."""


def batch_gradient(
    row_fn: RowFn, objective: Objective, *, micro_rows: int, shardings: TrainState | None
) -> Callable[[TrainState, Assignment, RoleMasks | None, Int[Array, ""]], BatchGradient]:
    """The gradient function of an objective: (state, assignment, masks, rows used) -> BatchGradient."""
    loss, capo = micro_loss(row_fn, objective), capo_of(objective)

    def summed(
        gradient: Gradient, lead: tuple[int, ...], state: TrainState, work: Assignment, rows_used: Int[Array, ""]
    ) -> tuple[PyTree, Float[Array, " role"], Tally]:
        mesh = shardings.step.mesh if shardings else None
        start = (
            jax.tree.map(lambda leaf: jnp.zeros((*lead, *leaf.shape), leaf.dtype), widened(state.params)),
            jnp.zeros(roles_of(objective)),
            zero_tally(objective, work.assigned, state.capo),
        )
        micro = micro_batches(work.assigned, micro_rows, mesh)
        return accumulate(gradient, state.params, micro, rows_used, start, _holder(lead, shardings))

    def plain(state: TrainState, work: Assignment, masks: RoleMasks | None, rows_used: Int[Array, ""]) -> BatchGradient:
        stacked, losses, tally = summed(_apart(loss), (1,), state, work, rows_used)
        gradient = jax.tree.map(lambda leaf: leaf[0] / work.denominator[0], stacked)
        return BatchGradient(gradient, losses / work.denominator, tally, {})

    def vjp(state: TrainState, work: Assignment, masks: RoleMasks, rows_used: Int[Array, ""]) -> BatchGradient:
        stacked, losses, tally = summed(_apart(loss), (len(work.denominator),), state, work, rows_used)
        apart = jax.tree.map(lambda leaf: leaf / work.denominator.reshape(-1, *(1,) * (leaf.ndim - 1)), stacked)
        measured = conflict_metrics(conflict(capo.unit_map, apart, state.capo.units))
        return BatchGradient(route(capo.unit_map, apart, masks), losses / work.denominator, tally, measured)

    def reference(state: TrainState, work: Assignment, masks: RoleMasks, rows_used: Int[Array, ""]) -> BatchGradient:
        gradient, losses, tally = summed(_routed(loss, capo, masks, work.denominator), (), state, work, rows_used)
        # The role gradients never exist apart: the metrics keep the partition's sizes and mark conflict as not valid.
        apart = jax.tree.map(lambda leaf: jnp.zeros((2, *leaf.shape)), state.params)
        return BatchGradient(
            gradient, losses, tally, conflict_metrics(conflict(capo.unit_map, apart, state.capo.units))
        )

    if capo is None:
        return plain
    return reference if capo.routing == "reference" else vjp


def _apart(loss: MicroLoss) -> Gradient:
    return lambda params, part: role_gradients(lambda p: loss(p, part), params)


def _routed(loss: MicroLoss, capo: Capo, masks: RoleMasks, denominator: Float[Array, " role"]) -> Gradient:
    """Divides inside: after routing, the roles' shares can no longer be told apart."""

    def gradient(params: PyTree, part: AssignedRows) -> tuple[PyTree, Float[Array, " role"], Tally]:
        def divided(p: PyTree) -> tuple[Float[Array, " role"], Tally]:
            losses, tally = loss(p, part)
            return losses / denominator, tally

        return reference_gradient(divided, params, capo.unit_map, masks)

    return gradient


def _holder(lead: tuple[int, ...], shardings: TrainState | None) -> Callable[[PyTree], PyTree]:
    """Keeps a running gradient split like its parameters, so that no device holds all of it."""
    if shardings is None:
        return lambda tree: tree
    like = jax.tree.map(
        lambda sharding: NamedSharding(sharding.mesh, PartitionSpec(*(None,) * len(lead), *sharding.spec)),
        shardings.params,
    )
    return lambda tree: lax.with_sharding_constraint(tree, like)
