"""One function for tree attention, whatever computes it."""

from typing import Literal

import jax
from jaxtyping import Array, Float

from harnessrl_jax.attention.blockwise import blockwise_attention
from harnessrl_jax.attention.dense import dense_attention
from harnessrl_jax.attention.mask import TreeMask, depths
from harnessrl_jax.attention.pallas_gpu import pallas_gpu_attention, refusal
from harnessrl_jax.attention.pallas_tpu import pallas_tpu_attention
from harnessrl_jax.attention.plan import BLOCK, TilePlan, make_plan
from harnessrl_jax.errors import ModelError

Implementation = Literal["dense", "blockwise", "pallas_tpu", "pallas_gpu"]
BLOCKS: dict[Implementation, tuple[int, int]] = {
    "blockwise": (BLOCK, BLOCK),
    "pallas_tpu": (128, 256),
    "pallas_gpu": (128, 128),
}
"""Queries and keys of a tile, where nobody chooses them. Those for TPUs and GPUs are not measured."""
HOPPER = "9."  # compute capabilities with the matrix instructions of the GPU kernels; Blackwell's are others


def default_implementation() -> Implementation:
    """The best implementation of the platform JAX runs on: Pallas kernels on TPUs and Hopper GPUs, else blockwise XLA.

    Decided when a function is traced, from JAX's default backend: name the implementation to compile for another.
    """
    match jax.default_backend():
        case "tpu":
            return "pallas_tpu"
        case "gpu" if _capability().startswith(HOPPER):
            return "pallas_gpu"
        case _:
            return "blockwise"


def _capability() -> str:
    """Compute capability of the first GPU, as NVIDIA writes it; empty for those of others."""
    return str(getattr(jax.devices()[0], "compute_capability", ""))


def plan_for(
    mask: TreeMask,
    *,
    window: int | None = None,
    implementation: Implementation | None = None,
    block: int | None = None,
) -> TilePlan | None:
    """The plan that `tree_attention` makes when it gets none, to be made once and shared by many layers.

    Args:
      mask: intervals of one row.
      window: that of the layers which will use the plan.
      implementation: as for `tree_attention`.
      block: slots a side of a tile; None takes what suits the implementation.

    Returns:
      The plan; None for "dense", which needs none.

    Raises:
      ModelError: as `make_plan`, or the implementation is unknown.
    """
    implementation = implementation or default_implementation()
    if implementation == "dense":
        return None
    if implementation not in BLOCKS:
        raise _unknown(implementation)
    block_q, block_k = BLOCKS[implementation] if block is None else (block, block)
    if implementation == "pallas_gpu" and block is None:  # a row of 192 slots has blocks of 64
        lengths = mask.t.shape[0], mask.lo.shape[0]
        block_q, block_k = (
            size if slots % size == 0 else BLOCK for size, slots in zip((block_q, block_k), lengths, strict=True)
        )
    return make_plan(mask, window=window, block_q=block_q, block_k=block_k)


