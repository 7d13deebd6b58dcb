"""Model outputs of a row -> sums and peaks that add over rows; all of them -> named metrics."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from harnessrl_jax.capo import ACTION, ARGS, CapoState, Conflict, Probe, probe_row
from harnessrl_jax.losses import (
    ProbabilityMoments,
    RatioMoments,
    Sum,
    ValueMoments,
    masked_log_ratio,
    probability_moments,
    ratio_moments,
    value_moments,
    weighted_sum,
)
from harnessrl_jax.training.objectives import (
    Objective,
    behaviour_logp,
    capo_of,
    critic_loss,
    critic_of,
    loss_terms,
    policy_of,
    row_loss,
    value_and_return,
)
from harnessrl_jax.training.rows import Row, RowOutput
from harnessrl_jax.trajectories import Role

LOGGED_ROLES = (Role.ACTION, Role.ARGS, Role.OTHER)
MEANS = ("entropy", "logp", "advantage_abs")
RATIO_MEANS = ("ratio_mean", "kl", "clip_fraction", "mismatch_mean")
RATIO_PEAKS = ("ratio_max", "mismatch_max")
COUNTS = ("targets", "routed_targets", "missing_logp")


class Tally(NamedTuple):
    """What rows report. Tallies combine by adding, except for peaks, of which the larger stays."""

    role_loss: Sum
    """Loss of the LOGGED_ROLES, as the batch names them, whatever they are routed by."""
    means: Sum
    """MEANS, and for a policy RATIO_MEANS; each target counts once."""
    counts: Float[Array, " count"]
    """COUNTS"""
    peaks: Float[Array, " peak"]
    """RATIO_PEAKS"""
    mismatch: Any
    """`RatioMoments` and `ProbabilityMoments` of sampler and trainer, each target once; () without a policy."""
    critic: Any
    """The value loss as a `Sum`, and `ValueMoments`, each target once; () without a critic."""
    probe: Any
    """CAPO's `Probe`; () where nothing is probed."""

    def add(self, other: "Tally") -> "Tally":
        """The tally of both parts."""
        both = jax.tree.map(jnp.add, self, other)
        return both._replace(peaks=jnp.maximum(self.peaks, other.peaks))

    def over_rows(self) -> "Tally":
        """The tally of all rows, from one with a leading row axis."""
        return jax.tree.map(lambda leaf: leaf.sum(axis=0), self)._replace(peaks=self.peaks.max(axis=0))


def tally_row(
    objective: Objective, output: RowOutput, row: Row, role: Int[Array, " target"], probed: Bool[Array, " target"]
) -> Tally:
    """Statistics of one row, float32, without gradient.

    Args:
      objective: what is optimised.
      output: the model's.
      row: the row; weight 0 leaves a target out.
      role: the gradient each target belongs to (CAPO's roles, or 0), below 0 for none.
      probed: which targets CAPO's probe reads.
    """
    tally, capo = tally_targets(objective, output, row, role), capo_of(objective)
    return tally._replace(probe=probe_row(output.units, role, probed, statistic=capo.statistic)) if capo else tally


def tally_targets(objective: Objective, output: RowOutput, row: Row, role: Int[Array, " target"]) -> Tally:
    """`tally_row` without the probe."""
    bare = lax.stop_gradient(output._replace(units=()))
    logp, entropy, _, value = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), bare)
    output = RowOutput(logp, entropy, output.units, value)
    used = row.weight > 0
    values, masks = [entropy, logp, jnp.abs(row.advantage)], [used] * len(MEANS)
    peaks, mismatch = jnp.zeros(len(RATIO_PEAKS)), ()
    if policy := policy_of(objective):
        known = jnp.where(row.has_logp, row.weight, 0)
        terms = loss_terms(policy, output, row, known)
        values, masks = [*values, *terms], [*masks, *[known > 0] * len(RATIO_MEANS)]
        peaks = jnp.stack([terms.ratio, terms.difference]).max(axis=1, initial=0)
        mismatch = _mismatch(output, row, known > 0)
    by_role = jnp.stack([jnp.where(row.role == each, row.weight, 0) for each in LOGGED_ROLES])
    return Tally(
        role_loss=jax.vmap(lambda weight: row_loss(objective, output, row, weight))(by_role),
        means=jax.vmap(weighted_sum)(jnp.stack(values), jnp.stack(masks).astype(jnp.float32)),
        counts=jnp.stack([used, used & (role >= 0), used & ~row.has_logp]).sum(axis=1, dtype=jnp.float32),
        peaks=peaks.astype(jnp.float32),
        mismatch=mismatch,
        critic=_critic(objective, output, row),
        probe=(),
    )


