"""(params, assigned batch) -> the same batch with the ratio of every sequence, whichever rows its targets lie in."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree

from harnessrl_jax.losses import segment_mean_log_ratio
from harnessrl_jax.training.assignment import Assignment
from harnessrl_jax.training.forward import per_target
from harnessrl_jax.training.objectives import Sequence
from harnessrl_jax.training.rows import RowFn
from harnessrl_jax.training.state import TrainState


def with_sequence_ratios(
    row_fn: RowFn,
    params: PyTree,
    work: Assignment,
    rows_used: Int[Array, ""],
    *,
    sequence: Sequence,
    micro_rows: int,
    shardings: TrainState | None,
) -> Assignment:
    """Fills `Row.sequence_log_ratio` by one forward pass over the used rows.

    A tree that does not fit a row is cut, so the targets of a call can lie in several rows, and those of a rollout
    nearly always do: only the whole batch knows the mean, and with it the loss of calls and rollouts does not depend on
    how the batch was packed. Targets without a log-probability of the sampler do not enter the mean and keep the ratio
    1, as in every loss.

    Raises:
      ShardingError: `micro_rows` does not divide the rows.
    """
    rows = work.assigned.rows
    owner = {"call": rows.call, "rollout": rows.rollout, "row": jnp.indices(rows.call.shape)[0]}[sequence]
    logp = per_target(lambda row: row_fn(params, row).logp, rows, rows_used, micro_rows=micro_rows, shardings=shardings)
    known = (rows.weight > 0) & rows.has_logp
    flat = (each.reshape(-1) for each in (logp, rows.logp_behaviour.astype(logp.dtype), owner, known))
    log_ratio = lax.stop_gradient(segment_mean_log_ratio(*flat)).reshape(known.shape)
    return work._replace(assigned=work.assigned._replace(rows=rows._replace(sequence_log_ratio=log_ratio)))
