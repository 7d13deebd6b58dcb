"""(params, assigned batch) -> the same batch with the ratio of every call, whichever rows its targets lie in."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree

from harnessrl_jax.losses import segment_mean_log_ratio
from harnessrl_jax.training.accumulate import micro_batches
from harnessrl_jax.training.assignment import Assignment
from harnessrl_jax.training.rows import RowFn
from harnessrl_jax.training.state import TrainState


def with_call_ratios(
    row_fn: RowFn,
    params: PyTree,
    work: Assignment,
    rows_used: Int[Array, ""],
    *,
    micro_rows: int,
    shardings: TrainState | None,
) -> Assignment:
    """Fills `Row.call_log_ratio` by one forward pass over the used rows.

    A tree that does not fit a row is cut, so the targets of a call can lie in several rows: only the whole batch knows
    the mean over a call, and with it the loss does not depend on how the batch was packed. Targets without a
    log-probability of the sampler do not enter the mean and keep the ratio 1, as in every loss.

    Raises:
      ShardingError: `micro_rows` does not divide the rows.
    """
    micro = micro_batches(work.assigned, micro_rows, shardings)

    def body(i: Array, logps: Array) -> Array:
        part = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, i, 0, keepdims=False), micro.rows)
        if micro_rows > 1:
            logp = jax.vmap(row_fn, in_axes=(None, 0))(params, part).logp
        else:  # vmap would turn the branches inside a model into selects, also for one row
            logp = row_fn(params, jax.tree.map(lambda leaf: leaf[0], part)).logp[None]
        return lax.dynamic_update_index_in_dim(logps, logp.astype(logps.dtype), i, 0)

    dtype = jnp.promote_types(work.assigned.rows.weight.dtype, jnp.float32)
    trips = (rows_used + micro_rows - 1) // micro_rows
    logp = lax.fori_loop(0, trips, body, jnp.zeros(micro.role.shape, dtype))
    rows = work.assigned.rows
    known = (rows.weight > 0) & rows.has_logp
    flat = (each.reshape(-1) for each in (logp, rows.logp_behaviour.astype(dtype), rows.call, known))
    log_ratio = lax.stop_gradient(segment_mean_log_ratio(*flat)).reshape(known.shape)
    return work._replace(assigned=work.assigned._replace(rows=rows._replace(call_log_ratio=log_ratio)))
