"""Queries, keys, values and a tree mask -> attention output, through the full score matrix: the oracle."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from harnessrl_jax.attention.mask import TreeMask, visible

MASKED = -1e30  # finite, so that a row without any visible key gives 0 and not NaN


def dense_attention(
    q: Float[Array, "query head dim"],
    k: Float[Array, "key kv dim"],
    v: Float[Array, "key kv dim"],
    mask: TreeMask,
    *,
    scale: float,
) -> Float[Array, "query head dim"]:
    """Softmax attention with grouped key-value heads: O(query * key) memory, differentiated by JAX.

    Args:
      q: queries; head h reads key-value head h // (heads / kv heads).
      k: keys.
      v: values.
      mask: which key each query sees. A query that sees none gets 0.
      scale: factor of the scores.

    Returns:
      The attention output, in the type of `q`.
    """
    queries, heads, dim = q.shape
    kv = k.shape[1]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    grouped = (q * scale).reshape(queries, kv, heads // kv, dim)
    scores = jnp.einsum("nkgd,mkd->kgnm", grouped, k, preferred_element_type=wide)
    seen = jnp.broadcast_to(visible(mask), scores.shape)
    scores = jnp.where(seen, scores, MASKED)
    weights = jnp.where(seen, jnp.exp(scores - scores.max(-1, keepdims=True)), 0.0)
    total = weights.sum(-1, keepdims=True)
    weights = weights / jnp.where(total > 0.0, total, 1.0)
    out = jnp.einsum("kgnm,mkd->nkgd", weights.astype(v.dtype), v)
    return out.reshape(queries, heads, dim).astype(q.dtype)
