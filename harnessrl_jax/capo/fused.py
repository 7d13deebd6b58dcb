"""A model and its masks -> the routed gradient from one backward pass that carries a role axis, and an approximation.

Weights are gated where their gradient is formed: for `flax.linen.Dense` and `Embed` by an interceptor, so any linen
model qualifies unchanged; for every other parameter by a gate in front of it, which is as exact but forms the gradient
once a role.
"""

from collections.abc import Callable
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from harnessrl_jax.capo.gates import ROLE_AXIS, RoleGate, SlotGate, Switch, columns, gated, once_a_role, rows
from harnessrl_jax.capo.routing import RoleMasks
from harnessrl_jax.capo.units import UnitMap, UnitSlice, Whole, leaf_name
from harnessrl_jax.errors import PartitionError
from harnessrl_jax.models.layers import Attention

Guard = Callable[[str], RoleGate | Switch]
"""Path of a parameter -> the gate in front of it."""
GateOf = Callable[[str], RoleGate | SlotGate | None]
"""Path of a kernel or bias -> its gate along the units' axis, where the linear map can apply it; None where not."""


def fused_gradient(
    trunk: Callable[[PyTree], tuple[PyTree, Any]],
    head: Callable[[PyTree, PyTree, Any], tuple[Float[Array, " role"], Any]],
    params: PyTree,
    unit_map: UnitMap,
    masks: RoleMasks,
    role: Int[Array, "*axes"],
) -> tuple[PyTree, Float[Array, " role"], Any]:
    """The routed gradient, equal to `route` of `role_gradients` to rounding, in one gradient buffer.

    Each target has one role, so one backward pass through the head serves all roles: what it hands to the trunk is
    split by the targets' roles, and only from there on do the cotangents have a role axis.

    Args:
      trunk: params -> (features, beside). Features are arrays with the leading axes of `role`, one entry a target.
      head: (params, features, beside) -> (one loss a role, anything else). Reads no parameter that a unit owns, and the
        loss of a role depends on the features of that role's targets only.
      params: the parameters.
      unit_map: which entries the units own.
      masks: what each role may change; `rest` must be equal for all roles.
      role: index of each target's loss; below 0 for none.

    Returns:
      The gradient, the losses, and what `head` returned beside them.
    """
    roles = len(masks.rest)
    gates = _stacked(unit_map, params, masks)

    def gate_of(path: str) -> RoleGate | None:
        return _unit_gate(unit_map, masks, path)

    guarded = _guarded(trunk, unit_map, lambda path: RoleGate(gates[path]), gate_of)
    features, pull_trunk, beside = jax.vjp(guarded, params, has_aux=True)
    losses, pull_head, found = jax.vjp(lambda p, x: head(p, x, beside), params, features, has_aux=True)
    of_head, of_features = pull_head(jnp.ones_like(losses))
    of_head = jax.tree.map(lambda leaf: jnp.where(masks.rest.all(), leaf, 0), of_head)

    def of_role(each: Array) -> PyTree:
        def split(leaf: Array) -> Array:
            return jnp.where((role == each).reshape(role.shape + (1,) * (leaf.ndim - role.ndim)), leaf, 0)

        return pull_trunk(jax.tree.map(split, of_features))[0]

    of_trunk = jax.vmap(of_role, axis_name=ROLE_AXIS, out_axes=None)(jnp.arange(roles))
    return jax.tree.map(jnp.add, of_head, of_trunk), losses, found


def position_local(
    model: Callable[[PyTree], Any],
    unit_map: UnitMap,
    masks: RoleMasks,
    slots: Bool[Array, "role slot"],
) -> Callable[[PyTree], Any]:
    """A model of one row whose plain gradient is an *approximation* of the routed one, at the cost of a plain one.

    Each slot stands for the roles of the targets it predicts; a slot that predicts none, for all roles. A unit takes
    what arrives at a slot if every role of the slot trains it. This is not CAPO: through attention, the loss of one
    role also arrives at slots that stand for another, and is sent to the wrong units there. Where a role's masks cover
    everything it is the plain gradient.

    Args:
      model: params -> anything, for one row; its `nn.Dense` layers see the row as [slot, channel].
      unit_map: which entries the units own: kernels and biases of `nn.Dense`, nothing else.
      masks: what each role may change; `rest` must be equal for all roles.
      slots: True where the slot predicts a target of the role.

    Raises:
      PartitionError: when called, if a parameter that units own is not a kernel or bias of an `nn.Dense`.

    References:
      Cloud et al. 2024 (gradient routing), https://arxiv.org/abs/2410.04332
    """
    stands = slots | ~slots.any(axis=0, keepdims=True)
    owners, met = unit_map.owners(), set()

    def gate_of(path: str) -> SlotGate | None:
        gate = _unit_gate(unit_map, masks, path) if path in owners else None
        met.update([path] if gate else [])
        return SlotGate(gate.masks, stands) if gate else None

    def run(params: PyTree) -> Any:
        found = _guarded(model, unit_map, lambda path: Switch(masks.rest.all()), gate_of)(params)
        if missing := sorted(set(owners) - met):
            raise PartitionError(
                f"routing = 'position_local': units own {missing[0]!r}, which is not a kernel or bias of an nn.Dense, "
                "so its gradient cannot be told apart by slots; use routing = 'fused' or 'vjp'"
            )
        return found

    return run


