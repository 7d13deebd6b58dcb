"""Stored rollouts with returns -> a baseline, sampling probabilities and a weighted imitation loss."""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from harnessrl_jax.errors import LossError
from harnessrl_jax.losses.sums import Sum, weighted_sum


def advantage_weighted_regression(
    logp: Float[Array, " target"],
    advantage: Float[Array, " target"],
    weight: Float[Array, " target"],
    *,
    temperature: float,
    limit: float,
) -> Sum:
    """Imitation of stored actions, the better ones more.

        L = -Σ_t w_t min(exp(A_t / β), C) logp_t

    The factor carries no gradient and does not count in the weight covered, so two stores with different returns are
    not brought to the same scale. Values of targets whose weight is 0 are never read.

    Args:
      logp: log π_θ(target | its ancestors) in nats.
      advantage: return of the target's rollout minus a baseline (`linear_baseline`), equal on all its targets.
      weight: share w_t of each target in the loss, at least 0; 0 is padding.
      temperature: β, above 0, in units of reward; large is plain cross-entropy.
      limit: C, largest factor, above 0; 20 in the paper's experiments.

    Returns:
      The summed loss and the weight it covers.

    Raises:
      LossError: `temperature` or `limit` is not above 0.

    References:
      Peng et al. 2019, algorithm 1, https://arxiv.org/abs/1910.00177
    """
    _positive("advantage_weighted_regression", temperature=temperature, limit=limit)
    credit = jnp.where(weight > 0, lax.stop_gradient(advantage), 0)
    factor = jnp.exp(jnp.minimum(credit / temperature, math.log(limit)))
    return weighted_sum(-factor * logp, weight)


def linear_baseline(
    feature: Float[Array, "rollout feature"],
    target_return: Float[Array, " rollout"],
    counted: Bool[Array, " rollout"],
) -> Float[Array, " rollout"]:
    """V(s_0) of each rollout: the least-squares fit of the returns on features of the first state, with a constant.

    `target_return - linear_baseline(...)` is the advantage for offline rollouts. Rollouts that are not counted are
    never read and get 0. Features that depend on each other are no problem: the fitted values are unique.

    Args:
      feature: numbers that describe the first state of each rollout, such as the task's kind and length.
      target_return: G of each rollout.
      counted: the rollouts to fit; False leaves one out.

    References:
      Hong et al. 2023 (advantage weighting), https://arxiv.org/abs/2306.13085
    """
    design = jnp.concatenate([feature, jnp.ones_like(feature[:, :1])], axis=1)
    design = jnp.where(counted[:, None], design, 0)
    solution, *_ = jnp.linalg.lstsq(design, jnp.where(counted, target_return, 0))
    return design @ solution


def return_probabilities(
    target_return: Float[Array, " rollout"], counted: Bool[Array, " rollout"], *, temperature: float
) -> Float[Array, " rollout"]:
    """Probabilities with which to draw stored rollouts for a batch: the better ones more often.

        P = softmax(Ĝ / α),   Ĝ = (G - min G) / (max G - min G), 0 where all are equal

    Draw with `jax.random.choice(key, len(P), (n,), p=P)`. Rollouts that are not counted are never read and get
    exactly 0, as do all of them where none is counted. Give advantages instead of returns to compare rollouts of
    tasks that are not equally hard.

    Args:
      target_return: G of each rollout.
      counted: the rollouts that may be drawn.
      temperature: α, above 0, relative to the range of the returns; 0.1 in the paper, large draws evenly.

    Raises:
      LossError: `temperature` is not above 0.

    References:
      Hong et al. 2023 (return weighting), https://arxiv.org/abs/2306.13085
    """
    _positive("return_probabilities", temperature=temperature)
    low = jnp.min(target_return, where=counted, initial=jnp.inf)
    span = jnp.max(target_return, where=counted, initial=-jnp.inf) - low
    # Distance from the best, so that the best has exp(0) at every temperature.
    below = jnp.where(counted & (span > 0), (target_return - low) / jnp.where(span > 0, span, 1) - 1, 0)
    share = jnp.where(counted, jnp.exp(below / temperature), 0)
    return share / jnp.where(counted.any(), share.sum(), 1)


def _positive(where: str, **values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise LossError(f"{where}: {name} must be above 0, got {value}.")
