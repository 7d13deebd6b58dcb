"""Tokens and positions -> hidden states and logits: the decoder as one Flax linen module."""

from collections.abc import Mapping
from typing import Literal

import flax.linen as nn
import jax
from jaxtyping import Array, Float, Int

from harnessrl_jax.attention import Implementation, TilePlan, TreeMask
from harnessrl_jax.errors import ModelError
from harnessrl_jax.models.config import DecoderConfig
from harnessrl_jax.models.initial import embedding_init
from harnessrl_jax.models.layers import Layer
from harnessrl_jax.models.norm import RMSNorm
from harnessrl_jax.models.rotary import rotary_angles

Remat = Literal["none", "attention", "dots", "full"]
"""What the backward pass computes again: nothing; all but the attention's output; all but that and the projections;
everything but the inputs of the layers. In this order less memory and more time, `dots` lies between the first two."""
Plans = Mapping[int | None, TilePlan]
"""The tile plan of every window that some layer has; None is the key of layers without one."""

_ATTENTION = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_logsum")
# Products without a batch axis are the projections; the scores of dense attention have one and are not kept.
_DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
_POLICIES = {
    "attention": _ATTENTION,
    "dots": jax.checkpoint_policies.save_from_both_policies(_DOTS, _ATTENTION),
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Decoder(nn.Module):
    """Embedding, layers, final norm, output projection. Every method is pure in its parameters."""

    config: DecoderConfig
    implementation: Implementation = "blockwise"
    remat: Remat = "none"

    def setup(self) -> None:
        """Creates the sub-modules; their names are the parameter names."""
        c = self.config
        layer = Layer if self.remat == "none" else nn.remat(Layer, policy=_POLICIES[self.remat])
        self.embed = nn.Embed(c.vocab_size, c.hidden_size, embedding_init=embedding_init())
        self.layers = [layer(c, self.implementation, c.window(i)) for i in range(c.layers)]
        self.final_norm = RMSNorm(c.rms_eps)
        if not c.tie_embeddings:
            self.lm_head = nn.Dense(c.vocab_size, use_bias=False)

    def __call__(
        self, token: Int[Array, " slot"], position: Int[Array, " slot"], mask: TreeMask, plans: Plans | None = None
    ) -> Float[Array, "slot vocab"]:
        """Logits of every slot of one row: small inputs only, and for creating the parameters."""
        return self.logits(self.row(token, position, mask, plans))

    def row(
        self,
        token: Int[Array, " slot"],
        position: Int[Array, " slot"],
        mask: TreeMask,
        plans: Plans | None,
        experts: Int[Array, "slot layer active"] | None = None,
    ) -> Float[Array, "slot hidden"]:
        """Normed hidden states of one packed row; `experts` replays the choices of every layer's router.

        Raises:
          ModelError: `experts` for a dense decoder, or of another shape.
        """
        if experts is not None:
            _check_experts(self.config, experts)
        rotary = rotary_angles(self.config, position)
        x = self.embed(token)
        for i, layer in enumerate(self.layers):
            plan = plans[self.config.window(i)] if plans else None
            x = layer(x, rotary, mask, plan, None if experts is None else experts[:, i])
        return self.final_norm(x)

    def extend(
        self,
        token: Int[Array, "row new"],
        position: Int[Array, "row new"],
        cache: tuple,
        slot: Int[Array, " row"] | None = None,
    ) -> tuple[Float[Array, "row new hidden"], tuple]:
        """Normed hidden states of new tokens, and the per-layer (key, value) caches that now hold them."""
        rotary = rotary_angles(self.config, position)
        x = self.embed(token)
        filled = []
        for layer, old in zip(self.layers, cache, strict=True):
            x, new = layer.extend(x, rotary, position, old, slot)
            filled.append(new)
        return self.final_norm(x), tuple(filled)

    def logits(self, hidden: Float[Array, "*axes hidden"]) -> Float[Array, "*axes vocab"]:
        """The output projection."""
        return self.embed.attend(hidden) if self.config.tie_embeddings else self.lm_head(hidden)


def _check_experts(config: DecoderConfig, experts: Array) -> None:
    if config.experts is None:
        raise ModelError("A row replays experts, but the configuration has none. Leave them out.")
    wanted = (config.layers, config.experts.active)
    if experts.shape[1:] != wanted:
        raise ModelError(
            f"A row's experts is {list(experts.shape)}, wanted [slots, {wanted[0]}, {wanted[1]}]. Replay what a model "
            "of this configuration recorded."
        )
