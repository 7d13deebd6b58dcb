"""(params, assigned rows) -> gradients and statistics summed over the used rows, micro-batch by micro-batch."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from harnessrl_jax.capo import CapoState
from harnessrl_jax.errors import ShardingError
from harnessrl_jax.training.assignment import AssignedRows
from harnessrl_jax.training.objectives import Objective, roles_of, row_loss
from harnessrl_jax.training.rows import RowFn, RowOutput
from harnessrl_jax.training.sharding import ROW_AXES
from harnessrl_jax.training.state import TrainState
from harnessrl_jax.training.tally import Tally, tally_row

MicroLoss = Callable[[PyTree, AssignedRows], tuple[Float[Array, " role"], Tally]]
Gradient = Callable[[PyTree, AssignedRows], tuple[PyTree, Float[Array, " role"], Tally]]


def micro_loss(row_fn: RowFn, objective: Objective) -> MicroLoss:
    """The summed losses of a micro-batch, one a role, as a function of the parameters."""

    def one_row(params: PyTree, assigned: AssignedRows) -> tuple[Float[Array, " role"], Tally]:
        row, role, probed = assigned
        output = row_fn(params, row)
        weights = jnp.stack([jnp.where(role == each, row.weight, 0) for each in range(roles_of(objective))])
        losses = jax.vmap(lambda weight: row_loss(objective, output, row, weight).total)(weights)
        return losses, tally_row(objective, output, row, role, probed)

    def rows(params: PyTree, assigned: AssignedRows) -> tuple[Float[Array, " role"], Tally]:
        if len(assigned.role) == 1:  # vmap would turn the branches inside a model into selects, also for one row
            return one_row(params, jax.tree.map(lambda leaf: leaf[0], assigned))
        losses, tally = jax.vmap(one_row, in_axes=(None, 0))(params, assigned)
        return losses.sum(axis=0), tally.over_rows()

    return rows


def micro_batches(assigned: AssignedRows, micro_rows: int, shardings: TrainState | None) -> AssignedRows:
    """Cuts the row axis into [micro-batch, row of it]; on a mesh, every micro-batch lies along all row devices.

    Raises:
      ShardingError: the rows do not divide evenly.
    """
    rows = len(assigned.role)
    if rows % micro_rows:
        raise ShardingError(
            f"make_step: {rows} rows cannot be cut into micro-batches of {micro_rows}; "
            "pack with max_rows a multiple of micro_rows"
        )
    cut = jax.tree.map(lambda leaf: leaf.reshape(rows // micro_rows, micro_rows, *leaf.shape[1:]), assigned)
    if shardings is None:
        return cut
    mesh = jax.tree.leaves(shardings)[0].mesh
    return lax.with_sharding_constraint(cut, NamedSharding(mesh, PartitionSpec(None, ROW_AXES)))


def accumulate(
    gradient: Gradient,
    params: PyTree,
    micro: AssignedRows,
    rows_used: Int[Array, ""],
    start: tuple[PyTree, Float[Array, " role"], Tally],
    hold: Callable[[PyTree], PyTree],
) -> tuple[PyTree, Float[Array, " role"], Tally]:
    """Adds up the micro-batches that hold used rows: the trip count is data, padding rows cost nothing.

    Args:
      gradient: of one micro-batch.
      params: the parameters.
      micro: arrays [micro-batch, row, ...].
      rows_used: filled rows, at the front.
      start: zeros, in the types to accumulate in.
      hold: fixes the sharding of the running gradient.
    """

    def body(i: Array, carry: tuple) -> tuple:
        part = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, i, 0, keepdims=False), micro)
        gradients, losses, tally = gradient(params, part)
        added = jax.tree.map(lambda total, leaf: total + leaf.astype(total.dtype), carry[:2], (gradients, losses))
        return hold(added[0]), added[1], carry[2].add(tally)

    micro_rows = micro.role.shape[1]
    trips = (rows_used + micro_rows - 1) // micro_rows
    return lax.fori_loop(0, trips, body, start)


def zero_tally(objective: Objective, assigned: AssignedRows, capo: CapoState | tuple[()]) -> Tally:
    """The tally of no rows, float32."""
    targets = assigned.role.shape[1]
    layers, size = capo.units.shape[1:] if isinstance(capo, CapoState) else (0, 0)

    def some_row(assigned: AssignedRows) -> Tally:
        row, role, probed = jax.tree.map(lambda leaf: leaf[0], assigned)
        zeros = jnp.zeros(targets, jnp.float32)
        output = RowOutput(zeros, zeros, (jnp.zeros((targets, size), jnp.float32),) * layers)
        return tally_row(objective, output, row, role, probed)

    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(some_row, assigned))
