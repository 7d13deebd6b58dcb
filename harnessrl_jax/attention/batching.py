"""A pair of kernels for one row, forward and backward -> attention that is differentiable, batchable and sharded.

The tile loops run as long as the data says, which XLA can neither batch nor partition by itself: batching such a
loop would make every row wait for the longest and execute all its tiles. So rows are an explicit leading axis here:
`vmap` (any number of times) becomes that axis, each device loops over its own rows and heads, nothing is exchanged.

Which device owns what comes from the mesh in context (`jax.set_mesh`), by the names of its axes; without one it comes
from the arrays, through XLA's custom partitioning, which TPUs do not have: several TPUs need the mesh in context.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

# One letter an axis: r rows, n queries, m keys, k kv heads, g group, d dim, a places, b bounds, t tiles,
# i query blocks, j key blocks. Sharded are at most r and k.
ROW = ("r n k g d", "r m k d", "r m k d", "r a n", "r b m", "r t", "r i", "r t", "r j")
OUT, LOGSUM = "r n k g d", "r n k g"
ROW_AXES, HEAD_AXIS = ("data", "fsdp"), "tensor"  # of a mesh in context

Kernel = Callable[..., tuple[Array, ...]]


def differentiable(forward_row: Kernel, backward_row: Kernel) -> Callable[..., tuple[Array, Array]]:
    """Attention with a gradient, from the two kernels of one row.

    Args:
      forward_row: (q, k, v, places, bounds, *tile lists) -> (out, logsum), with q [n k g d], k and v [m k d], places
        and bounds as from `comparisons`, the lists as in `TilePlan`. logsum [n k g] is the log-sum-exp of a query's
        visible scores, 0 where it sees none.
      backward_row: (the same, logsum, delta, cotangent of out) -> cotangents of q, k and v. With p the softmax weights
        and dp the product of cotangent and values, the cotangent of the scores is p * (dp - delta).

    Returns:
      (q, k, v, places, bounds, *tile lists) -> (out, logsum), differentiable in q, k and v through both results.

    References:
      Dao 2023, https://arxiv.org/abs/2307.08691 (recomputation from the log-sum-exp, and delta)
    """
    forward = _over_rows(forward_row, ROW, (OUT, LOGSUM))
    backward = _over_rows(backward_row, (*ROW, LOGSUM, LOGSUM, OUT), ROW[:3])

    @jax.custom_vjp
    def attend(*row: Array) -> tuple[Array, Array]:
        out, logsum = forward(*row)
        return out, logsum

    def run(*row: Array) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
        out, logsum = forward(*row)
        out, logsum = checkpoint_name(out, "attention_out"), checkpoint_name(logsum, "attention_logsum")
        return (out, logsum), (*row, out, logsum)

    def pull(saved: tuple[Array, ...], cotangent: tuple[Array, Array]) -> tuple[Array | None, ...]:
        *row, out, logsum = saved
        d_out, d_logsum = cotangent
        delta = (out.astype(logsum.dtype) * d_out.astype(logsum.dtype)).sum(-1) - d_logsum
        integers = (None,) * (len(ROW) - 3)
        return (*backward(*row, logsum, delta, d_out), *integers)

    attend.defvjp(run, pull)
    return attend


def _over_rows(one_row: Kernel, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Kernel:
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

    def dispatch(*arrays: Array) -> tuple[Array, ...]:
        mesh = jax.sharding.get_abstract_mesh()
        if not any(kind == AxisType.Auto for kind in mesh.axis_types):
            return sharded(*arrays)
        own = _owners(mesh, rows=arrays[0].shape[0], heads=arrays[0].shape[2])
        place = lambda text: PartitionSpec(*(own.get(axis) for axis in text.split()))
        mapped = jax.shard_map(
            all_rows, in_specs=tuple(map(place, inputs)), out_specs=tuple(map(place, outputs)), check_vma=False
        )
        return mapped(*arrays)

    rows = custom_vmap(dispatch)

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


def _owners(mesh: AbstractMesh, *, rows: int, heads: int) -> dict[str, tuple[str, ...]]:
    """The mesh axes that cut rows and key-value heads; an axis that would not cut evenly is left out."""
    sizes = {name: mesh.shape[name] for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Auto}
    cut: tuple[str, ...] = ()
    for name in ROW_AXES:
        if name in sizes and rows % (math.prod(sizes[axis] for axis in cut) * sizes[name]) == 0:
            cut = (*cut, name)
    whole_heads = heads % sizes.get(HEAD_AXIS, 1) == 0
    return {"r": cut, "k": (HEAD_AXIS,) if HEAD_AXIS in sizes and whole_heads else ()}


def _batch(x: Array, batched: bool, size: int) -> Array:
    return x if batched else jnp.broadcast_to(x[None], (size, *x.shape))
