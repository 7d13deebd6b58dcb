"""Logits and one uniform number a slot -> a token a slot, its log-probabilities, and what top-p and top-k left."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt32

BLOCK = 64  # tokens summed together in `pick`; about the square root of usual vocabularies


class Drawn(NamedTuple):
    """One token of every slot."""

    token: Int32[Array, " slot"]
    logp: Float[Array, " slot"]
    raw_logp: Float[Array, " slot"]
    survival: Float[Array, " slot"]


def uniforms(seed: UInt32[Array, "slot 2"], position: Int32[Array, " slot"]) -> Float[Array, " slot"]:
    """The random number in [0, 1) that belongs to a seed and to a token's absolute position, and to nothing else."""

    def one(words: UInt32[Array, "2"], place: Int32[Array, ""]) -> Float[Array, ""]:
        # Named, because the default generator is a setting of the process and a seed must mean the same everywhere.
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), place))

    return jax.vmap(one)(seed, position)


def draw(
    logits: Float[Array, "slot vocab"],
    uniform: Float[Array, " slot"],
    temperature: Float[Array, " slot"],
    top_p: Float[Array, " slot"],
    top_k: Int32[Array, " slot"],
) -> Drawn:
    """Samples one token a slot from softmax(logits / temperature), cut by top-k, then by top-p.

        p(x) ∝ 1[x kept] exp(l_x / T)

    A token is found by inverting the cumulative distribution at `uniform`: one random number instead of one per
    vocabulary entry. A row's result does not depend on the other rows.

    Args:
      logits: scores l of the model, finite.
      uniform: in [0, 1).
      temperature: T; 0 takes the first of the most probable tokens.
      top_p: keeps the fewest tokens that reach this probability; 1 keeps all.
      top_k: keeps this many most probable tokens; 0 keeps all. Tokens equal to the last one kept are kept too.

    Returns:
      The token; its log p(x) in nats, which is `raw_logp` where temperature is 0; its log-probability at temperature 1
      with every token kept; and the probability, at temperature T, of the tokens kept.
    """
    greedy = temperature == 0.0
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    top = scaled.max(-1, keepdims=True)
    whole = jnp.exp(scaled - top)
    cut = ((top_p < 1.0) | (top_k > 0)) & ~greedy
    # The branch is shared by all rows; a row that cuts nothing keeps everything in either.
    keep = jax.lax.cond(cut.any(), survivors, lambda z, *_: jnp.ones(z.shape, bool), scaled, top_p, top_k)
    kept = jnp.where(keep, whole, 0.0)
    weight = jnp.where(greedy[:, None], (scaled == top).astype(whole.dtype), kept)
    token = pick(weight, jnp.where(greedy, 0.0, uniform))

    def at_token(values: Float[Array, "slot vocab"]) -> Float[Array, " slot"]:
        return jnp.take_along_axis(values, token[:, None], axis=-1)[:, 0]

    raw_logp = at_token(logits) - jax.nn.logsumexp(logits, axis=-1)
    logp = at_token(scaled) - top[:, 0] - jnp.log(kept.sum(-1))
    survival = jnp.where(cut, kept.sum(-1) / whole.sum(-1), 1.0)
    return Drawn(token, jnp.where(greedy, raw_logp, logp), raw_logp, survival)


def pick(weight: Float[Array, "slot vocab"], uniform: Float[Array, " slot"]) -> Int32[Array, " slot"]:
    """The token at which the running sum of `weight` first exceeds `uniform` times the total.

    Sums blocks, finds the block, then the place in it: short sums lose no digits over a long vocabulary. The result
    always has a positive weight, whatever the rounding.

    Args:
      weight: unnormalised probabilities, none negative, at least one positive.
      uniform: in [0, 1).
    """
    padded = jnp.pad(weight, ((0, 0), (0, -weight.shape[1] % BLOCK)))
    blocks = padded.reshape(weight.shape[0], -1, BLOCK)
    ends = jnp.cumsum(blocks.sum(-1), axis=-1)
    goal = (uniform * ends[:, -1])[:, None]
    block = (ends <= goal).sum(-1, dtype=jnp.int32)[:, None]
    before = jnp.where(block > 0, jnp.take_along_axis(ends, jnp.maximum(block - 1, 0), axis=1), 0.0)
    inside = jnp.cumsum(jnp.take_along_axis(blocks, block[:, :, None], axis=1)[:, 0], axis=-1)
    # Rounding may leave the goal just beyond the block's own sum, then its last positive weight is meant; or, where the
    # compiler fuses the product into the difference, just before it, then its first.
    last = (inside < inside[:, -1:]).sum(-1, dtype=jnp.int32)
    rest = jnp.maximum(goal - before, 0.0)
    return block[:, 0] * BLOCK + jnp.minimum((inside <= rest).sum(-1, dtype=jnp.int32), last)


def survivors(
    scaled: Float[Array, "slot vocab"], top_p: Float[Array, " slot"], top_k: Int32[Array, " slot"]
) -> Bool[Array, "slot vocab"]:
    """The tokens that top-k and then top-p keep: all that reach the largest threshold that keeps enough.

    Searches the thresholds instead of sorting the vocabulary, which is an order of magnitude slower on a CPU.
    """
    everything = jnp.full_like(top_p, -jnp.inf)[:, None]
    enough = lambda line: (scaled >= line).sum(-1, dtype=jnp.int32) >= top_k
    line = jnp.where((top_k > 0)[:, None], highest(scaled, enough), everything)
    weight = jnp.where(scaled >= line, jnp.exp(scaled - scaled.max(-1, keepdims=True)), 0.0)
    goal = top_p * weight.sum(-1)
    enough = lambda line: jnp.where(scaled >= line, weight, 0.0).sum(-1) >= goal
    return scaled >= jnp.maximum(line, jnp.where((top_p < 1.0)[:, None], highest(scaled, enough), everything))


def highest(
    values: Float[Array, "slot vocab"], enough: Callable[[Float[Array, "slot 1"]], Bool[Array, " slot"]]
) -> Float[Array, "slot 1"]:
    """The largest f32 threshold between a row's extremes for which `enough` holds; its least value if for none.

    `enough` must turn from true to false as the threshold grows. Halves the ordered floats: exact after 32 steps.
    """

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2 + (high - low) % 2
        holds = enough(_float_at(middle))[:, None]
        return jnp.where(holds, middle, low), jnp.where(holds, high, jnp.maximum(middle, low + 1) - 1)

    rank = _rank_of(values)
    bounds = rank.min(-1, keepdims=True), rank.max(-1, keepdims=True)
    return _float_at(jax.lax.fori_loop(0, 32, halve, bounds)[0])


def _rank_of(value: Float[Array, "*axes"]) -> UInt32[Array, "*axes"]:
    """Unsigned integers in the order of the f32 values."""
    bits = jax.lax.bitcast_convert_type(value, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _float_at(rank: UInt32[Array, "*axes"]) -> Float[Array, "*axes"]:
    """Inverse of `_rank_of`."""
    bits = jnp.where(rank >> 31 == 1, rank ^ jnp.uint32(1 << 31), ~rank)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
