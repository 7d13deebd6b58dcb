"""(train state, assigned batch) -> the gradient to apply, each role's loss, and what was measured on the way."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from harnessrl_jax.capo import conflict, reference_gradient, role_gradients, route, scaled, shared_factors
from harnessrl_jax.training.accumulate import Gradient, MicroLoss, accumulate, micro_batches, micro_loss, zero_tally
from harnessrl_jax.training.assignment import AssignedRows, Assignment
from harnessrl_jax.training.objectives import Objective, roles_of, sequence_of
from harnessrl_jax.training.one_pass import fused, position_local
from harnessrl_jax.training.rows import RowFn
from harnessrl_jax.training.sequence_ratios import with_sequence_ratios
from harnessrl_jax.training.state import Routing, TrainState, widened
from harnessrl_jax.training.tally import Tally, conflict_metrics


class BatchGradient(NamedTuple):
    """What a whole batch says."""

    gradient: PyTree
    """Routed where the objective is; float32 at least."""
    losses: Float[Array, " role"]
    tally: Tally
    conflict: dict[str, Array]
    """Metrics of the role gradients before routing; empty where there is one role."""


class Form(NamedTuple):
    """A way to take gradients micro-batch by micro-batch."""

    axes: tuple[int, ...]
    """Leading axes of the running gradient: one for roles that stay apart, none for roles routed at once."""
    gradient: Gradient
    finish: Callable[[PyTree], tuple[PyTree, dict[str, Array]]]
    """The finished sum -> the gradient to apply, and metrics."""


def batch_gradient(
    row_fn: RowFn, objective: Objective, *, micro_rows: int, shardings: TrainState | None
) -> Callable[[PyTree, Assignment, Routing | None, Int[Array, ""]], BatchGradient]:
    """The gradient function of an objective: (params, assignment, routing, rows used) -> BatchGradient."""
    roles = roles_of(objective)

    def gradient_of(params: PyTree, work: Assignment, routing: Routing | None, rows_used: Array) -> BatchGradient:
        if sequence := sequence_of(objective):
            work = with_sequence_ratios(
                row_fn, params, work, rows_used, sequence=sequence, micro_rows=micro_rows, shardings=shardings
            )
        form = _form(row_fn, objective, work.denominator, routing, params)
        zeros = jax.tree.map(lambda leaf: jnp.zeros((*form.axes, *leaf.shape), leaf.dtype), widened(params))
        capo = routing.state if routing else ()
        total, losses, tally = accumulate(
            form.gradient,
            params,
            micro_batches(work.assigned, micro_rows, shardings),
            rows_used,
            (zeros, jnp.zeros(roles), zero_tally(objective, work.assigned, capo)),
            _holder(form.axes, shardings),
        )
        gradient, measured = form.finish(total)
        return BatchGradient(gradient, losses, tally, measured)

    return gradient_of


def _divided(loss: MicroLoss, denominator: Float[Array, " role"]) -> MicroLoss:
    """Summed losses over their *global* weights: sums of these over micro-batches are the losses of the batch."""

    def divided(params: PyTree, part: AssignedRows) -> tuple[Float[Array, " role"], Tally]:
        losses, tally = loss(params, part)
        return losses / denominator, tally

    return divided


def _form(
    row_fn: RowFn, objective: Objective, denominator: Float[Array, " role"], routing: Routing | None, params: PyTree
) -> Form:
    loss = _divided(micro_loss(row_fn, objective), denominator)
    if routing is None:
        return Form((1,), _apart(loss), lambda total: (jax.tree.map(lambda leaf: leaf[0], total), {}))
    capo, _, masks = routing
    match capo.routing:
        case "vjp":
            return Form((capo.roles,), _apart(loss), lambda total: _routed(total, routing))
        case "reference":
            gradient: Gradient = lambda p, part: reference_gradient(lambda q: loss(q, part), p, capo.unit_map, masks)
        case "fused":
            gradient = fused(row_fn, objective, denominator, routing)
        case "position_local":
            gradient = position_local(row_fn, objective, denominator, routing)
    return Form((), gradient, lambda total: (total, _unmeasured(params, routing)))


def _routed(gradients: PyTree, routing: Routing) -> tuple[PyTree, dict[str, Array]]:
    capo, state, masks = routing
    metrics = _measured(gradients, routing)
    if capo.shared != "sum":
        factors = shared_factors(capo.unit_map, gradients, state.units, how=capo.shared, cagrad=capo.cagrad)
        gradients = scaled(capo.unit_map, gradients, factors)
    return route(capo.unit_map, gradients, masks), metrics


def _measured(gradients: PyTree, routing: Routing) -> dict[str, Array]:
    return conflict_metrics(conflict(routing.capo.unit_map, gradients, routing.state.units))


def _unmeasured(params: PyTree, routing: Routing) -> dict[str, Array]:
    """Metrics where the role gradients never exist apart: sizes of the partition, and conflict that is not valid."""
    nothing = jax.tree.map(lambda leaf: jnp.zeros((2, *leaf.shape)), params)
    return {name: value for name, value in _measured(nothing, routing).items() if not name.startswith("capo/norm_")}


def _apart(loss: MicroLoss) -> Gradient:
    return lambda params, part: role_gradients(lambda p: loss(p, part), params)


def _holder(axes: tuple[int, ...], shardings: TrainState | None) -> Callable[[PyTree], PyTree]:
    """Keeps a running gradient split like its parameters, so that no device holds all of it."""
    if shardings is None:
        return lambda tree: tree
    like = jax.tree.map(
        lambda sharding: NamedSharding(sharding.mesh, PartitionSpec(*(None,) * len(axes), *sharding.spec)),
        shardings.params,
    )
    return lambda tree: lax.with_sharding_constraint(tree, like)