def _stacked(unit_map: UnitMap, params: PyTree, masks: RoleMasks) -> dict[str, Bool[Array, "role ..."]]:
    """Masks by path: those of all roles, which broadcast to the parameter."""
    each = [masks.of_role(role, unit_map, params) for role in range(len(masks.rest))]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    return {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(stacked)}


def _unit_gate(unit_map: UnitMap, masks: RoleMasks, path: str) -> RoleGate | None:
    """The masks of a kernel [in, out] or of a bias along its units' axis; of size 1 where it has one owner or none."""
    layer, entry = unit_map.owners().get(path, (0, None))
    match entry:
        case None:
            return RoleGate(masks.rest[:, None])
        case Whole():
            return RoleGate(masks.units[:, layer, entry.unit, None])
        case UnitSlice(expert_axis=None):
            return RoleGate(jnp.repeat(masks.units[:, layer], entry.width, axis=1))
        case _:
            return None


def _guarded(
    model: Callable[[PyTree], Any], unit_map: UnitMap, guard: Guard, gate_of: GateOf
) -> Callable[[PyTree], Any]:
    """The model with every parameter behind a gate: its own, or that of the linear map that reads it."""
    by_rows = {
        path for path, (_, entry) in unit_map.owners().items() if isinstance(entry, UnitSlice) and not entry.axis
    }

    def run(params: PyTree) -> Any:
        named = {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
        behind = jax.tree_util.tree_map_with_path(lambda path, leaf: gated(leaf, guard(leaf_name(path))), params)

        def intercept(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
            module, out = context.module, None
            if context.method_name == "mix" and isinstance(module, Attention):
                sinks = args[3]
                return once_a_role(call, 3 if sinks is None else 4)(*args)
            if context.method_name == "__call__" and len(args) == 1:
                if type(module) is nn.Dense:
                    out = _dense(module, args[0], named, by_rows, guard, gate_of)
                elif type(module) is nn.Embed:
                    out = _embed(module, args[0], named, gate_of)
            return call(*args, **kwargs) if out is None else out

        with nn.intercept_methods(intercept):
            return model(behind)

    return run


def _dense(
    module: nn.Dense, x: Array, named: dict[str, Array], by_rows: set[str], guard: Guard, gate_of: GateOf
) -> Array | None:
    """What the layer computes, with gates on its own weights; None where it is not a plain x W + b of `named`."""
    path = "/".join(module.path)
    kernel, bias = named.get(f"{path}/kernel"), named.get(f"{path}/bias")
    plain = module.dot_general is None and module.dot_general_cls is None and module.precision is None
    gate = gate_of(f"{path}/kernel") if plain and kernel is not None else None
    if gate is None:
        return None
    bias_gate = gate_of(f"{path}/bias") if module.use_bias else None
    if bias is not None and bias_gate is None:
        bias = gated(bias, guard(f"{path}/bias"))
    x, kernel, bias = cast(Any, module.promote_dtype(x, kernel, bias, dtype=module.dtype))
    flat = x.reshape(-1, x.shape[-1])
    product = (rows if f"{path}/kernel" in by_rows else columns)(flat, kernel, gate)
    if bias is not None:
        wide = jnp.broadcast_to(bias, product.shape)
        product = product + (wide if bias_gate is None else gated(wide, bias_gate))
    return product.reshape(*x.shape[:-1], -1)


def _embed(module: nn.Embed, token: Array, named: dict[str, Array], gate_of: GateOf) -> Array | None:
    """The rows of the table, gated after the look-up, so that the table's gradient has no role axis."""
    path = "/".join(module.path) + "/embedding"
    gate = gate_of(path) if path in named else None
    if gate is None or gate.masks.shape[-1] != 1:
        return None
    (table,) = cast(Any, module.promote_dtype(named[path], dtype=module.dtype, inexact=False))
    return gated(jnp.take(table, token, axis=0), gate)
