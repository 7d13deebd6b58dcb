"""One function for tree attention, whatever computes it."""

from typing import Literal

from jaxtyping import Array, Float

from harnessrl_jax.attention.blockwise import blockwise_attention
from harnessrl_jax.attention.dense import dense_attention
from harnessrl_jax.attention.mask import TreeMask
from harnessrl_jax.attention.plan import TilePlan, make_plan
from harnessrl_jax.errors import ModelError

Implementation = Literal["dense", "blockwise"]


def tree_attention(
    q: Float[Array, "query head dim"],
    k: Float[Array, "key kv dim"],
    v: Float[Array, "key kv dim"],
    mask: TreeMask,
    plan: TilePlan | None = None,
    *,
    scale: float | None = None,
    implementation: Implementation = "blockwise",
) -> Float[Array, "query head dim"]:
    """Softmax attention in which query i sees key j iff `lo[j] <= t[i] < hi[j]`.

        out_i = Σ_j a_ij v_j,   a_ij = softmax over the visible j of (scale * q_i · k_j)

    Works on one row; use `jax.vmap` for several. Differentiable in q, k and v (reverse mode).

    Args:
      q: queries; head h reads key-value head h // (heads / kv heads).
      k: keys, already with their position embedding.
      v: values.
      mask: the intervals, e.g. `row_mask(subtree_end)`. A query that sees no key gets 0.
      plan: tiles to visit, from `make_plan(mask)`: pass it when several layers share a mask. Only "blockwise"
        reads it, and makes its own when it is None.
      scale: factor of the scores; None means dim ** -0.5.
      implementation: "blockwise" needs O(tokens) memory and skips tiles nobody sees; "dense" writes the whole score
        matrix and is the reference.

    Returns:
      The output, in the type of `q`.

    Raises:
      ModelError: shapes or names that do not fit together.
    """
    _check(q, k, v, mask)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    match implementation:
        case "dense":
            return dense_attention(q, k, v, mask, scale=factor)
        case "blockwise":
            plan = make_plan(mask) if plan is None else plan
            return blockwise_attention(q, k, v, mask, plan, scale=factor)
        case _:
            raise ModelError(f"tree_attention: implementation is {implementation!r}; use 'blockwise' or 'dense'.")


def _check(q: Array, k: Array, v: Array, mask: TreeMask) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if k.shape != v.shape or q.ndim != 3 or k.ndim != 3 or q.shape[2] != k.shape[2]:
        raise ModelError(f"tree_attention: wants q [query, head, dim] and k, v [key, kv, dim], got {shapes}.")
    if q.shape[1] % k.shape[1]:
        raise ModelError(f"tree_attention: the key-value heads must divide the heads, got {shapes}.")
    lengths = tuple(x.shape[0] for x in mask)
    if lengths != (q.shape[0], k.shape[0], k.shape[0]):
        raise ModelError(f"tree_attention: the mask is for (t, lo, hi) of lengths {lengths}, got {shapes}.")
