"""New queries of every slot and the key-value cache -> attention output: the inner loop of prefill and decoding."""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

BLOCK = 128  # keys read at once; the cost follows the longest slot in steps of this
MASKED = -1e30
FLOOR = -1e29  # exp(MASKED - FLOOR) is exactly 0


def cached_attention(
    q: Float[Array, "row new head dim"],
    k: Float[Array, "slot kv length dim"],
    v: Float[Array, "slot kv length dim"],
    position: Int[Array, "row new"],
    *,
    slot: Int[Array, " row"] | None = None,
    window: int | None = None,
    sinks: Float[Array, " head"] | None = None,
) -> Float[Array, "row new head dim"]:
    """Attention of new tokens to the cached keys at or below their own position.

    Reads only the blocks of the cache that some row sees. A block that a row does not see leaves that row's running
    maximum, sum and output unchanged to the bit, so what a row gets does not depend on how long its neighbours are;
    nor on what the cache holds beyond its position, infinities and NaN included.

    Args:
      q: rotated queries, not scaled.
      k: rotated keys, the new ones already written.
      v: values, the new ones already written.
      position: place of each new token; consecutive along the second axis, at least 0.
      slot: the slot whose keys each row reads; None: row i reads slot i.
      window: tokens that a query sees, itself included; None: all.
      sinks: a score of each head that takes its share of the softmax and gives nothing.

    Returns:
      The output, in the type of `q`.
    """
    rows, new, heads, dim = q.shape
    kv, length = k.shape[1:3]
    group = heads // kv
    wide = jnp.promote_types(q.dtype, jnp.float32)
    queries = (q * dim**-0.5).reshape(rows, new, kv, group, dim).transpose(0, 2, 3, 1, 4)
    queries = queries.reshape(rows, kv, group * new, dim)
    last, limits = position[:, -1], jnp.tile(position, (1, group))
    oldest = jnp.zeros_like(limits) if window is None else limits - (window - 1)
    block = math.gcd(length, BLOCK) if math.gcd(length, BLOCK) >= 32 else length
    step = jnp.arange(block, dtype=position.dtype)

    def read(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, out = carry
        place = i * block + step
        keys, values = (_block(pool, slot, i * block, block) for pool in (k, v))
        used = place[None, :] <= last[:, None]
        values = jnp.where(used[:, None, :, None], values, 0)  # 0 * garbage is not always 0
        scores = _product(queries, keys, 3)
        seen = (oldest[:, :, None] <= place[None, None, :]) & (place[None, None, :] <= limits[:, :, None])
        scores = jnp.where(seen[:, None], scores, MASKED)
        new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
        weights = jnp.exp(scores - new_top)
        shrink = jnp.exp(top - new_top)
        total = total * shrink + weights.sum(-1, keepdims=True)
        return new_top, total, out * shrink + _product(weights.astype(v.dtype), values, 2)

    column = (rows, kv, group * new, 1)
    start = jnp.full(column, FLOOR, wide), jnp.zeros(column, wide), jnp.zeros(queries.shape, wide)
    if sinks is not None:  # as if a key of that score and value 0 had been read
        top = jnp.repeat(sinks.astype(wide).reshape(1, kv, group), new, axis=2)[..., None]
        start = jnp.broadcast_to(top, column), jnp.ones(column, wide), start[2]
    first = jnp.maximum(oldest.min(), 0) // block
    blocks = jnp.minimum(last.max() // block + 1, length // block)
    _, total, out = lax.fori_loop(first, blocks, read, start)
    out = (out / total).astype(q.dtype).reshape(rows, kv, group, new, dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)


def _block(
    pool: Float[Array, "slot kv length dim"], slot: Int[Array, " row"] | None, start: Array, size: int
) -> Float[Array, "row kv size dim"]:
    """Part of the cache of every row's slot."""
    if slot is None:
        return lax.dynamic_slice_in_dim(pool, start, size, axis=2)
    shape = (1, pool.shape[1], size, pool.shape[3])
    return jnp.concatenate([lax.dynamic_slice(pool, (one, 0, start, 0), shape) for one in jnp.unstack(slot)])


def _product(a: Array, b: Array, inner: int) -> Array:
    """Contracts the last axis of `a` with axis `inner` of `b`, per slot and key-value head, in at least f32."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return lax.dot_general(a, b, (((3,), (inner,)), ((0, 1), (0, 1))), preferred_element_type=wide)
