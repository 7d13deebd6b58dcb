"""Queries, keys, values, tree mask and plan -> attention output in O(tokens) memory, in plain XLA on any platform."""

from jaxtyping import Array, Float

from harnessrl_jax.attention import tiles
from harnessrl_jax.attention.batching import differentiable
from harnessrl_jax.attention.mask import TreeMask, comparisons
from harnessrl_jax.attention.plan import TilePlan


def _forward(q: Array, k: Array, v: Array, places: Array, bounds: Array, *lists: Array) -> tuple[Array, Array]:
    by_query, query_start, _, key_start = lists
    return tiles.forward(q, k, v, places, bounds, by_query, query_start, key_start.shape[0] - 1)


def _backward(q: Array, k: Array, v: Array, places: Array, bounds: Array, *rest: Array) -> tuple[Array, Array, Array]:
    by_query, query_start, _, key_start, *cotangent = rest
    return tiles.backward(q, k, v, places, bounds, by_query, query_start, key_start.shape[0] - 1, *cotangent)


_attend = differentiable(_forward, _backward)


def blockwise_attention(
    q: Float[Array, "query head dim"],
    k: Float[Array, "key kv dim"],
    v: Float[Array, "key kv dim"],
    mask: TreeMask,
    plan: TilePlan,
    *,
    scale: float,
) -> tuple[Float[Array, "query head dim"], Float[Array, "query head"]]:
    """Softmax attention over the visible tiles only, with an online softmax.

    Args:
      q: queries; head h reads key-value head h // (heads / kv heads).
      k: keys.
      v: values.
      mask: which key each query sees. A query that sees none gets 0.
      plan: tiles to visit, from `make_plan(mask)`; its window is the one that counts.
      scale: factor of the scores.

    Returns:
      The attention output, in the type of `q`, and the log-sum-exp of each query's visible scores (0 where it sees
      none), in at least f32. Differentiable through both.

    References:
      Dao 2023, https://arxiv.org/abs/2307.08691
    """
    queries, heads, dim = q.shape
    kv = k.shape[1]
    grouped = (q * scale).reshape(queries, kv, heads // kv, dim)
    lists = (plan.by_query, plan.query_start, plan.by_key, plan.key_start)
    out, logsum = _attend(grouped, k, v, *comparisons(mask, plan.window), *lists)
    return out.reshape(q.shape), logsum.reshape(queries, heads)
