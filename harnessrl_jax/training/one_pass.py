"""(params, assigned rows) -> the routed gradient of a micro-batch from a single backward pass."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from harnessrl_jax import capo
from harnessrl_jax.training.accumulate import Gradient, over_rows, row_losses, summed
from harnessrl_jax.training.assignment import AssignedRows
from harnessrl_jax.training.objectives import Objective
from harnessrl_jax.training.rows import RowFn, in_two_parts
from harnessrl_jax.training.state import Routing
from harnessrl_jax.training.tally import Tally


def fused(row_fn: RowFn, objective: Objective, denominator: Float[Array, " role"], routing: Routing) -> Gradient:
    """CAPO's form "fused". A loss of `objective` must depend, for each role, on that role's targets alone."""
    parts = in_two_parts(row_fn)

    def gradient(params: PyTree, part: AssignedRows) -> tuple[PyTree, Float[Array, " role"], Tally]:
        def features(params: PyTree) -> tuple[PyTree, PyTree]:
            return over_rows(lambda assigned: parts.trunk(params, assigned.rows), part)

        def losses(params: PyTree, found: PyTree, units: PyTree) -> tuple[Float[Array, " role"], Tally]:
            def one_row(assigned: AssignedRows, found: PyTree, units: PyTree) -> tuple[Array, Tally]:
                output = parts.head(params, found, assigned.rows)._replace(units=units)
                return row_losses(objective, output, assigned)

            total, tally = summed(*over_rows(one_row, part, found, units))
            return total / denominator, tally

        return capo.fused_gradient(features, losses, params, routing.capo.unit_map, routing.masks, part.role)

    return gradient


def position_local(
    row_fn: RowFn, objective: Objective, denominator: Float[Array, " role"], routing: Routing
) -> Gradient:
    """CAPO's approximation "position_local": the plain gradient of all roles, gated by what each slot predicts."""

    def gradient(params: PyTree, part: AssignedRows) -> tuple[PyTree, Float[Array, " role"], Tally]:
        def total(params: PyTree) -> tuple[Float[Array, ""], tuple[Float[Array, " role"], Tally]]:
            def one_row(assigned: AssignedRows) -> tuple[Array, Tally]:
                slots = predicting_slots(assigned, routing.capo.roles)
                model = capo.position_local(
                    lambda p: row_fn(p, assigned.rows), routing.capo.unit_map, routing.masks, slots
                )
                return row_losses(objective, model(params), assigned)

            losses, tally = summed(*over_rows(one_row, part))
            return (losses / denominator).sum(), (losses / denominator, tally)

        gradient, (losses, tally) = jax.grad(total, has_aux=True)(params)
        return gradient, losses, tally

    return gradient


def predicting_slots(assigned: AssignedRows, roles: int) -> Bool[Array, "role slot"]:
    """Which slots of a row predict a target of each role."""
    row, role, _ = assigned
    none = jnp.zeros(len(row.token), bool)
    return jnp.stack([none.at[row.source].max(role == each) for each in range(roles)])
