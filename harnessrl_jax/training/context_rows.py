"""The row function of the decoder with the slots of a row spread over the mesh axis `context`."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from harnessrl_jax.attention import (
    Implementation,
    TilePlan,
    TreeMask,
    balanced_order,
    default_implementation,
    plan_for,
    row_mask,
)
from harnessrl_jax.errors import ShardingError
from harnessrl_jax.models import Activation, Decoder, DecoderConfig, Remat, picked_logps
from harnessrl_jax.models.rows import collected
from harnessrl_jax.models.self_attention import Attention
from harnessrl_jax.training.rows import Row, RowOutput, TwoPartRowFn, replayed

AXIS = "context"
_SPREAD: Any = P(AXIS)
_WHOLE: Any = P()
MASK = TreeMask(t=_SPREAD, lo=_WHOLE, hi=_WHOLE, query_depth=_SPREAD, key_depth=_WHOLE)
"""Where the mask lies: the queries' integers spread, the keys' on every device."""


def context_row_fn(
    config: DecoderConfig,
    mesh: Mesh,
    *,
    temperature: float,
    implementation: Implementation | None,
    remat: Remat,
    collect: Activation | None,
) -> TwoPartRowFn:
    """`decoder_row_fn` for a mesh whose axis `context` is longer than 1; the same numbers.

    Each device computes its share of the slots: in every layer its own queries read keys and values gathered from all.
    Shares hold equally many slots and nearly equally many attention tiles (`attention.balanced_order`). Then each takes
    its share of the targets. What is computed for a token alone is left to the compiler, which follows the slots.

    Rows are batched by `jax.vmap(..., spmd_axis_name=ROW_AXES)`.

    Raises:
      ShardingError: when traced, if the targets do not divide evenly.
      ModelError: when traced, if the slots do not.
    """
    implementation, parts = implementation or default_implementation(), mesh.shape[AXIS]
    spread = lambda x: lax.with_sharding_constraint(x, NamedSharding(mesh, P(AXIS)))

    def trunk(params: PyTree, row: Row) -> tuple[Array, tuple[Any, ...]]:
        _check_targets(len(row.target), parts)
        mask = row_mask(row.subtree_end)
        order = balanced_order(mask, parts)
        mask = jax.tree.map(lambda x: x[order], mask)
        windows = {config.window(i) for i in range(config.layers)}
        plans = {window: _plan(mesh, mask, window, implementation) for window in windows}
        decoder = Decoder(config, implementation, remat)
        variables, slots = {"params": params}, spread((row.token[order], row.position[order]))
        experts = None if replayed(row) is None else spread(row.experts[order])
        kept = [collect] if collect else []
        with nn.intercept_methods(_on_own_queries(mesh)):
            result: Any = decoder.apply(variables, *slots, mask, plans, experts, method="row", mutable=kept)
        hidden, sown = result
        source = jnp.argsort(order)[row.source]
        units = collected(config, sown, collect)
        return spread(hidden[source]), jax.tree.map(lambda unit: unit[source], units)

    def head(params: PyTree, features: Array, row: Row) -> RowOutput:
        """A batch axis over the devices, so that each goes through its own targets chunk by chunk."""
        share = lambda x: spread(x.reshape(parts, -1, *x.shape[1:]))
        own = lambda x, target: picked_logps(config, params, x, target, temperature=temperature)
        logp, entropy = jax.vmap(own, spmd_axis_name=AXIS)(share(features), share(row.target))
        return RowOutput(logp.reshape(-1), entropy.reshape(-1), ())

    return TwoPartRowFn(trunk, head)


def _check_targets(targets: int, parts: int) -> None:
    if targets % parts:
        raise ShardingError(
            f"context: {targets} targets of a row cannot be spread evenly over {parts} devices; "
            f"pack with row_targets a multiple of {parts}"
        )


def _plan(mesh: Mesh, mask: TreeMask, window: int | None, implementation: Implementation) -> TilePlan | None:
    """The tile plan of each device's queries, with a leading axis of the devices."""

    def own(mask: TreeMask) -> TilePlan | None:
        return jax.tree.map(lambda leaf: leaf[None], plan_for(mask, window=window, implementation=implementation))

    return jax.shard_map(own, mesh=mesh, in_specs=(MASK,), out_specs=P(AXIS), check_vma=False)(mask)


def _on_own_queries(mesh: Mesh) -> Callable:
    """An interceptor of linen methods: attention of each device's queries to the keys and values of all of them.

    In `shard_map` over every axis of the mesh, because the kernels cannot be partitioned from outside.
    """

    def intercept(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        if context.method_name != "mix" or not isinstance(context.module, Attention):
            return call(*args, **kwargs)
        q, k, v, sinks, mask, plan = args
        heads = "tensor" if k.shape[1] % mesh.shape["tensor"] == 0 else None
        own = lambda *args: call(*args[:-1], jax.tree.map(lambda leaf: leaf[0], args[-1]))
        specs = (P(AXIS, heads), P(None, heads), P(None, heads), P(heads), MASK, P(AXIS))
        run = jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=P(AXIS, heads), check_vma=False)
        return run(q, k, v, sinks, mask, plan)

    return intercept
