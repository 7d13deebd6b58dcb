"""Row function, optimiser and objective -> one pure optimiser step: (state, batch, rows used) -> (state, metrics).

A step assigns each target to a loss and finds the global denominators, sums gradients over micro-batches, divides
once, routes the role gradients through CAPO's masks, updates the parameters that the masks cover, and moves CAPO's
schedule on. A step without signal (a gradient of norm 0) or with a number that is not finite changes neither parameters
nor optimiser; nor does one that CAPO only probes.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from harnessrl_jax.capo import advance
from harnessrl_jax.training.assignment import assign
from harnessrl_jax.training.gradients import batch_gradient
from harnessrl_jax.training.objectives import Objective
from harnessrl_jax.training.rows import RowFn
from harnessrl_jax.training.state import TrainState, may_train, routing_of
from harnessrl_jax.training.tally import named_metrics, schedule_metrics
from harnessrl_jax.training.update import forget_left, update
from harnessrl_jax.trajectories import PackedBatch

Metrics = dict[str, Array]
Step = Callable[[TrainState, PackedBatch, Int[Array, ""]], tuple[TrainState, Metrics]]


def make_step(
    row_fn: RowFn,
    optimizer: optax.GradientTransformation,
    objective: Objective,
    *,
    micro_rows: int,
    shardings: TrainState | None = None,
) -> Step:
    """Builds the step, which the caller compiles.

    `jax.jit(step, donate_argnums=0, out_shardings=(shardings, None), compiler_options=step_compiler_options())`
    compiles once for a batch shape: `rows_used`, the schedule and the masks are data.

    Args:
      row_fn: the model.
      optimizer: clips and scales; it sees the routed gradient and the parameters in float32 at least.
      objective: what is optimised.
      micro_rows: rows whose activations are in memory together; divides the batch's rows. On a mesh a multiple of
        data x fsdp.
      shardings: where the state lies (`state_shardings`); None on one device.

    Returns:
      `step(state, batch, rows_used)`, where `rows_used` (int32 scalar) rows are filled, from the front; the others
      are never computed. Metrics are float32: scalars, and per-layer vectors named `capo/*_layer`. `applied` is 0 for a
      step that changed no parameter; `finite` is 0 where a loss or gradient was not a number, which should stop a run.

    Raises:
      ShardingError: when traced, if `micro_rows` does not divide the rows.
    """
    gradient_of = batch_gradient(row_fn, objective, micro_rows=micro_rows, shardings=shardings)

    def step(state: TrainState, batch: PackedBatch, rows_used: Int[Array, ""]) -> tuple[TrainState, Metrics]:
        work = assign(objective, batch, rows_used)
        routing = routing_of(objective, state.capo)
        found = gradient_of(state.params, work, routing, rows_used)
        norm = optax.tree.norm(found.gradient)
        finite = jnp.isfinite(norm) & jnp.isfinite(found.losses).all()
        training = may_train(routing)
        applied = finite & (norm > 0) & training
        trained = routing.masks.trained(routing.capo.unit_map, state.params) if routing else None
        params, opt_state, update_norm = update(optimizer, state, found.gradient, trained, applied)
        metrics = (
            named_metrics(objective, found.tally)
            | found.conflict
            | {
                "loss": found.losses.sum(),
                "grad_norm": norm,
                "update_norm": update_norm,
                "applied": applied,
                "finite": finite,
                "rows": rows_used,
            }
        )
        capo = state.capo
        if routing:
            capo = advance(
                routing.state, found.tally.probe, work.rollouts, applied | (finite & ~training), routing.capo
            )
            capo = jax.tree.map(lambda new, old: jnp.where(finite, new, old), capo, routing.state)
            opt_state = forget_left(optimizer, routing, routing_of(objective, capo), params, opt_state)
            metrics |= schedule_metrics(capo, found.tally.probe, work.rollouts)
        metrics = {name: jnp.asarray(value, jnp.float32) for name, value in metrics.items()}
        return TrainState(params, opt_state, state.step + 1, capo), metrics

    return step
