"""Root-mean-square normalisation."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * scale over the last axis, computed in at least f32."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*axes channel"]) -> Float[Array, "*axes channel"]:
        """Normalises the last axis."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        normed = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.eps)
        return normed.astype(x.dtype) * scale.reshape((1,) * (x.ndim - 1) + (-1,))
