"""What is optimised, as values; (objective, model output, row) -> the summed loss of the row's targets."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from harnessrl_jax.capo import Capo
from harnessrl_jax.losses import Sum, clipped_surrogate, cross_entropy
from harnessrl_jax.training.rows import Row, RowOutput


@dataclasses.dataclass(frozen=True, kw_only=True)
class Supervised:
    """Cross-entropy over every target, whatever its role; advantages and behaviour log-probs are not read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Clipped policy gradient over every target, or routed by role."""

    clip_low: float
    clip_high: float
    capo: Capo | None
    """None is the plain gradient."""


Objective = Supervised | Policy


def capo_of(objective: Objective) -> Capo | None:
    """How the objective routes its gradients, if it does."""
    return objective.capo if isinstance(objective, Policy) else None


def roles_of(objective: Objective) -> int:
    """How many losses the objective keeps apart."""
    capo = capo_of(objective)
    return capo.roles if capo else 1


def behaviour_logp(output: RowOutput, row: Row) -> Float[Array, " target"]:
    """The sampler's log-probs; where it reported none, the current ones without gradient.

    The ratio there is 1 and its gradient that of log π: on-policy REINFORCE. The placeholder is never read.
    """
    return jnp.where(row.has_logp, row.logp_behaviour, lax.stop_gradient(output.logp))


def row_loss(objective: Objective, output: RowOutput, row: Row, weight: Float[Array, " target"]) -> Sum:
    """The loss of the targets of one row that `weight` selects."""
    if isinstance(objective, Supervised):
        return cross_entropy(output.logp, weight)
    return clipped_surrogate(
        output.logp,
        behaviour_logp(output, row),
        row.advantage,
        weight,
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
    )
