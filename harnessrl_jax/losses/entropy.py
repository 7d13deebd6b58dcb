"""Logits or entropies of one row -> the entropy bonus, as a loss."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from harnessrl_jax.losses.sums import Sum, weighted_sum


def entropy(logits: Float[Array, "target vocab"], mask: Bool[Array, " target"]) -> Float[Array, " target"]:
    """H = -Σ_v p_v log p_v of the softmax of each target's logits, in nats; from 0 to log(vocab).

    A logit of -inf is a token that cannot be sampled and adds nothing. 0 where `mask` is False, without reading the
    logits there.
    """
    logp = jax.nn.log_softmax(jnp.where(mask[:, None], logits, 0), axis=-1)
    # 0 log 0 = 0; the inner choice keeps its gradient from being 0 · inf.
    safe = jnp.where(jnp.isneginf(logp), 0, logp)
    return jnp.where(mask, -(jnp.exp(logp) * safe).sum(axis=-1), 0)


def entropy_loss(entropy: Float[Array, " target"], weight: Float[Array, " target"]) -> Sum:
    """L = -Σ_t w_t H_t in nats: less of it is more exploration. Entropies of targets whose weight is 0 are never read.

    Add it to a policy loss with a small factor. The gradient goes through `entropy`, which is the exact one over the
    vocabulary; the mean of -logp over samples has the right value but, as a loss, not its gradient.

    References:
      Mnih et al. 2016, section 4, https://arxiv.org/abs/1602.01783
    """
    return weighted_sum(-entropy, weight)
