"""(params, assigned rows) -> gradients and statistics summed over the used rows, micro-batch by micro-batch."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from harnessrl_jax.capo import CapoState, Probe
from harnessrl_jax.errors import PartitionError, ShardingError
from harnessrl_jax.training.assignment import AssignedRows
from harnessrl_jax.training.objectives import Objective, critic_of, roles_of, row_loss
from harnessrl_jax.training.rows import RowFn, RowOutput
from harnessrl_jax.training.sharding import ROW_AXES
from harnessrl_jax.training.state import TrainState
from harnessrl_jax.training.tally import Tally, tally_row, tally_targets

RowTree = TypeVar("RowTree")
"""Arrays with a leading row axis, in any structure."""
MicroLoss = Callable[[PyTree, AssignedRows], tuple[Float[Array, " role"], Tally]]
Gradient = Callable[[PyTree, AssignedRows], tuple[PyTree, Float[Array, " role"], Tally]]


def micro_loss(row_fn: RowFn, objective: Objective) -> MicroLoss:
    """The summed losses of a micro-batch, one a role, as a function of the parameters."""

    def one_row(params: PyTree, assigned: AssignedRows) -> tuple[Float[Array, " role"], Tally]:
        return row_losses(objective, row_fn(params, assigned.rows), assigned)

    def rows(params: PyTree, assigned: AssignedRows) -> tuple[Float[Array, " role"], Tally]:
        return summed(*over_rows(lambda row: one_row(params, row), assigned))

    return rows


def row_losses(objective: Objective, output: RowOutput, assigned: AssignedRows) -> tuple[Float[Array, " role"], Tally]:
    """The summed losses of one row, one a role, and its statistics."""
    row, role, probed = assigned
    weights = jnp.stack([jnp.where(role == each, row.weight, 0) for each in range(roles_of(objective))])
    losses = jax.vmap(lambda weight: row_loss(objective, output, row, weight).total)(weights)
    return losses, tally_row(objective, output, row, role, probed)


def over_rows(one_row: Callable[..., Any], *rows: PyTree) -> Any:
    """`jax.vmap`, except for a single row: there it would turn branches inside a model into selects.

    On a mesh, a `shard_map` inside the model sees rows along `ROW_AXES`.
    """
    if len(jax.tree.leaves(rows)[0]) > 1:
        return jax.vmap(one_row, spmd_axis_name=ROW_AXES)(*rows)
    found = one_row(*jax.tree.map(lambda leaf: leaf[0], rows))
    return jax.tree.map(lambda leaf: leaf[None], found)


def summed(losses: Float[Array, "row role"], tally: Tally) -> tuple[Float[Array, " role"], Tally]:
    """The losses and statistics of all rows together."""
    return losses.sum(axis=0), tally.over_rows()


def micro_batches(rows: RowTree, micro_rows: int, shardings: TrainState | None) -> RowTree:
    """Cuts the row axis into [micro-batch, row of it]; on a mesh, every micro-batch lies along all row devices.

    Raises:
      ShardingError: the rows do not divide evenly.
    """
    count = len(jax.tree.leaves(rows)[0])
    if count % micro_rows:
        raise ShardingError(
            f"make_step: {count} rows cannot be cut into micro-batches of {micro_rows}; "
            "pack with max_rows a multiple of micro_rows"
        )
    cut = jax.tree.map(lambda leaf: leaf.reshape(count // micro_rows, micro_rows, *leaf.shape[1:]), rows)
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
        _check_probe(tally, carry[2])
        added = jax.tree.map(lambda total, leaf: total + leaf.astype(total.dtype), carry[:2], (gradients, losses))
        return hold(added[0]), added[1], carry[2].add(tally)

    micro_rows = micro.role.shape[1]
    trips = (rows_used + micro_rows - 1) // micro_rows
    return lax.fori_loop(0, trips, body, start)


def _check_probe(tally: Tally, start: Tally) -> None:
    if isinstance(tally.probe, Probe) and tally.probe.total.shape != start.probe.total.shape:
        raise PartitionError(
            f"CAPO: the statistic gives [role, layer, unit] = {list(tally.probe.total.shape)}, the unit map of the "
            f"partition has {list(start.probe.total.shape)}; choose the statistic that belongs to the map's units, and "
            "let the row function collect the activation that it reads"
        )


def zero_tally(objective: Objective, assigned: AssignedRows, capo: CapoState | tuple[()]) -> Tally:
    """The tally of no rows, float32."""
    targets = assigned.role.shape[1]

    def some_row(assigned: AssignedRows) -> Tally:
        row, role, _ = jax.tree.map(lambda leaf: leaf[0], assigned)
        zeros = jnp.zeros(targets, jnp.float32)
        value = zeros if critic_of(objective) else ()
        return tally_targets(objective, RowOutput(zeros, zeros, (), value), row, role)

    tally = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(some_row, assigned))
    if not isinstance(capo, CapoState):
        return tally
    shape = capo.units.shape
    return tally._replace(probe=Probe(*(jnp.zeros(each, jnp.float32) for each in (shape, shape, ()))))
