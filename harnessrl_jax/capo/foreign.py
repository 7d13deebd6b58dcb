"""Routing inside trainers that take the gradient and call the optimiser themselves: a loss and an optax optimiser."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from harnessrl_jax.capo.routing import RoleLosses, RoleMasks, role_gradients, route
from harnessrl_jax.capo.units import UnitMap
from harnessrl_jax.capo.updates import UnitFactors, routed_updates


def routed_loss(
    losses: RoleLosses, unit_map: UnitMap, masks: RoleMasks
) -> Callable[[PyTree], tuple[Float[Array, ""], tuple[Float[Array, " role"], Any]]]:
    """One loss whose *plain* gradient is the routed one, for trainers that call `value_and_grad` on a scalar.

        L(W) = Σ_r L_r(W),   ∇L := Σ_r M_r ∘ ∇L_r

    The gradient is that of `route` and `role_gradients`, taken in the forward pass and kept until the backward pass;
    without differentiation only the losses are computed. The result is not differentiable twice, and what `losses`
    closes over must not depend on what is differentiated.

    Args:
      losses: params -> (one loss a role, anything else).
      unit_map: which entries the units own.
      masks: what each role may change.

    Returns:
      params -> (the summed losses, (one loss a role, what `losses` returned beside them)); gradients reach `params`
      through the sum only.
    """

    @jax.custom_vjp
    def total(params: PyTree) -> tuple[Array, tuple[Array, Any]]:
        values, aux = losses(params)
        return values.sum(), (values, aux)

    def forward(params: PyTree) -> tuple[tuple[Array, tuple[Array, Any]], PyTree]:
        gradients, values, aux = role_gradients(losses, params)
        return (values.sum(), (values, aux)), route(unit_map, gradients, masks)

    def backward(gradient: PyTree, cotangents: tuple[Array, Any]) -> tuple[PyTree]:
        return (jax.tree.map(lambda leaf: cotangents[0].astype(leaf.dtype) * leaf, gradient),)

    total.defvjp(forward, backward)
    return total


class StoredFactors(NamedTuple):
    """State of `stored_factors`."""

    factors: UnitFactors
    """To be replaced when the partition changes: by `state._replace(factors=...)`, or in nnx by writing into them."""
    inner: PyTree
    """State of the optimiser inside."""


def stored_factors(
    optimizer: optax.GradientTransformation, unit_map: UnitMap, start: UnitFactors
) -> optax.GradientTransformation:
    """`routed_updates` with the factors in its state, for trainers that give `update` no extra arguments.

    The loop replaces `StoredFactors.factors` whenever the partition changes.

    Args:
      optimizer: any optax optimiser.
      unit_map: which entries the units own.
      start: the factors of the first update.

    Raises:
      PartitionError: at `init`, if the map does not fit the parameters.
    """
    routed = routed_updates(optimizer, unit_map)

    def init(params: PyTree) -> StoredFactors:
        # Copies, because a trainer may donate its state.
        return StoredFactors(jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), start), routed.init(params))

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, StoredFactors]:
        changed, inner = routed.update(updates, state.inner, params, factors=state.factors)
        return changed, StoredFactors(state.factors, inner)

    return optax.GradientTransformation(init, update)


def trained_units(masks: RoleMasks) -> UnitFactors:
    """U: the factors that let the optimiser change what any role may change, and nothing else."""
    return UnitFactors(masks.units.any(axis=0), masks.rest.any(axis=0))
