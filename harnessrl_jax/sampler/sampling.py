"""Logits and one uniform number a slot -> a token a slot, its log-probabilities, and what the cuts left."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt32

BLOCK = 64  # tokens summed together in `pick`; about the square root of usual vocabularies
WORD = 32  # tokens that one word of a mask allows or forbids, the lowest bit first
LEAST = 2.0**-126  # the smallest normal float32


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


class Mask(NamedTuple):
    """Which tokens a slot may sample."""

    masked: Bool[Array, " slot"]
    """False allows every token; the words are not read then."""
    words: UInt32[Array, "slot word"]


class Cut(NamedTuple):
    """What is kept of a slot's distribution."""

    top_p: Float[Array, " slot"]
    """The fewest tokens that reach this probability; 1 keeps all."""
    top_k: Int32[Array, " slot"]
    """This many most probable tokens, and those equal to the last of them; 0 keeps all."""
    min_p: Float[Array, " slot"]
    """Tokens of at least this share of the highest probability; 0 keeps all."""

    def asked(self) -> Bool[Array, " slot"]:
        """Which slots cut anything."""
        return (self.top_p < 1.0) | (self.top_k > 0) | (self.min_p > 0.0)


def draw(
    logits: Float[Array, "slot vocab"],
    uniform: Float[Array, " slot"],
    temperature: Float[Array, " slot"],
    cut: Cut,
    mask: Mask,
) -> Drawn:
    """Samples one token a slot from softmax(logits / temperature), masked, then cut by top-k, min-p and top-p.

        p(x) ∝ 1[x kept] exp(l_x / T)

    A token is found by inverting the cumulative distribution at `uniform`: one random number instead of one per
    vocabulary entry. A row's result does not depend on the other rows; a mask or a cut costs nothing where no row asks
    for one.

    Args:
      logits: scores l of the model, finite.
      uniform: in [0, 1).
      temperature: T; 0 takes the first of the most probable tokens that the mask allows.
      cut: what is kept of the tokens that the mask allows.
      mask: allows at least one token of every slot.

    Returns:
      The token; its log p(x) in nats, which is `raw_logp` where temperature is 0; its log-probability at temperature 1
      with every token kept; and the probability, at temperature T (1 where that is 0), of the tokens kept, at least
      `LEAST`.
    """
    greedy = temperature == 0.0
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    # Both branches are shared by all rows; a row that asks for nothing gets the same from either.
    left = jax.lax.cond(mask.masked.any(), masked_logits, lambda z, _: z, scaled, mask)
    top = left.max(-1, keepdims=True)
    cuts = cut.asked() & ~greedy
    keep = jax.lax.cond(cuts.any(), survivors, lambda z, _: jnp.ones(z.shape, bool), left, cut)
    kept = jnp.where(keep | ~cuts[:, None], jnp.exp(left - top), 0.0)
    weight = jnp.where(greedy[:, None], (left == top).astype(kept.dtype), kept)
    token = pick(weight, jnp.where(greedy, 0.0, uniform))

    def at_token(values: Float[Array, "slot vocab"]) -> Float[Array, " slot"]:
        return jnp.take_along_axis(values, token[:, None], axis=-1)[:, 0]

    log_kept = top[:, 0] + jnp.log(kept.sum(-1))
    logp = at_token(scaled) - log_kept
    raw_logp = at_token(logits) - jax.nn.logsumexp(logits, axis=-1)
    share = jnp.clip(jnp.exp(log_kept - jax.nn.logsumexp(scaled, axis=-1)), LEAST, 1.0)
    survival = jnp.where(cuts | mask.masked, share, 1.0)
    return Drawn(token, jnp.where(greedy, raw_logp, logp), raw_logp, survival)


def masked_logits(logits: Float[Array, "slot vocab"], mask: Mask) -> Float[Array, "slot vocab"]:
    """Minus infinity where the mask forbids a token."""
    bits = mask.words[:, :, None] >> jnp.arange(WORD, dtype=jnp.uint32)[None, None] & 1
    allowed = bits.reshape(bits.shape[0], -1)[:, : logits.shape[1]] == 1
    return jnp.where(allowed | ~mask.masked[:, None], logits, -jnp.inf)


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


def survivors(scaled: Float[Array, "slot vocab"], cut: Cut) -> Bool[Array, "slot vocab"]:
    """The tokens that top-k, min-p and then top-p keep: all that reach the largest threshold that keeps enough.

    Searches the thresholds instead of sorting the vocabulary, which is an order of magnitude slower on a CPU.
    """
    everything = jnp.full_like(cut.top_p, -jnp.inf)[:, None]
    top = scaled.max(-1, keepdims=True)
    enough = lambda line: (scaled >= line).sum(-1, dtype=jnp.int32) >= cut.top_k
    line = jnp.where((cut.top_k > 0)[:, None], highest(scaled, enough), everything)
    line = jnp.maximum(line, top + jnp.log(cut.min_p)[:, None])
    weight = jnp.where(scaled >= line, jnp.exp(scaled - top), 0.0)
    goal = cut.top_p * weight.sum(-1)
    enough = lambda line: jnp.where(scaled >= line, weight, 0.0).sum(-1) >= goal
    return scaled >= jnp.maximum(line, jnp.where((cut.top_p < 1.0)[:, None], highest(scaled, enough), everything))


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
