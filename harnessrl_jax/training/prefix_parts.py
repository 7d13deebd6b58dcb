"""A tree longer than a row, without repetition: its prefix once, then part after part on the prefix's keys and values.

    L(θ) = L_prefix(θ) + Σ_parts L_part(θ, kv(θ))

The gradient to the prefix is exact: the parts' cotangents of keys and values are summed and sent back through the
prefix in one backward pass. Memory is that of the prefix and one part.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from harnessrl_jax.attention import Implementation, TreeMask, default_implementation, plan_for
from harnessrl_jax.models import Decoder, DecoderConfig, Remat, picked_logps
from harnessrl_jax.models.self_attention import Attention
from harnessrl_jax.training.rows import Row, RowOutput, replayed
from harnessrl_jax.training.state import widened

KEPT = "prefix"  # the collection that holds each layer's keys and values


class Piece(NamedTuple):
    """Slots of a tree and the targets that they predict.

    `row.subtree_end` counts in slots of the whole tree, `row.source` in those of the piece. In a stack of pieces every
    array has a leading axis; padding is as in a packed row, with places that no other slot of the tree has.
    """

    row: Row
    place: Int[Array, " slot"]
    """Number of each slot in the depth-first order of the whole tree."""


PieceLoss = Callable[[RowOutput, Row], Float[Array, ""]]


def prefix_gradient(
    config: DecoderConfig,
    params: PyTree,
    prefix: Piece,
    parts: Piece,
    loss: PieceLoss,
    *,
    temperature: float,
    implementation: Implementation | None,
    remat: Remat,
) -> tuple[Float[Array, ""], PyTree]:
    """Loss and gradient of a tree in pieces: those of the tree in one long row, to rounding.

    Args:
      config: sizes.
      params: the parameters.
      prefix: the slots that parts share. Every ancestor of a slot of a part is in the prefix or in that part.
      parts: the other slots, stacked [part, ...].
      loss: (output, row) -> the summed loss of a piece's targets. `RowOutput.units` is empty.
      temperature: of the sampler.
      implementation: which attention computes it; None takes that of the platform.
      remat: what of the layers the backward pass computes again.

    Returns:
      The summed loss, and its gradient in float32 at least.

    References:
      Tree training with key-value prefixes, https://arxiv.org/abs/2602.00482.
    """
    decoder = Decoder(config, implementation or default_implementation(), remat)

    def output(params: PyTree, hidden: Array, row: Row) -> RowOutput:
        return RowOutput(*picked_logps(config, params, hidden[row.source], row.target, temperature=temperature), ())

    def of_prefix(params: PyTree) -> tuple[Array, PyTree]:
        hidden, kept = _run(decoder, {"params": params}, prefix, (prefix,), _keep)
        return loss(output(params, hidden, prefix.row), prefix.row), kept[KEPT]

    def of_part(params: PyTree, kept: PyTree, part: Piece) -> Array:
        hidden, _ = _run(decoder, {"params": params, KEPT: kept}, part, (prefix, part), _read)
        return loss(output(params, hidden, part.row), part.row)

    (first, kept), pull = jax.vjp(of_prefix, params)

    def body(total: tuple, part: Piece) -> tuple[tuple, None]:
        value, gradients = jax.value_and_grad(of_part, argnums=(0, 1))(params, kept, part)
        added = jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, (value, *gradients))
        return added, None

    zeros = lambda tree: jax.tree.map(jnp.zeros_like, widened(tree))
    (rest, of_params, of_kept), _ = lax.scan(body, (jnp.zeros_like(first), zeros(params), zeros(kept)), parts)
    narrow = jax.tree.map(lambda total, like: total.astype(like.dtype), of_kept, kept)
    (through_prefix,) = pull((jnp.ones_like(first), narrow))
    return first + rest, jax.tree.map(lambda a, b: a + b.astype(a.dtype), of_params, through_prefix)


def _run(decoder: Decoder, variables: PyTree, piece: Piece, keys: tuple[Piece, ...], intercept: Callable) -> Any:
    """Hidden states of a piece that attends to the keys of some pieces, and what the interceptor kept."""
    row = piece.row
    lo, hi, depth = (
        jnp.concatenate(each) for each in zip(*((p.place, p.row.subtree_end, p.row.position) for p in keys))
    )
    mask = TreeMask(t=piece.place, lo=lo, hi=hi, query_depth=row.position, key_depth=depth)
    windows = {decoder.config.window(i) for i in range(decoder.config.layers)}
    plans = {window: plan_for(mask, window=window, implementation=decoder.implementation) for window in windows}
    kept = [KEPT] if intercept is _keep else []
    with nn.intercept_methods(intercept):
        return decoder.apply(variables, row.token, row.position, mask, plans, replayed(row), method="row", mutable=kept)


def _keep(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
    if _mixes(context):
        context.module.sow(KEPT, "kv", args[1:3])
    return call(*args, **kwargs)


def _read(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
    if not _mixes(context):
        return call(*args, **kwargs)
    q, k, v, *rest = args
    ((before_k, before_v),) = context.module.get_variable(KEPT, "kv")
    return call(q, jnp.concatenate([before_k, k]), jnp.concatenate([before_v, v]), *rest, **kwargs)


def _mixes(context: Any) -> bool:
    return context.method_name == "mix" and isinstance(context.module, Attention)
