"""Model outputs of a row -> sums and peaks that add over rows; all of them -> named metrics."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from harnessrl_jax.capo import ACTION, ARGS, CapoState, Conflict, Probe, probe_row
from harnessrl_jax.losses import Sum, ratio_statistics, weighted_sum
from harnessrl_jax.training.objectives import Objective, Policy, behaviour_logp, row_loss
from harnessrl_jax.training.rows import Row, RowOutput
from harnessrl_jax.trajectories import Role

LOGGED_ROLES = (Role.ACTION, Role.ARGS, Role.OTHER)


class Tally(NamedTuple):
    """What rows report. Two tallies combine by adding the sums and taking the larger peaks."""

    sums: dict[str, Any]
    peaks: dict[str, Float[Array, ""]]
    probe: Any
    """CAPO's `Probe`, added like the sums; () where nothing is probed."""

    def add(self, other: "Tally") -> "Tally":
        """The tally of both parts."""
        return Tally(
            jax.tree.map(jnp.add, self.sums, other.sums),
            jax.tree.map(jnp.maximum, self.peaks, other.peaks),
            jax.tree.map(jnp.add, self.probe, other.probe),
        )

    def over_rows(self) -> "Tally":
        """The tally of all rows, from one with a leading row axis."""
        return Tally(
            jax.tree.map(lambda leaf: leaf.sum(axis=0), self.sums),
            jax.tree.map(lambda leaf: leaf.max(axis=0), self.peaks),
            jax.tree.map(lambda leaf: leaf.sum(axis=0), self.probe),
        )


def tally_row(
    objective: Objective,
    output: RowOutput,
    row: Row,
    role: Int[Array, " target"],
    probed: Bool[Array, " target"],
) -> Tally:
    """Statistics of one row's targets, float32, without gradient.

    Args:
      objective: what is optimised.
      output: the model's.
      row: the row; weight 0 leaves a target out.
      role: the gradient each target belongs to (CAPO's roles, or 0).
      probed: which targets CAPO's probe reads.
    """
    output = jax.lax.stop_gradient(RowOutput(_wide(output.logp), _wide(output.entropy), output.units))
    weights = jnp.stack([jnp.where(row.role == each, row.weight, 0) for each in LOGGED_ROLES])
    once = (row.weight > 0).astype(jnp.float32)
    sums: dict[str, Any] = {
        "role_loss": jax.vmap(lambda weight: row_loss(objective, output, row, weight))(weights),
        "entropy": weighted_sum(output.entropy, once),
        "logp": weighted_sum(output.logp, once),
        "advantage": weighted_sum(jnp.abs(row.advantage), once),
        "targets": once.sum(),
        "routed_targets": jnp.where(role >= 0, once, 0).sum(),
    }
    if not isinstance(objective, Policy):
        return Tally(sums, {}, ())
    sums["missing_logp"] = jnp.where(row.has_logp, 0, once).sum()
    ratios = ratio_statistics(
        output.logp,
        behaviour_logp(output, row),
        row.advantage,
        jnp.where(row.has_logp, row.weight, 0),
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
    )._asdict()
    peaks = {name: ratios.pop(name) for name in ("ratio_max", "difference_max")}
    capo = objective.capo
    probe = probe_row(output.units, role, probed, phi=capo.phi) if capo else ()
    return Tally(sums | ratios, peaks, probe)


def _wide(value: Array) -> Array:
    return value.astype(jnp.float32)


def named_metrics(objective: Objective, tally: Tally) -> dict[str, Float[Array, ""]]:
    """The numbers of a step that come from its targets."""
    sums, peaks = tally.sums, tally.peaks
    metrics = {
        "entropy": sums["entropy"].mean(),
        "logp": sums["logp"].mean(),
        "advantage_abs": sums["advantage"].mean(),
        "targets": sums["targets"],
        "routed_targets": sums["routed_targets"],
    }
    for i, role in enumerate(LOGGED_ROLES):
        name = role.name.lower()
        one = Sum(sums["role_loss"].total[i], sums["role_loss"].weight[i])
        metrics |= {f"loss_{name}": one.mean(), f"weight_{name}": one.weight}
    if isinstance(objective, Policy):
        metrics |= {
            "ratio_mean": sums["ratio"].mean(),
            "ratio_max": peaks["ratio_max"],
            "kl": sums["kl"].mean(),
            "clip_fraction": sums["cut"].mean(),
            "mismatch_mean": sums["difference"].mean(),
            "mismatch_max": peaks["difference_max"],
            "missing_logp": sums["missing_logp"],
        }
    return metrics


def conflict_metrics(conflict: Conflict) -> dict[str, Array]:
    """`capo/NAME` of every number of a `Conflict`, with `capo/NAME_valid` beside the ones that can be undefined."""
    metrics: dict[str, Array] = {}
    for name, value in conflict._asdict().items():
        if isinstance(value, tuple):
            metrics[f"capo/{name}"], metrics[f"capo/{name}_valid"] = value
        else:
            metrics[f"capo/{name}"] = value
    return metrics


def schedule_metrics(state: CapoState, probe: Probe, rollouts: Int[Array, ""]) -> dict[str, Array]:
    """Where CAPO's schedule stands after the step, and what the step's probe read."""
    return {
        "capo/active": state.active,
        "capo/refreshes": state.refreshes,
        "capo/age": state.age,
        "capo/probed_rollouts": rollouts,
        "capo/probed_rollouts_total": state.rollouts,
        "capo/probed_action": probe.tokens[ACTION],
        "capo/probed_args": probe.tokens[ARGS],
        "capo/probe_dropped": probe.dropped,
    }
