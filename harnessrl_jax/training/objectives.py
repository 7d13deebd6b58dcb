"""What is optimised, as values; (objective, model output, row) -> the summed loss of the row's targets."""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from harnessrl_jax.capo import Capo
from harnessrl_jax.errors import LossError
from harnessrl_jax.losses import (
    RatioTerms,
    Sum,
    cispo,
    clipped_surrogate,
    clipped_value_loss,
    cross_entropy,
    dual_clipped_surrogate,
    gspo_token,
    masked_importance,
    masked_log_ratio,
    ratio_terms,
    reinforce,
    truncated_importance,
    value_loss,
)
from harnessrl_jax.training.rows import Row, RowOutput


@dataclasses.dataclass(frozen=True, kw_only=True)
class Supervised:
    """Cross-entropy over every target, whatever its role; advantages and behaviour log-probs are not read."""


@dataclasses.dataclass(frozen=True)
class Clipped:
    """Each token's own clipped ratio."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DualClipped:
    """Each token's own clipped ratio; a loss from a negative advantage grows no further above `dual_clip`."""

    dual_clip: float


Sequence = Literal["call", "row", "rollout"]
"""Which targets share a ratio. By row the loss depends on packing: for batches of one sequence a row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gspo:
    """One clipped ratio for each sequence: the geometric mean over its targets, wherever in the batch they lie."""

    sequence: Sequence


@dataclasses.dataclass(frozen=True)
class Cispo:
    """Each token's own ratio as a clipped importance weight; every token keeps its gradient."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reinforce:
    """No clip. What the sampler's policy differs by is corrected by an importance weight of each token, or not at all.

    The weight takes the place of the ratio to the sampler in the other losses: with both, it would count twice.
    """

    importance: Literal["none", "truncated", "masked"]
    """`truncated`: min(ρ, limit). `masked`: ρ, or 0 outside [1/limit, limit]."""
    limit: float


PolicyLoss = Clipped | DualClipped | Gspo | Cispo | Reinforce


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Policy gradient over every target, or routed by role."""

    clip_low: float
    clip_high: float
    """Both are read by every loss but `Reinforce`."""
    capo: Capo | None
    """None is the plain gradient."""
    loss: PolicyLoss = Clipped()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Critic:
    """Regression of the predicted values on the batch's returns. Alone it is a critic's warm start."""

    clip: float | None
    """ε of `clipped_value_loss`, in units of reward; None is the squared error of `value_loss`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorCritic:
    """PPO with a critic: L = L_policy + coefficient · L_value, both over the same targets with the same weights.

    Under CAPO that holds for each role, so values are learnt on the targets that some role trains. The value head is a
    parameter that no unit owns.
    """

    policy: Policy
    critic: Critic
    coefficient: float

    def __post_init__(self):
        if not 0 <= self.coefficient < math.inf:
            raise LossError(f"ActorCritic: coefficient must be finite and at least 0, got {self.coefficient}")
        if self.policy.capo and self.policy.capo.ungated == "frozen":
            raise LossError(
                "ActorCritic: capo.ungated = 'frozen' would freeze the value head, which no unit owns; "
                "use ungated = 'sum', or train the critic in a step of its own with the objective Critic"
            )


Objective = Supervised | Policy | Critic | ActorCritic


def policy_of(objective: Objective) -> Policy | None:
    """The policy gradient in the objective, if there is one."""
    match objective:
        case Policy():
            return objective
        case ActorCritic():
            return objective.policy
        case Supervised() | Critic():
            return None


def critic_of(objective: Objective) -> Critic | None:
    """The critic's loss in the objective, if there is one."""
    match objective:
        case Critic():
            return objective
        case ActorCritic():
            return objective.critic
        case Supervised() | Policy():
            return None


def capo_of(objective: Objective) -> Capo | None:
    """How the objective routes its gradients, if it does."""
    policy = policy_of(objective)
    return policy.capo if policy else None


def roles_of(objective: Objective) -> int:
    """How many losses the objective keeps apart."""
    capo = capo_of(objective)
    return capo.roles if capo else 1


def sequence_of(objective: Objective) -> Sequence | None:
    """Whose ratios `row_loss` reads in `Row.sequence_log_ratio`, which takes a forward pass over the batch before."""
    policy = policy_of(objective)
    return policy.loss.sequence if policy and isinstance(policy.loss, Gspo) else None


def behaviour_logp(output: RowOutput, row: Row) -> Float[Array, " target"]:
    """The sampler's log-probs; where it reported none, the current ones without gradient.

    The ratio there is 1 and its gradient that of log π: on-policy REINFORCE. The placeholder is never read.
    """
    return jnp.where(row.has_logp, row.logp_behaviour, lax.stop_gradient(output.logp))


