"""Who wrote each token -> loss weights that train one author."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from harnessrl_jax.losses.segments import segment_sum


def authored_weight(
    weight: Float[Array, " target"], author: Int[Array, " target"], *, trained: int
) -> Float[Array, " target"]:
    """The weight where `author` is the trained one, 0 elsewhere.

    In tandem rollouts a trained senior and a frozen junior take turns in one conversation and share its reward: the
    junior's tokens are context, and a loss on them would train tokens that another policy sampled. What the weights
    do not cover is never read by a loss. The same mask leaves out frozen workers.

    Args:
      weight: share of each target in the loss, at least 0.
      author: number of the policy that sampled each target.
      trained: number of the policy that is trained.

    References:
      Tandem RL, https://arxiv.org/abs/2606.28166
    """
    return jnp.where(author == trained, weight, 0)


def keep_segment_weight(
    weight: Float[Array, " target"], kept: Bool[Array, " target"], segment: Int[Array, " target"]
) -> Float[Array, " target"]:
    """0 for targets that are not kept; their weight goes to the kept ones of the same segment, in proportion.

        w'_t = kept_t w_t Σ_u w_u / Σ_u kept_u w_u          over the targets u of t's segment

    Use it where dropped tokens should not make their rollout count less, as for a mean over the tokens that the
    trained author wrote. A segment of which nothing is kept loses its weight.

    Args:
      weight: share of each target in the loss, at least 0.
      kept: the targets that stay.
      segment: id of the call or rollout of each target, which must lie in this row whole.
    """
    counted = weight > 0
    stays = counted & kept
    total = segment_sum(weight, segment, counted)
    left = segment_sum(weight * kept, segment, counted)
    return jnp.where(stays, weight * total / jnp.where(stays, left, 1), 0)
