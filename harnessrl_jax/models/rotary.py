"""Positions -> cosine and sine -> turned queries and keys: the rotary embedding."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from harnessrl_jax.models.config import DecoderConfig
from harnessrl_jax.models.rope import Llama3Rope, YarnRope

Rotary = tuple[Float[Array, "*axes half"], Float[Array, "*axes half"]]


def rotary_angles(config: DecoderConfig, position: Int[Array, "*axes"]) -> Rotary:
    """Cosine and sine of the rotary embedding, f32, for the pairs (i, i + head_dim / 2) as in Hugging Face.

    Args:
      config: gives the width of a head, the base of the frequencies and their scaling.
      position: depth of each token in its own sequence.

    Returns:
      Cosine and sine, one per pair; with YaRN both times its magnitude.

    References:
      Su et al. 2021, https://arxiv.org/abs/2104.09864
    """
    frequency, magnitude = frequencies(config)
    angle = jnp.expand_dims(position.astype(jnp.float32), -1) * frequency.reshape((1,) * position.ndim + (-1,))
    return magnitude * jnp.cos(angle), magnitude * jnp.sin(angle)


def rotate(x: Float[Array, "*axes head dim"], rotary: Rotary) -> Float[Array, "*axes head dim"]:
    """Turns the pairs (i, i + dim / 2) of every head by the token's angles."""
    cos, sin = (jnp.expand_dims(part, -2).astype(x.dtype) for part in rotary)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def frequencies(config: DecoderConfig) -> tuple[Float[Array, " half"], float]:
    """Radians a token of every pair, and the factor of cosine and sine."""
    trained = config.rope_theta ** -(jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim)
    match config.rope:
        case None:
            return trained, 1.0
        case Llama3Rope() as llama:
            turns = trained * (llama.original_length / (2 * math.pi))
            kept = jnp.clip((turns - llama.low_turns) / (llama.high_turns - llama.low_turns), 0.0, 1.0)
            return _blend(trained, llama.factor, kept), 1.0
        case YarnRope() as yarn:
            first, last = _yarn_ramp(config, yarn)
            pair = jnp.arange(config.head_dim // 2, dtype=jnp.float32)
            kept = 1.0 - jnp.clip((pair - first) / (last - first), 0.0, 1.0)
            return _blend(trained, yarn.factor, kept), yarn.magnitude


def _blend(trained: Float[Array, " half"], factor: float, kept: Float[Array, " half"]) -> Float[Array, " half"]:
    """Where `kept` is 1 the frequency as trained, where it is 0 slowed by the factor."""
    return kept * trained + (1.0 - kept) * (trained / factor)


def _yarn_ramp(config: DecoderConfig, yarn: YarnRope) -> tuple[float, float]:
    """Pairs between which the ramp lies; pair i turns length * theta ** (-2 i / dim) / (2 pi) times over the length."""
    pair_of = lambda turns: (
        config.head_dim * math.log(yarn.original_length / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))
    )
    first, last = pair_of(yarn.high_turns), pair_of(yarn.low_turns)
    if yarn.whole_pairs:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.head_dim - 1)
    return first, last + 0.001 if first == last else last