def _critic(objective: Objective, output: RowOutput, row: Row) -> tuple[Sum, ValueMoments] | tuple[()]:
    critic = critic_of(objective)
    if critic is None:
        return ()
    once = (row.weight > 0).astype(jnp.float32)
    found = critic_loss(critic, output, row, row.weight), value_moments(*value_and_return(output, row), once)
    return jax.tree.map(lambda x: x.astype(jnp.float32), found)


def _mismatch(output: RowOutput, row: Row, known: Bool[Array, " target"]) -> tuple[RatioMoments, ProbabilityMoments]:
    behaviour, once = behaviour_logp(output, row), known.astype(jnp.float32)
    moments = ratio_moments(masked_log_ratio(output.logp, behaviour, known), once)
    return jax.tree.map(lambda x: x.astype(jnp.float32), (moments, probability_moments(output.logp, behaviour, once)))


def named_metrics(objective: Objective, tally: Tally) -> dict[str, Array]:
    """The numbers of a step that come from its targets; the constants above name them."""
    policy = policy_of(objective) is not None
    metrics: dict[str, Array] = dict(zip(COUNTS[: 3 if policy else 2], tally.counts))
    metrics |= dict(zip(MEANS + RATIO_MEANS, tally.means.mean()))
    if policy:
        ratios, probabilities = tally.mismatch
        correlation, valid = probabilities.correlation()
        metrics |= dict(zip(RATIO_PEAKS, tally.peaks))
        metrics |= {"mismatch_effective_share": ratios.effective_share(), "mismatch_chi2": ratios.chi2()}
        metrics |= {"mismatch_correlation": correlation, "mismatch_correlation_valid": valid}
    if tally.critic:
        loss, moments = tally.critic
        explained, valid = moments.explained_variance()
        metrics |= {"value_loss": loss.mean(), "return_mean": Sum(moments.g, moments.weight).mean()}
        metrics |= {"value_error": Sum(moments.error, moments.weight).mean()}
        metrics |= {"value_explained": explained, "value_explained_valid": valid}
    losses = tally.role_loss.mean()
    for i, role in enumerate(LOGGED_ROLES):
        metrics |= {f"loss_{role.name.lower()}": losses[i], f"weight_{role.name.lower()}": tally.role_loss.weight[i]}
    return metrics


def conflict_metrics(conflict: Conflict) -> dict[str, Array]:
    """`capo/NAME` of every number of a `Conflict`, with `capo/NAME_valid` beside the ones that can be undefined."""
    metrics: dict[str, Array] = {}
    for name, value in conflict._asdict().items():
        numbers = {"": value[0], "_valid": value[1]} if isinstance(value, tuple) else {"": value}
        for suffix, number in numbers.items():
            if name in ("norm", "retained"):
                metrics[f"capo/{name}_action{suffix}"] = number[ACTION]
                metrics[f"capo/{name}_args{suffix}"] = number[ARGS]
            else:
                metrics[f"capo/{name}{suffix}"] = number
    return metrics


def schedule_metrics(state: CapoState, probe: Probe, rollouts: Int[Array, ""]) -> dict[str, Array]:
    """Where CAPO's schedule stands after the step, and what the step's probe read."""
    return {
        "capo/active": state.active,
        "capo/refreshes": state.refreshes,
        "capo/age": state.age,
        "capo/probed_rollouts": rollouts,
        "capo/probed_rollouts_total": state.rollouts,
        "capo/probed_action": probe.tokens[ACTION].max(),
        "capo/probed_args": probe.tokens[ARGS].max(),
        "capo/probe_dropped": probe.dropped,
    }
