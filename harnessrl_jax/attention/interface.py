"""One function for tree attention, whatever computes it."""

from typing import Literal

from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from harnessrl_jax.attention.dense import dense_attention
from harnessrl_jax.attention.mask import TreeMask
from harnessrl_jax.errors import ModelError

Implementation = Literal["dense"]


def tree_attention(
    q: Float[Array, "query head dim"],
    k: Float[Array, "key kv dim"],
    v: Float[Array, "key kv dim"],
    mask: TreeMask,
    plan: None = None,
    *,
    scale: float | None = None,
    implementation: Implementation = "dense",
) -> Float[Array, "query head dim"]:
    if q.shape[1] % k.shape[1]:
        raise ModelError("heads")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return checkpoint_name(dense_attention(q, k, v, mask, scale=scale), "attention_out")
