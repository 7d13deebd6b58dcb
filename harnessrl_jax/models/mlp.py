"""Hidden states -> hidden states, each token alone: the gated MLP, and a mixture of gated experts."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from harnessrl_jax.models.config import DecoderConfig
from harnessrl_jax.models.initial import residual_init

CLAMP = 7.0  # of gate and up in clamped experts
SLOPE = 1.702  # of the sigmoid there: x * sigmoid(SLOPE * x) is close to GELU
UNSEEN = -1e30  # finite, so that gradients of masked scores are 0 and not NaN


class ExpertUnits(NamedTuple):
    """Activations of the neurons of every expert, and which tokens each expert saw."""

    activation: Float[Array, "*axes expert unit"]
    routed: Bool[Array, "*axes expert"]
    """Activations of other tokens do not reach the layer's output."""


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


class Mixture(nn.Module):
    """A router and its experts.

    The collection `experts` gets the choices; `gate`, `up` and `hidden` (the input of `down`, before the router's
    weight) get `ExpertUnits`.

        out = Σ_e w_e expert_e(x),   w = softmax of the router's scores, over all experts or over the chosen ones

    Every expert is computed for every token and weighted, with 0 where it was not chosen: plain matrix products that
    any mesh can split, at count / active times the arithmetic of the chosen experts alone. Meant for small mixtures.
    """

    config: DecoderConfig

    def setup(self) -> None:
        """Creates the sub-modules; their names are the parameter names."""
        c, experts = self.config, self.config.experts
        assert experts is not None
        bias = experts.form == "clamped"
        inner = nn.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=0)
        self.router = nn.Dense(experts.count, use_bias=bias)
        self.gate = PerExpert((experts.count, c.hidden_size, c.mlp_size), bias, inner)
        self.up = PerExpert((experts.count, c.hidden_size, c.mlp_size), bias, inner)
        self.down = PerExpert((experts.count, c.mlp_size, c.hidden_size), bias, residual_init(c.layers))

    def __call__(
        self, x: Float[Array, "*axes hidden"], chosen: Int[Array, "*axes active"] | None = None
    ) -> Float[Array, "*axes hidden"]:
        """Applies the mixture to every token alone.

        Args:
          x: normed hidden states.
          chosen: the experts of each token, as the sampler recorded them; None: those with the best scores. Their
            weights are the present router's either way, and carry its gradient.
        """
        experts = self.config.experts
        assert experts is not None
        scores = self.router(x)
        scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
        chosen = jax.lax.top_k(scores, experts.active)[1] if chosen is None else chosen
        self.sow("experts", "activation", chosen)
        member = (chosen[..., None] == jnp.arange(experts.count).reshape((1,) * chosen.ndim + (-1,))).any(-2)
        among = jnp.where(member, scores, UNSEEN) if experts.renormalise else scores
        log_weight = jnp.where(member, scores - nn.logsumexp(among, axis=-1, keepdims=True), UNSEEN)
        weight = jnp.exp(log_weight).astype(x.dtype)
        gate, up = self.gate(x), self.up(x)
        hidden = nn.silu(gate) * up if experts.form == "silu" else _clamped(gate, up)
        for name, value in (("gate", gate), ("up", up), ("hidden", hidden)):
            self.sow(name, "activation", ExpertUnits(value, member))
        return self.down.weighted(hidden, weight)


class PerExpert(nn.Module):
    """A linear layer of every expert: kernel [expert, in, out], and a bias [expert, out] if asked for."""

    shape: tuple[int, int, int]
    use_bias: bool
    kernel_init: nn.initializers.Initializer

    def setup(self) -> None:
        """Creates the parameters."""
        self.kernel = self.param("kernel", self.kernel_init, self.shape)
        if self.use_bias:
            self.bias = self.param("bias", nn.initializers.zeros, (self.shape[0], self.shape[2]))

    def __call__(self, x: Float[Array, "*axes in"]) -> Float[Array, "*axes expert out"]:
        """Every expert's output for every token."""
        out = jnp.einsum("...i,eio->...eo", x, self.kernel)
        return out + self.bias.reshape((1,) * (x.ndim - 1) + self.bias.shape) if self.use_bias else out

    def weighted(
        self, hidden: Float[Array, "*axes expert in"], weight: Float[Array, "*axes expert"]
    ) -> Float[Array, "*axes out"]:
        """Each expert's own input through it, summed with weights."""
        out = jnp.einsum("...ei,eio->...o", hidden * weight[..., None], self.kernel)
        return out + weight @ self.bias if self.use_bias else out


def _clamped(gate: Array, up: Array) -> Array:
    """(clip(up) + 1) * g * sigmoid(1.702 g) with g = min(gate, 7): the activation of gpt-oss."""
    gate, up = jnp.minimum(gate, CLAMP), jnp.clip(up, -CLAMP, CLAMP)
    return (up + 1.0) * gate * nn.sigmoid(SLOPE * gate)
