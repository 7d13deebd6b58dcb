"""Queries, keys, values, tree mask and plan -> attention output in O(tokens) memory, differentiable and batchable.

The tile loops run as long as the data says, which XLA can neither batch nor partition by itself: batching such a
loop would make every row wait for the longest and execute all its tiles. So rows are an explicit leading axis here:
`vmap` (any number of times) becomes that axis, each device loops over its own rows and heads, nothing is exchanged.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from harnessrl_jax.attention import tiles
from harnessrl_jax.attention.mask import TreeMask
from harnessrl_jax.attention.plan import TilePlan

# One letter an axis: r rows, n queries, m keys, k kv heads, g group, d dim, i query blocks, j key blocks, p positions.
ROW = ("r n k g d", "r m k d", "r m k d", "r n", "r m", "r m", "r i j", "r i")
OUT, LOGSUM = "r n k g d", "r i k p"


def blockwise_attention(
    q: Float[Array, "query head dim"],
    k: Float[Array, "key kv dim"],
    v: Float[Array, "key kv dim"],
    mask: TreeMask,
    plan: TilePlan,
    *,
    scale: float,
) -> Float[Array, "query head dim"]:
    """Softmax attention over the visible tiles only.

    Args:
      q: queries; head h reads key-value head h // (heads / kv heads).
      k: keys.
      v: values.
      mask: which key each query sees. A query that sees none gets 0.
      plan: tiles to visit, from `make_plan(mask)`.
      scale: factor of the scores.

    Returns:
      The attention output, in the type of `q`.

    References:
      Dao 2023, https://arxiv.org/abs/2307.08691 (online softmax, recomputation in the backward pass)
    """
    queries, heads, dim = q.shape
    kv = k.shape[1]
    return _attend((q * scale).reshape(queries, kv, heads // kv, dim), k, v, *mask, *plan).reshape(q.shape)


def _over_rows(one_row: Callable[..., tuple[Array, ...]], inputs: tuple[str, ...], outputs: tuple[str, ...]):
    """Turns a function of one row into one that `vmap` and sharded `jit` run row by row."""

    def all_rows(*arrays: Array) -> tuple[Array, ...]:
        return lax.map(lambda row: one_row(*row), arrays)

    def partition(mesh: Mesh, arguments: tuple, results: tuple) -> tuple:
        spec = arguments[0].sharding.spec
        kept = dict(zip(inputs[0].split(), tuple(spec) + (None,) * (len(arguments[0].shape) - len(spec)), strict=True))
        place = lambda axes: NamedSharding(
            mesh, PartitionSpec(*(kept[axis] if axis in ("r", "k") else None for axis in axes.split()))
        )
        return mesh, all_rows, tuple(map(place, outputs)), tuple(map(place, inputs))

    sharded = custom_partitioning(all_rows)
    axes = dict.fromkeys(axis for text in (*inputs, *outputs) for axis in text.split())  # in order of appearance
    sharded.def_partition(
        partition=partition,
        sharding_rule=f"{', '.join(inputs)} -> {', '.join(outputs)}",
        need_replication_factors=tuple(axis for axis in axes if axis not in ("r", "k")),
    )
    rows = custom_vmap(sharded)

    @rows.def_vmap
    def _(size: int, batched: list[bool], *arrays: Array):
        """A second batch axis joins the rows, after them so that a sharded row axis stays whole."""
        count = next(x.shape[1] if b else x.shape[0] for x, b in zip(arrays, batched, strict=True))
        merged = (_batch(x, b, size).swapaxes(0, 1) for x, b in zip(arrays, batched, strict=True))
        out = rows(*(x.reshape(count * size, *x.shape[2:]) for x in merged))
        split = lambda x: x.reshape(count, size, *x.shape[1:]).swapaxes(0, 1)
        return tuple(map(split, out)), (True,) * len(out)

    @custom_vmap
    def single(*arrays: Array) -> tuple[Array, ...]:
        return tuple(x[0] for x in rows(*(x[None] for x in arrays)))

    @single.def_vmap
    def _(size: int, batched: list[bool], *arrays: Array):
        out = rows(*(_batch(x, b, size) for x, b in zip(arrays, batched, strict=True)))
        return out, (True,) * len(out)

    return single


def _batch(x: Array, batched: bool, size: int) -> Array:
    return x if batched else jnp.broadcast_to(x[None], (size, *x.shape))


def _forward_row(q: Array, k: Array, v: Array, t: Array, lo: Array, hi: Array, key_block: Array, active: Array):
    return tiles.forward(q, k, v, TreeMask(t, lo, hi), TilePlan(key_block, active))


def _backward_row(
    q: Array, k: Array, v: Array, t: Array, lo: Array, hi: Array, key_block: Array, active: Array, *cotangent: Array
):
    return tiles.backward(q, k, v, TreeMask(t, lo, hi), TilePlan(key_block, active), *cotangent)


_forward = _over_rows(_forward_row, ROW, (OUT, LOGSUM))
_backward = _over_rows(_backward_row, (*ROW, OUT, LOGSUM, OUT), ROW[:3])


@jax.custom_vjp
def _attend(*row: Array) -> Array:
    return _forward(*row)[0]


def _attend_forward(*row: Array) -> tuple[Array, tuple[Array, ...]]:
    out, logsum = _forward(*row)
    out, logsum = checkpoint_name(out, "attention_out"), checkpoint_name(logsum, "attention_logsum")
    return out, (*row, out, logsum)


def _attend_backward(saved: tuple[Array, ...], d_out: Array) -> tuple[Array | None, ...]:
    integers = (None,) * (len(ROW) - 3)
    return (*_backward(*saved, d_out), *integers)


_attend.defvjp(_attend_forward, _attend_backward)
