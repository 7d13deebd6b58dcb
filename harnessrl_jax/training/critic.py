"""A decoder's row function with a value head, and the values of a batch before its returns are computed.

params = init_params(config, key) | {"value_head": init_value_head(config)}
row_fn = critic_row_fn(decoder_row_fn(config, ...), trunk="trained")
(batch,) = with_values([batch], [make_values(row_fn, micro_rows=8)(params, batch, rows_used)], ...)
step = make_step(row_fn, optimizer, ActorCritic(policy=..., critic=Critic(clip=0.2), coefficient=0.5), ...)
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from harnessrl_jax.errors import LossError
from harnessrl_jax.models import values
from harnessrl_jax.training.forward import per_target
from harnessrl_jax.training.rows import Row, RowFn, RowOutput, TwoPartRowFn
from harnessrl_jax.training.state import TrainState
from harnessrl_jax.trajectories import PackedBatch


def critic_row_fn(row_fn: TwoPartRowFn, *, trunk: Literal["trained", "detached"]) -> TwoPartRowFn:
    """The row function that also says what each target's source is worth.

    Args:
      row_fn: a decoder's (`decoder_row_fn`, `context_row_fn`): its features are the normed hidden states of the slots
        that predict the targets.
      trunk: whether the value loss trains what computes those states, or the head alone.

    Returns:
      A row function of the same parameters and "value_head", as from `models.init_value_head`.
    """

    def head(params: PyTree, features: Array, row: Row) -> RowOutput:
        read = features if trunk == "trained" else lax.stop_gradient(features)
        return row_fn.head(params, features, row)._replace(value=values(params["value_head"], read))

    return TwoPartRowFn(row_fn.trunk, head)


def make_values(
    row_fn: RowFn, *, micro_rows: int, shardings: TrainState | None = None
) -> Callable[[PyTree, PackedBatch, Int[Array, ""]], Float[Array, "row target"]]:
    """Builds (params, batch, rows used) -> the critic's values: V_old of the loss, and what GAE starts from.

    Args:
      row_fn: the model, with values (`critic_row_fn`).
      micro_rows: as in `make_step`.
      shardings: as in `make_step`.

    Returns:
      The function, for the caller to compile. On padding, values mean nothing.

    Raises:
      LossError: when traced, if the row function gives no values.
      ShardingError: when traced, if `micro_rows` does not divide the rows.
    """

    def value(params: PyTree, row: Row) -> Float[Array, " target"]:
        found = row_fn(params, row).value
        if isinstance(found, tuple):
            raise LossError("make_values: the row function gives no values; wrap it in critic_row_fn")
        return found

    def run(params: PyTree, batch: PackedBatch, rows_used: Int[Array, ""]) -> Float[Array, "row target"]:
        rows = Row(*jax.tree.map(jnp.asarray, batch))
        return per_target(lambda row: value(params, row), rows, rows_used, micro_rows=micro_rows, shardings=shardings)

    return run
