"""New tokens of every slot and their key-value cache -> hidden states and the longer cache."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from harnessrl_jax.errors import ModelError
from harnessrl_jax.models.config import DecoderConfig
from harnessrl_jax.models.decoder import Decoder
from harnessrl_jax.models.rows import Params

MOST_EXPERTS = 256


class KVCache(NamedTuple):
    """What every slot remembers of its tokens: one array a layer."""

    k: tuple[Float[Array, "slot kv length dim"], ...]  # rotated
    v: tuple[Float[Array, "slot kv length dim"], ...]
    experts: tuple[UInt8[Array, "slot length active"], ...] = ()  # that each token went to; of a mixture


def init_cache(config: DecoderConfig, slots: int, length: int, dtype: jnp.dtype | type = jnp.float32) -> KVCache:
    """An empty cache for `slots` sequences of at most `length` tokens.

    Raises:
      ModelError: a mixture of more than 256 experts, whose numbers do not fit a byte.
    """
    shape = (slots, config.kv_heads, length, config.head_dim)
    zeros = lambda shape, dtype: tuple(jnp.zeros(shape, dtype) for _ in range(config.layers))
    keys, values = zeros(shape, dtype), zeros(shape, dtype)
    if config.experts is None:
        return KVCache(keys, values)
    if config.experts.count > MOST_EXPERTS:
        raise ModelError(
            f"init_cache: {config.experts.count} experts; the choices are kept as bytes, so at most {MOST_EXPERTS}."
        )
    return KVCache(keys, values, zeros((slots, length, config.experts.active), jnp.uint8))


def extend(
    config: DecoderConfig,
    params: Params,
    token: Int[Array, "row new"],
    position: Int[Array, " row"],
    cache: KVCache,
    slot: Int[Array, " row"] | None = None,
) -> tuple[Float[Array, "row new hidden"], KVCache]:
    """Runs new tokens: chunks of prompts, or one token of every slot in decoding.

    Keys and values of token i of row b are written at `position[b] + i`, then it attends to everything of its slot
    at or below that place; whatever the cache holds beyond is never read. For one shape, the result of a row depends,
    to the bit, on its tokens and those before them in its slot alone.

    Args:
      config: sizes.
      params: as from `init_params`.
      token: ids of the new tokens; padding tokens at the end only write beyond what counts.
      position: depth of the first new token of each row.
      cache: earlier keys and values. Donate it under `jax.jit` so that it is updated in place.
      slot: the slot of each row; None: row i is of slot i. Rows of one slot hold different tokens: all are written
        before any is read, so one may follow another. A row beyond the slots is computed and written nowhere.

    Returns:
      Normed hidden states of the new tokens, and the cache. Tokens beyond the cache's length are not written. What
      `experts` holds of a slot is what `row_hidden(experts=...)` replays.
    """
    place = position[:, None] + jnp.arange(token.shape[1], dtype=position.dtype)[None, :]
    layers = tuple(zip(cache.k, cache.v, strict=True))
    kept = ["experts"] if config.experts else []
    result: Any = Decoder(config).apply({"params": params}, token, place, layers, slot, method="extend", mutable=kept)
    (hidden, filled), sown = result
    keys, values = zip(*filled, strict=True)
    of = (jnp.arange(token.shape[0]) if slot is None else slot)[:, None]
    experts = tuple(
        old.at[of, place].set(jax.tree.leaves(sown["experts"][f"layers_{i}"])[0].astype(old.dtype))
        for i, old in enumerate(cache.experts)
    )
    return hidden, KVCache(tuple(keys), tuple(values), experts)
