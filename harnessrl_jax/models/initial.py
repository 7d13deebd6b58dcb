"""How random weights are drawn where it is not Flax's own way."""

import flax.linen as nn


def embedding_init() -> nn.initializers.Initializer:
    """Normal, 0.1: the residual stream starts as the token.

    With 0.02 the first layers' random outputs drown it, and a small model learns to copy names several times later.
    """
    return nn.initializers.normal(0.1)


def residual_init(layers: int) -> nn.initializers.Initializer:
    """Normal, 0.02 / sqrt(2 * layers), for matrices that write to the residual stream (two a layer), as in GPT-2."""
    return nn.initializers.normal(0.02 / (2 * layers) ** 0.5)