def tree_attention(
    q: Float[Array, "query head dim"],
    k: Float[Array, "key kv dim"],
    v: Float[Array, "key kv dim"],
    mask: TreeMask,
    plan: TilePlan | None = None,
    *,
    window: int | None = None,
    sinks: Float[Array, " head"] | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "query head dim"]:
    """Softmax attention in which query i sees key j iff `lo[j] <= t[i] < hi[j]`.

        out_i = Σ_j a_ij v_j,   a_ij = exp(s_ij) / (exp(sink) + Σ_j' exp(s_ij')),   s_ij = scale * q_i · k_j

    over the visible j; exp(sink) is 0 without sinks. Works on one row; use `jax.vmap` for several. Differentiable in q,
    k, v and sinks (reverse mode). Products take the inputs' type and are summed in at least f32.

    Args:
      q: queries; head h reads key-value head h // (heads / kv heads).
      k: keys, already with their position embedding.
      v: values.
      mask: the intervals, e.g. `row_mask(subtree_end)`. A query that sees no key gets 0.
      plan: tiles to visit, from `plan_for` or `make_plan` with the same window: pass it when several layers share a
        mask and a window. "dense" does not read it; the others make their own when it is None.
      window: a query sees only keys less than this many tokens above it on its path, itself included: depth, not
        slots, counts. None means the whole path.
      sinks: a learned score for each head, that takes part in the softmax and has no value.
      scale: factor of the scores; None means dim ** -0.5.
      implementation: "dense" writes the whole score matrix and is the reference. "blockwise" needs O(tokens) memory
        and skips tiles nobody sees, on any platform. "pallas_tpu" does the same with kernels for TPUs; rows are
        multiples of 256 there. "pallas_gpu" does it with kernels for Hopper GPUs, whose matrix units are for bf16 and
        f16: what they cannot take (f32, heads of more than 128, rows that are no multiple of 64) is computed as
        "blockwise". None takes that of the platform, see `default_implementation`.

    Returns:
      The output, in the type of `q`.

    Raises:
      ModelError: shapes, windows or names that do not fit together.

    References:
      Xiao et al. 2023, https://arxiv.org/abs/2309.17453 (sinks); OpenAI 2025, https://arxiv.org/abs/2508.10925 (learned
      sinks and alternating windows of gpt-oss)
    """
    _check(q, k, v, mask, plan, window, sinks)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    implementation = implementation or default_implementation()
    plan = plan_for(mask, window=window, implementation=implementation) if plan is None else plan
    match implementation, plan:
        case "dense", _:
            return dense_attention(q, k, v, mask, window=window, sinks=sinks, scale=factor)
        case "blockwise", TilePlan():
            out, logsum = blockwise_attention(q, k, v, mask, plan, scale=factor)
        case "pallas_tpu", TilePlan():
            out, logsum = pallas_tpu_attention(q, k, v, mask, plan, scale=factor)
        case "pallas_gpu", TilePlan():
            attend = blockwise_attention if refusal(q, k, plan) else pallas_gpu_attention
            out, logsum = attend(q, k, v, mask, plan, scale=factor)
        case _:
            raise _unknown(implementation)
    return out if sinks is None else _with_sinks(out, logsum, sinks)


def _unknown(implementation: str) -> ModelError:
    return ModelError(
        f"tree_attention: implementation is {implementation!r}; use 'blockwise', 'pallas_tpu', 'pallas_gpu' or "
        "'dense', or None for that of the platform."
    )


def _with_sinks(
    out: Float[Array, "query head dim"], logsum: Float[Array, "query head"], sinks: Float[Array, " head"]
) -> Float[Array, "query head dim"]:
    """Gives the sinks their share: exp(logsum) / (exp(logsum) + exp(sink)) of the output stays.

    A query that sees no key has output 0, so its logsum does not matter.
    """
    kept = jax.nn.sigmoid(logsum - sinks.astype(logsum.dtype)[None, :])
    return (out.astype(kept.dtype) * kept[..., None]).astype(out.dtype)


def _check(
    q: Array, k: Array, v: Array, mask: TreeMask, plan: TilePlan | None, window: int | None, sinks: Array | None
) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if k.shape != v.shape or q.ndim != 3 or k.ndim != 3 or q.shape[2] != k.shape[2]:
        raise ModelError(f"tree_attention: wants q [query, head, dim] and k, v [key, kv, dim], got {shapes}.")
    if q.shape[1] % k.shape[1]:
        raise ModelError(f"tree_attention: the key-value heads must divide the heads, got {shapes}.")
    lengths = tuple(x.shape[0] for x in (mask.t, mask.lo, mask.hi))
    if lengths != (q.shape[0], k.shape[0], k.shape[0]):
        raise ModelError(f"tree_attention: the mask is for (t, lo, hi) of lengths {lengths}, got {shapes}.")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ModelError(f"tree_attention: wants one sink a head, got sinks {list(sinks.shape)} with {shapes}.")
    if window is not None:
        depths(mask, window)
    if plan is not None and plan.window != window:
        raise ModelError(
            f"tree_attention: window is {window}, the plan was made for {plan.window}; "
            "make one plan for each window: make_plan(mask, window=window)."
        )
