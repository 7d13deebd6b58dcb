"""Devices -> a mesh; parameter names and a rule table -> shardings of a train state and of batches."""

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from harnessrl_jax.errors import ShardingError
from harnessrl_jax.training.state import TrainState
from harnessrl_jax.trajectories import PackedBatch

AXES = ("data", "fsdp", "tensor", "context")
ROW_AXES = ("data", "fsdp")
"""Rows of a batch lie along both: fsdp also splits the parameters, data only repeats them."""


class ShardingRule(NamedTuple):
    """How parameters are split whose whole path ("layers_0/attn/q/kernel") matches a regular expression."""

    path: str
    spec: PartitionSpec


# Kernels are [in, out]. `tensor` splits what a layer computes in parallel (heads, units, vocabulary), `fsdp` the other
# side, so that a projection pair needs one reduction over `tensor` and one gather over `fsdp`.
DECODER_RULES = (
    ShardingRule(r"embed/embedding", PartitionSpec("tensor", "fsdp")),
    ShardingRule(r"layers_\d+/attn/[qkv]/kernel", PartitionSpec("fsdp", "tensor")),
    ShardingRule(r"layers_\d+/attn/[qkv]/bias", PartitionSpec("tensor")),
    ShardingRule(r"layers_\d+/attn/o/kernel", PartitionSpec("tensor", "fsdp")),
    ShardingRule(r"layers_\d+/attn/o/bias", PartitionSpec()),
    ShardingRule(r"layers_\d+/attn/sinks", PartitionSpec("tensor")),
    ShardingRule(r"layers_\d+/mlp/(gate|up)/kernel", PartitionSpec("fsdp", "tensor")),
    ShardingRule(r"layers_\d+/mlp/down/kernel", PartitionSpec("tensor", "fsdp")),
    ShardingRule(r"layers_\d+/experts/router/(kernel|bias)", PartitionSpec()),
    ShardingRule(r"layers_\d+/experts/(gate|up)/kernel", PartitionSpec(None, "fsdp", "tensor")),
    ShardingRule(r"layers_\d+/experts/(gate|up)/bias", PartitionSpec(None, "tensor")),
    ShardingRule(r"layers_\d+/experts/down/kernel", PartitionSpec(None, "tensor", "fsdp")),
    ShardingRule(r"layers_\d+/experts/down/bias", PartitionSpec()),
    ShardingRule(r"(.*/)?\w*norm/scale", PartitionSpec()),
    ShardingRule(r"lm_head/kernel", PartitionSpec("fsdp", "tensor")),
    ShardingRule(r"value_head/(kernel|bias)", PartitionSpec()),
)


