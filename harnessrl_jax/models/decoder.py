"""Tokens and positions -> hidden states and logits: the decoder as one Flax linen module."""

import flax.linen as nn
import jax
from jaxtyping import Array, Float, Int

from harnessrl_jax.attention import Implementation, TilePlan, TreeMask
from harnessrl_jax.models.config import DecoderConfig
from harnessrl_jax.models.layers import Layer, RMSNorm, embedding_init, rotary_angles

KEPT_BY_REMAT = ("attention_out", "attention_logsum")


class Decoder(nn.Module):
    """Embedding, layers, final norm, output projection. Every method is pure in its parameters."""

    config: DecoderConfig
    implementation: Implementation = "blockwise"
    remat: bool = False

    def setup(self) -> None:
        """Creates the sub-modules; their names are the parameter names."""
        c = self.config
        policy = jax.checkpoint_policies.save_only_these_names(*KEPT_BY_REMAT)
        layer = nn.remat(Layer, policy=policy) if self.remat else Layer
        self.embed = nn.Embed(c.vocab_size, c.hidden_size, embedding_init=embedding_init())
        self.layers = [layer(c, self.implementation) for _ in range(c.layers)]
        self.final_norm = RMSNorm(c.rms_eps)
        if not c.tie_embeddings:
            self.lm_head = nn.Dense(c.vocab_size, use_bias=False)

    def __call__(
        self, token: Int[Array, " slot"], position: Int[Array, " slot"], mask: TreeMask, plan: TilePlan | None = None
    ) -> Float[Array, "slot vocab"]:
        """Logits of every slot of one row: small inputs only, and for creating the parameters."""
        return self.logits(self.row(token, position, mask, plan))

    def row(
        self, token: Int[Array, " slot"], position: Int[Array, " slot"], mask: TreeMask, plan: TilePlan | None
    ) -> Float[Array, "slot hidden"]:
        """Normed hidden states of one packed row."""
        rotary = rotary_angles(position, self.config.head_dim, self.config.rope_theta)
        x = self.embed(token)
        for layer in self.layers:
            x = layer(x, rotary, mask, plan)
        return self.final_norm(x)

    def extend(
        self, token: Int[Array, "slot new"], position: Int[Array, "slot new"], cache: tuple
    ) -> tuple[Float[Array, "slot new hidden"], tuple]:
        """Normed hidden states of new tokens, and the per-layer (key, value) caches that now hold them."""
        rotary = rotary_angles(position, self.config.head_dim, self.config.rope_theta)
        x = self.embed(token)
        filled = []
        for layer, old in zip(self.layers, cache, strict=True):
            x, new = layer.extend(x, rotary, position, old)
            filled.append(new)
        return self.final_norm(x), tuple(filled)

    def logits(self, hidden: Float[Array, "*axes hidden"]) -> Float[Array, "*axes vocab"]:
        """The output projection."""
        return self.embed.attend(hidden) if self.config.tie_embeddings else self.lm_head(hidden)
