"""Hidden states and rotary angles -> attention output: projections around the mixing of values, as a linen module."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from harnessrl_jax.attention import Implementation, TilePlan, TreeMask, tree_attention
from harnessrl_jax.models.cached import cached_attention
from harnessrl_jax.models.config import DecoderConfig
from harnessrl_jax.models.initial import residual_init
from harnessrl_jax.models.norm import RMSNorm
from harnessrl_jax.models.rotary import Rotary, rotate


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; over a packed row or over a key-value cache."""

    config: DecoderConfig
    implementation: Implementation
    window: int | None

    def setup(self) -> None:
        """Creates the sub-modules; their names are the parameter names."""
        c = self.config
        self.q = nn.Dense(c.heads * c.head_dim, use_bias=c.qkv_bias)
        self.k = nn.Dense(c.kv_heads * c.head_dim, use_bias=c.qkv_bias)
        self.v = nn.Dense(c.kv_heads * c.head_dim, use_bias=c.qkv_bias)
        self.o = nn.Dense(c.hidden_size, use_bias=c.output_bias, kernel_init=residual_init(c.layers))
        if c.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(c.rms_eps), RMSNorm(c.rms_eps)
        self.sinks = self.param("sinks", nn.initializers.zeros, (c.heads,)) if c.sinks else None

    def project(self, x: Float[Array, "*axes hidden"], rotary: Rotary) -> tuple[Array, Array, Array]:
        """Rotated queries and keys, normed before where the model does so, and values; [*axes, heads, head_dim]."""
        split = lambda y: y.reshape(*x.shape[:-1], -1, self.config.head_dim)
        q, k = split(self.q(x)), split(self.k(x))
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, rotary), rotate(k, rotary), split(self.v(x))

    def __call__(
        self, x: Float[Array, "slot hidden"], rotary: Rotary, mask: TreeMask, plan: TilePlan | None
    ) -> Float[Array, "slot hidden"]:
        """Attention inside one packed row."""
        heads = self.mix(*self.project(x, rotary), self.sinks, mask, plan).reshape(x.shape[0], -1)
        self.sow("heads", "activation", heads)
        return self.o(heads)

    def mix(self, q: Array, k: Array, v: Array, sinks: Array | None, mask: TreeMask, plan: TilePlan | None) -> Array:
        """The part that reads no parameter of the module: values of the row, mixed per head."""
        how = {"window": self.window, "sinks": sinks, "implementation": self.implementation}
        return tree_attention(q, k, v, mask, plan, **how)

    def extend(
        self,
        x: Float[Array, "row new hidden"],
        rotary: Rotary,
        position: Int[Array, "row new"],
        cache: tuple,
        slot: Int[Array, " row"] | None,
    ) -> tuple[Float[Array, "row new hidden"], tuple]:
        """Writes the new keys and values at `position`, then attends to everything up to it."""
        q, k, v = self.project(x, rotary)
        place = (jnp.arange(x.shape[0]) if slot is None else slot)[:, None]
        write = lambda old, new: old.at[place, :, position].set(new.astype(old.dtype), unique_indices=True)
        k, v = write(cache[0], k), write(cache[1], v)
        heads = cached_attention(q, k, v, position, slot=slot, window=self.window, sinks=self.sinks)
        return self.o(heads.reshape(*x.shape[:-1], -1)), (k, v)