def make_mesh(*, data: int, fsdp: int, tensor: int, context: int, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with axes `data, fsdp, tensor, context`; the compiler places what no sharding fixes (axis type Auto).

    Args:
      data: replicas of the parameters; each takes its share of the rows.
      fsdp: parts of the parameters, each also with its share of the rows.
      tensor: parts of heads, units and vocabulary.
      context: parts of a row's slots.
      devices: which devices; all by default.

    Raises:
      ShardingError: the product of the sizes is not the number of devices.
    """
    shape = (data, fsdp, tensor, context)
    devices = list(jax.devices() if devices is None else devices)
    if min(shape) < 1 or math.prod(shape) != len(devices):
        sizes = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, shape, strict=True))
        raise ShardingError(
            f"mesh: {sizes} asks for {math.prod(shape)} devices, there are {len(devices)}; "
            "change the sizes so that their product is the number of devices"
        )
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def parameter_specs(params: PyTree, mesh: Mesh | AbstractMesh, rules: Sequence[ShardingRule]) -> PyTree:
    """The PartitionSpec of each parameter: that of the first rule that matches its whole path.

    Args:
      params: parameters, or their shapes.
      mesh: where they will lie.
      rules: the table, such as `DECODER_RULES`.

    Raises:
      ShardingError: no rule matches a parameter, or its shape cannot be split as its rule says.
    """

    def spec(path: tuple, leaf: jax.Array) -> PartitionSpec:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        for rule in rules:
            if re.fullmatch(rule.path, name):
                _check_split(name, leaf.shape, rule, mesh)
                return rule.spec
        raise ShardingError(
            f"sharding: no rule covers parameter {name!r} {list(leaf.shape)}; add a rule to the table, "
            f"with PartitionSpec() to keep it whole. Rules: {', '.join(rule.path for rule in rules)}"
        )

    return jax.tree_util.tree_map_with_path(spec, params)


def _check_split(name: str, shape: tuple[int, ...], rule: ShardingRule, mesh: Mesh | AbstractMesh) -> None:
    if len(rule.spec) > len(shape):
        raise ShardingError(
            f"sharding: rule {rule.path!r} splits {len(rule.spec)} axes, parameter {name!r} {list(shape)} has "
            f"{len(shape)}; correct the rule"
        )
    for size, axis in zip(shape, rule.spec):
        if axis is not None and size % mesh.shape[axis]:
            raise ShardingError(
                f"sharding: parameter {name!r} {list(shape)} has an axis of {size} that mesh axis {axis!r} "
                f"cannot cut into {mesh.shape[axis]} equal parts; use a smaller {axis!r}, or a rule that keeps it whole"
            )


def state_shardings(
    state: TrainState,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | AbstractMesh,
    rules: Sequence[ShardingRule],
) -> TrainState:
    """Where each leaf of a train state lies: optimiser moments like their parameters, everything else on all devices.

    Args:
      state: the state, or its shapes from `jax.eval_shape`.
      optimizer: the one that made `state.opt_state`.
      mesh: where the state will lie.
      rules: as for `parameter_specs`.

    Returns:
      A TrainState of NamedShardings.

    Raises:
      ShardingError: as `parameter_specs`.
    """
    whole = NamedSharding(mesh, PartitionSpec())
    params = jax.tree.map(lambda spec: NamedSharding(mesh, spec), parameter_specs(state.params, mesh, rules))
    absent = lambda leaf: isinstance(leaf, optax.MaskedNode)  # the moments of what an optimiser does not train
    moments = optax.tree_map_params(
        optimizer,
        lambda leaf, sharding: leaf if absent(leaf) else sharding,
        state.opt_state,
        params,
        transform_non_params=lambda _: whole,
        is_leaf=absent,
    )
    return state._replace(params=params, opt_state=moments, step=whole, capo=jax.tree.map(lambda _: whole, state.capo))


def place_state(state: TrainState, shardings: TrainState) -> TrainState:
    """A copy of the state on the mesh. Do it before the first step, else the step compiles twice.

    A copy, because a donated step overwrites its input, which the caller's own arrays must not share. With several
    processes, each of them gives the same state.
    """
    return _put(state, shardings)


def place_batch(batch: PackedBatch, mesh: Mesh) -> PackedBatch:
    """The batch on the mesh, its rows along `data` and `fsdp`. With several processes, each of them gives all rows.

    Raises:
      ShardingError: the number of rows is not a multiple of data x fsdp.
    """
    rows, parts = len(batch.token), math.prod(mesh.shape[axis] for axis in ROW_AXES)
    if rows % parts:
        raise ShardingError(
            f"batch: {rows} rows cannot be spread evenly over data x fsdp = {parts} devices; "
            f"pack with max_rows a multiple of {parts}"
        )
    arrays = jax.tree.map(np.asarray, batch)
    rows_apart = NamedSharding(mesh, PartitionSpec(ROW_AXES))
    return _put(arrays, jax.tree.map(lambda _: rows_apart, arrays))


def _put(tree: PyTree, shardings: PyTree) -> PyTree:
    """Copies a tree that every process holds to where it belongs; each process fills its own devices.

    `jax.device_put` would do it too, after comparing all values between the processes.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings, may_alias=False)

    def own_parts(leaf: Any, sharding: NamedSharding) -> jax.Array:
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(own_parts, tree, shardings)
