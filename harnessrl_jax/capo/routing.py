"""One loss a role -> one gradient in which each role reaches its own units only: the definition, and by role gradients.

`fused` holds the form that needs no gradient per role.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree

from harnessrl_jax.capo.schedule import CapoState
from harnessrl_jax.capo.units import UnitMap, expand

RoleLosses = Callable[[PyTree], tuple[Float[Array, " role"], Any]]
"""params -> (one loss a role, anything else)."""


class RoleMasks(NamedTuple):
    """Which parameters each role's gradient may change."""

    units: Bool[Array, "role layer unit"]
    rest: Bool[Array, " role"]
    """For the ungated parameters."""

    def trained(self, unit_map: UnitMap, params: PyTree) -> PyTree[Bool[Array, "..."]]:
        """U: what any role may change, one mask a parameter, sizes as in `expand`."""
        return expand(unit_map, params, self.units.any(axis=0), self.rest.any(axis=0))

    def of_role(self, role: int, unit_map: UnitMap, params: PyTree) -> PyTree[Bool[Array, "..."]]:
        """M_r, one mask a parameter, sizes as in `expand`."""
        return expand(unit_map, params, self.units[role], self.rest[role])


def everything(roles: int, layers: int, units: int) -> RoleMasks:
    """Masks that let every role change every parameter: routing is then the plain gradient of the summed losses."""
    return RoleMasks(jnp.ones((roles, layers, units), bool), jnp.ones(roles, bool))


def role_masks(state: CapoState, *, roles: int, ungated: Literal["frozen", "sum"]) -> RoleMasks:
    """The masks of a step: everything during warm-up, then the partition.

    The third role, where there is one, changes only the ungated parameters.
    """
    others = jnp.zeros((roles - 2, *state.units.shape[1:]), bool)
    rest = jnp.array([ungated == "sum"] * 2 + [True] * (roles - 2))
    return RoleMasks(
        units=jnp.where(state.active, jnp.concatenate([state.units, others]), True),
        rest=jnp.where(state.active, rest, True),
    )


def role_gradients(losses: RoleLosses, params: PyTree) -> tuple[PyTree, Float[Array, " role"], Any]:
    """The gradient of each role's loss, from one forward pass and one backward pass a role (form "vjp").

    The passes follow each other rather than sharing a vmap axis: that is faster on CPU, needs the memory of one, and
    leaves branches inside the model (skipped attention blocks) branches.

    Returns:
      Gradients with a leading role axis on every leaf, the losses, and what `losses` returned beside them.
    """
    values, pull, aux = jax.vjp(losses, params, has_aux=True)
    each = [pull(cotangent)[0] for cotangent in jnp.eye(values.size, dtype=values.dtype)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *each), values, aux


def route(unit_map: UnitMap, gradients: PyTree, masks: RoleMasks) -> PyTree:
    """G = Σ_r M_r ∘ g_r, from gradients with a leading role axis. Masked values are exactly 0, whatever they were."""
    like = jax.tree.map(lambda leaf: leaf[0], gradients)
    roles = [masks.of_role(role, unit_map, like) for role in range(len(masks.rest))]

    def leaf(stacked: Array, *role_mask: Array) -> Array:
        return sum((jnp.where(mask, part, 0) for mask, part in zip(role_mask, stacked, strict=True)), jnp.zeros(()))

    return jax.tree.map(leaf, gradients, *roles)


def reference_gradient(
    losses: RoleLosses, params: PyTree, unit_map: UnitMap, masks: RoleMasks
) -> tuple[PyTree, Float[Array, " role"], Any]:
    """The same g by definition: each role's loss sees its own parameters, and the others behind a stop-gradient.

        g = ∇_W Σ_r L_r(M_r ∘ W + sg((1 - M_r) ∘ W))

    Costs a forward and a backward pass for each role, and no gradient buffer beyond one.

    Returns:
      The routed gradient, the losses, and what `losses` returned beside them.
    """

    def total(params: PyTree) -> tuple[Float[Array, ""], Any]:
        values, aux = [], None
        for role in range(len(masks.rest)):
            mask = masks.of_role(role, unit_map, params)
            view = jax.tree.map(lambda keep, leaf: jnp.where(keep, leaf, lax.stop_gradient(leaf)), mask, params)
            each, aux = losses(view)
            values.append(each[role])
        return sum(values, jnp.zeros(())), (jnp.stack(values), aux)

    gradient, (values, aux) = jax.grad(total, has_aux=True)(params)
    return gradient, values, aux
