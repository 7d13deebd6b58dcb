"""Hidden states and rotary angles -> hidden states: the layers of the decoder, as Flax linen modules."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from harnessrl_jax.attention import Implementation, TilePlan, TreeMask, tree_attention
from harnessrl_jax.models.cached import cached_attention
from harnessrl_jax.models.config import DecoderConfig

Rotary = tuple[Float[Array, "*axes half"], Float[Array, "*axes half"]]


def rotary_angles(position: Int[Array, "*axes"], head_dim: int, theta: float) -> Rotary:
    """Cosine and sine of the rotary embedding, f32, for the pairs (i, i + head_dim / 2) as in Hugging Face.

    Args:
      position: depth of each token in its own sequence.
      head_dim: even width of a head.
      theta: base of the frequencies.

    Returns:
      Cosine and sine, one per pair.

    References:
      Su et al. 2021, https://arxiv.org/abs/2104.09864
    """
    frequency = theta ** -(jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = jnp.expand_dims(position.astype(jnp.float32), -1) * frequency.reshape((1,) * position.ndim + (-1,))
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Float[Array, "*axes head dim"], rotary: Rotary) -> Float[Array, "*axes head dim"]:
    """Turns the pairs (i, i + dim / 2) of every head by the token's angles."""
    cos, sin = (jnp.expand_dims(part, -2).astype(x.dtype) for part in rotary)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * scale, computed in at least f32."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*axes hidden"]) -> Float[Array, "*axes hidden"]:
        """Normalises the last axis."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        normed = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.eps)
        return normed.astype(x.dtype) * scale.reshape((1,) * (x.ndim - 1) + (-1,))


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; over a packed row or over a key-value cache."""

    config: DecoderConfig
    implementation: Implementation

    def setup(self) -> None:
        """Creates the sub-modules; their names are the parameter names."""
        c = self.config
        self.q = nn.Dense(c.heads * c.head_dim, use_bias=c.qkv_bias)
        self.k = nn.Dense(c.kv_heads * c.head_dim, use_bias=c.qkv_bias)
        self.v = nn.Dense(c.kv_heads * c.head_dim, use_bias=c.qkv_bias)
        self.o = nn.Dense(c.hidden_size, use_bias=False, kernel_init=residual_init(c.layers))

    def project(self, x: Float[Array, "*axes hidden"], rotary: Rotary) -> tuple[Array, Array, Array]:
        """Queries, keys (both rotated) and values, each [*axes, heads, head_dim]."""
        split = lambda y: y.reshape(*x.shape[:-1], -1, self.config.head_dim)
        return rotate(split(self.q(x)), rotary), rotate(split(self.k(x)), rotary), split(self.v(x))

    def __call__(
        self, x: Float[Array, "slot hidden"], rotary: Rotary, mask: TreeMask, plan: TilePlan | None
    ) -> Float[Array, "slot hidden"]:
        """Attention inside one packed row."""
        heads = self.mix(*self.project(x, rotary), mask, plan).reshape(x.shape[0], -1)
        self.sow("heads", "activation", heads)
        return self.o(heads)

    def mix(self, q: Array, k: Array, v: Array, mask: TreeMask, plan: TilePlan | None) -> Array:
        """The part without parameters: values of the row, mixed per head."""
        return tree_attention(q, k, v, mask, plan, implementation=self.implementation)

    def extend(
        self, x: Float[Array, "slot new hidden"], rotary: Rotary, position: Int[Array, "slot new"], cache: tuple
    ) -> tuple[Float[Array, "slot new hidden"], tuple]:
        """Writes the new keys and values at `position`, then attends to everything up to it."""
        q, k, v = self.project(x, rotary)
        slot = jnp.arange(x.shape[0])[:, None]
        write = lambda old, new: old.at[slot, :, position].set(new.astype(old.dtype), unique_indices=True)
        k, v = write(cache[0], k), write(cache[1], v)
        return self.o(cached_attention(q, k, v, position).reshape(*x.shape[:-1], -1)), (k, v)


class Mlp(nn.Module):
    """Gated MLP: down(silu(gate(x)) * up(x)). Collections `gate`, `up` and `hidden` (the input of `down`) are sown."""

    config: DecoderConfig

    def setup(self) -> None:
        """Creates the sub-modules; their names are the parameter names."""
        c = self.config
        self.gate = nn.Dense(c.mlp_size, use_bias=False)
        self.up = nn.Dense(c.mlp_size, use_bias=False)
        self.down = nn.Dense(c.hidden_size, use_bias=False, kernel_init=residual_init(c.layers))

    def __call__(self, x: Float[Array, "*axes hidden"]) -> Float[Array, "*axes hidden"]:
        """Applies the MLP to every token alone."""
        gate, up = self.gate(x), self.up(x)
        hidden = nn.silu(gate) * up
        for name, value in (("gate", gate), ("up", up), ("hidden", hidden)):
            self.sow(name, "activation", value)
        return self.down(hidden)


class Layer(nn.Module):
    """One decoder layer: attention and MLP, each after a norm and added to the residual stream."""

    config: DecoderConfig
    implementation: Implementation

    def setup(self) -> None:
        """Creates the sub-modules; their names are the parameter names."""
        self.input_norm = RMSNorm(self.config.rms_eps)
        self.attn = Attention(self.config, self.implementation)
        self.post_norm = RMSNorm(self.config.rms_eps)
        self.mlp = Mlp(self.config)

    def __call__(
        self, x: Float[Array, "slot hidden"], rotary: Rotary, mask: TreeMask, plan: TilePlan | None
    ) -> Float[Array, "slot hidden"]:
        """The layer over one packed row."""
        x = x + self.attn(self.input_norm(x), rotary, mask, plan)
        x = x + self.mlp(self.post_norm(x))
        self.sow("residual", "activation", x)
        return x

    def extend(
        self, x: Float[Array, "slot new hidden"], rotary: Rotary, position: Int[Array, "slot new"], cache: tuple
    ) -> tuple[Float[Array, "slot new hidden"], tuple]:
        """The layer over new tokens of every slot, with their cache."""
        out, cache = self.attn.extend(self.input_norm(x), rotary, position, cache)
        x = x + out
        return x + self.mlp(self.post_norm(x)), cache


def embedding_init() -> nn.initializers.Initializer:
    """Normal, 0.1: the residual stream starts as the token.

    With 0.02 the first layers' random outputs drown it, and a small model learns to copy names several times later.
    """
    return nn.initializers.normal(0.1)


def residual_init(layers: int) -> nn.initializers.Initializer:
    """Normal, 0.02 / sqrt(2 * layers), for matrices that write to the residual stream (two a layer), as in GPT-2."""
    return nn.initializers.normal(0.02 / (2 * layers) ** 0.5)
