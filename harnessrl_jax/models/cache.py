"""New tokens of every slot and their key-value cache -> hidden states and the longer cache."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from harnessrl_jax.models.config import DecoderConfig
from harnessrl_jax.models.decoder import Decoder
from harnessrl_jax.models.rows import Params


class KVCache(NamedTuple):
    """Rotated keys, and values, of every slot: one array a layer."""

    k: tuple[Float[Array, "slot kv length dim"], ...]
    v: tuple[Float[Array, "slot kv length dim"], ...]


def init_cache(config: DecoderConfig, slots: int, length: int, dtype: jnp.dtype | type = jnp.float32) -> KVCache:
    """An empty cache for `slots` sequences of at most `length` tokens."""
    shape = (slots, config.kv_heads, length, config.head_dim)
    zeros = lambda: tuple(jnp.zeros(shape, dtype) for _ in range(config.layers))
    return KVCache(k=zeros(), v=zeros())


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
      Normed hidden states of the new tokens, and the cache. Tokens beyond the cache's length are not written.
    """
    hidden, cache, _ = _extended(config, params, token, position, cache, [], slot)
    return hidden, cache


def extend_with_experts(
    config: DecoderConfig, params: Params, token: Int[Array, "slot new"], position: Int[Array, " slot"], cache: KVCache
) -> tuple[Float[Array, "slot new hidden"], KVCache, Int[Array, "slot new layer active"]]:
    """`extend` of a mixture, and the experts that every token went to: what `row_hidden(experts=...)` replays."""
    hidden, cache, sown = _extended(config, params, token, position, cache, ["experts"])
    chosen = [jax.tree.leaves(sown["experts"][f"layers_{i}"])[0] for i in range(config.layers)]
    return hidden, cache, jnp.stack(chosen, axis=2)


def _extended(
    config: DecoderConfig,
    params: Params,
    token: Array,
    position: Array,
    cache: KVCache,
    kept: list[str],
    slot: Array | None = None,
) -> tuple[Array, KVCache, Any]:
    place = position[:, None] + jnp.arange(token.shape[1], dtype=position.dtype)[None, :]
    layers = tuple(zip(cache.k, cache.v, strict=True))
    result: Any = Decoder(config).apply({"params": params}, token, place, layers, slot, method="extend", mutable=kept)
    (hidden, filled), sown = result
    keys, values = zip(*filled, strict=True)
    return hidden, KVCache(k=tuple(keys), v=tuple(values)), sown
