"""Hidden states -> an estimate of the return: a linear head beside the vocabulary projection."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from harnessrl_jax.models.config import DecoderConfig
from harnessrl_jax.models.rows import Params


def init_value_head(config: DecoderConfig) -> Params:
    """Parameters `kernel` [hidden, 1] and `bias` [1], all 0: the first estimate is 0, and it learns from there."""
    return {"kernel": jnp.zeros((config.hidden_size, 1)), "bias": jnp.zeros(1)}


def values(head: Params, hidden: Float[Array, "*axes hidden"]) -> Float[Array, "*axes"]:
    """The value of every hidden state that is given, at least f32.

    Args:
      head: as from `init_value_head`.
      hidden: normed states of the slots that predict the targets, `row_hidden(...)[0][source]`.
    """
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    return jnp.matmul(hidden.astype(wide), head["kernel"].astype(wide))[..., 0] + head["bias"].astype(wide)[0]