def row_loss(objective: Objective, output: RowOutput, row: Row, weight: Float[Array, " target"]) -> Sum:
    """The loss of the targets of one row that `weight` selects.

    The gradient at a target is its own: it does not depend on which others `weight` selects.

    Raises:
      LossError: the model's output or the row lacks what the objective reads.
    """
    match objective:
        case Supervised():
            return cross_entropy(output.logp, weight)
        case Policy():
            return _policy_loss(objective, output, row, weight)
        case Critic():
            return critic_loss(objective, output, row, weight)
        case ActorCritic():
            actor = _policy_loss(objective.policy, output, row, weight)
            critic = critic_loss(objective.critic, output, row, weight)
            return actor._replace(total=actor.total + objective.coefficient * critic.total)


def critic_loss(critic: Critic, output: RowOutput, row: Row, weight: Float[Array, " target"]) -> Sum:
    """The value loss of the targets of one row that `weight` selects; nothing is read of the others."""
    value, target_return = value_and_return(output, row)
    if critic.clip is None:
        return value_loss(value, target_return, weight)
    if isinstance(row.value_behaviour, tuple):
        raise LossError("row_loss: a Critic with a clip needs the values before; use trajectories.with_values")
    return clipped_value_loss(value, row.value_behaviour, target_return, weight, clip=critic.clip)


def value_and_return(output: RowOutput, row: Row) -> tuple[Float[Array, " target"], Float[Array, " target"]]:
    """What the critic says of each target, and what it should say.

    Raises:
      LossError: the row function gives no values, or the batch has no returns.
    """
    if isinstance(output.value, tuple):
        raise LossError(
            "row_loss: a Critic needs values, and the row function gives none; wrap it in critic_row_fn and put "
            "init_value_head(config) into the parameters as 'value_head'"
        )
    if isinstance(row.target_return, tuple):
        raise LossError("row_loss: a Critic needs returns, and this batch has none; use trajectories.with_values")
    return output.value, row.target_return


def _policy_loss(objective: Policy, output: RowOutput, row: Row, weight: Float[Array, " target"]) -> Sum:
    behaviour = behaviour_logp(output, row)
    clip = {"clip_low": objective.clip_low, "clip_high": objective.clip_high}
    match objective.loss:
        case Clipped():
            return clipped_surrogate(output.logp, behaviour, row.advantage, weight, **clip)
        case DualClipped(dual_clip=limit):
            return dual_clipped_surrogate(output.logp, behaviour, row.advantage, weight, dual_clip=limit, **clip)
        case Gspo():
            return gspo_token(output.logp, sequence_log_ratio(row), row.advantage, weight, **clip)
        case Cispo():
            return cispo(output.logp, behaviour, row.advantage, weight, **clip)
        case Reinforce() as loss:
            return reinforce(output.logp, _importance(loss, output, behaviour, weight) * row.advantage, weight)


def loss_terms(objective: Policy, output: RowOutput, row: Row, weight: Float[Array, " target"]) -> RatioTerms:
    """Each target's ratio to the sampler, and in `cut` whether the loss's own clip acts on it."""
    behaviour = behaviour_logp(output, row)
    clip = {"clip_low": objective.clip_low, "clip_high": objective.clip_high}
    terms = ratio_terms(output.logp, behaviour, row.advantage, weight, **clip)
    match objective.loss:
        case Clipped() | DualClipped():
            return terms
        case Gspo():
            ratio = sequence_log_ratio(row)
            return terms._replace(cut=ratio_terms(ratio, jnp.zeros_like(ratio), row.advantage, weight, **clip).cut)
        case Cispo():
            inside = (terms.ratio >= 1 - objective.clip_low) & (terms.ratio <= 1 + objective.clip_high)
            return terms._replace(cut=((weight > 0) & ~inside).astype(terms.cut.dtype))
        case Reinforce() as loss:
            changed = _importance(loss, output, behaviour, weight) != terms.ratio
            acts = (weight > 0) & changed & (loss.importance != "none")
            return terms._replace(cut=acts.astype(terms.cut.dtype))


def sequence_log_ratio(row: Row) -> Float[Array, " target"]:
    """The log-ratio of each target's sequence.

    Raises:
      LossError: the row holds none.
    """
    if isinstance(row.sequence_log_ratio, tuple):
        raise LossError(
            "row_loss: Gspo needs the ratios of whole sequences, and this row has none; use with_sequence_ratios"
        )
    return row.sequence_log_ratio


def _importance(
    loss: Reinforce, output: RowOutput, behaviour: Float[Array, " target"], weight: Float[Array, " target"]
) -> Float[Array, " target"]:
    counted = weight > 0
    log_ratio = masked_log_ratio(output.logp, behaviour, counted)
    match loss.importance:
        case "none":
            return jnp.ones_like(log_ratio)
        case "truncated":
            return truncated_importance(log_ratio, counted, limit=loss.limit)
        case "masked":
            return masked_importance(log_ratio, counted, low=1 / loss.limit, high=loss.limit)
