"""Hidden states and rotary angles -> hidden states: one layer of the decoder, as a Flax linen module."""

import flax.linen as nn
from jaxtyping import Array, Float, Int

from harnessrl_jax.attention import Implementation, TilePlan, TreeMask
from harnessrl_jax.models.config import DecoderConfig
from harnessrl_jax.models.mlp import Mixture, Mlp
from harnessrl_jax.models.norm import RMSNorm
from harnessrl_jax.models.rotary import Rotary
from harnessrl_jax.models.self_attention import Attention


class Layer(nn.Module):
    """One decoder layer: attention and MLP or experts, each after a norm and added to the residual stream."""

    config: DecoderConfig
    implementation: Implementation
    window: int | None

    def setup(self) -> None:
        """Creates the sub-modules; their names are the parameter names."""
        self.input_norm = RMSNorm(self.config.rms_eps)
        self.attn = Attention(self.config, self.implementation, self.window)
        self.post_norm = RMSNorm(self.config.rms_eps)
        if self.config.experts:
            self.experts = Mixture(self.config)
        else:
            self.mlp = Mlp(self.config)

    def __call__(
        self,
        x: Float[Array, "slot hidden"],
        rotary: Rotary,
        mask: TreeMask,
        plan: TilePlan | None,
        chosen: Int[Array, "slot active"] | None = None,
    ) -> Float[Array, "slot hidden"]:
        """The layer over one packed row; `chosen` as for `Mixture`."""
        x = x + self.attn(self.input_norm(x), rotary, mask, plan)
        x = x + self.feed_forward(self.post_norm(x), chosen)
        self.sow("residual", "activation", x)
        return x

    def feed_forward(self, x: Float[Array, "*axes hidden"], chosen: Int[Array, "*axes active"] | None) -> Array:
        """What each token computes alone."""
        return self.experts(x, chosen) if self.config.experts else self.mlp(x)

    def extend(
        self,
        x: Float[Array, "row new hidden"],
        rotary: Rotary,
        position: Int[Array, "row new"],
        cache: tuple,
        slot: Int[Array, " row"] | None,
    ) -> tuple[Float[Array, "row new hidden"], tuple]:
        """The layer over new tokens, with the cache of their slots."""
        out, cache = self.attn.extend(self.input_norm(x), rotary, position, cache, slot)
        x = x + out
        return x + self.feed_forward(self.post_norm(x), None), cache
