"""(function of a row, rows of a batch) -> one number a target, by forward passes over micro-batches."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from harnessrl_jax.training.accumulate import micro_batches, over_rows
from harnessrl_jax.training.rows import Row
from harnessrl_jax.training.state import TrainState


def per_target(
    of_row: Callable[[Row], Float[Array, " target"]],
    rows: Row,
    rows_used: Int[Array, ""],
    *,
    micro_rows: int,
    shardings: TrainState | None,
) -> Float[Array, "row target"]:
    """What `of_row` says of all targets, float32 at least. In rows that are not used it means nothing.

    Raises:
      ShardingError: `micro_rows` does not divide the rows.
    """
    micro = micro_batches(rows, micro_rows, shardings)

    def body(i: Array, found: Array) -> Array:
        part = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, i, 0, keepdims=False), micro)
        return lax.dynamic_update_index_in_dim(found, over_rows(of_row, part).astype(found.dtype), i, 0)

    kind = jax.eval_shape(of_row, jax.tree.map(lambda leaf: leaf[0, 0], micro)).dtype
    trips = (rows_used + micro_rows - 1) // micro_rows
    start = jnp.zeros(micro.role.shape, jnp.promote_types(kind, jnp.float32))
    return lax.fori_loop(0, trips, body, start).reshape(rows.role.shape)
