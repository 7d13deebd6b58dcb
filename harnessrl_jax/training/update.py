"""(train state, gradient, masks) -> parameters and optimiser state after one update, or untouched."""

from typing import NamedTuple

import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree

from harnessrl_jax.capo import expand, forget_moments, freeze_outside
from harnessrl_jax.training.state import Routing, TrainState, widened


class Updated(NamedTuple):
    """What an update leaves behind."""

    params: PyTree
    opt_state: PyTree
    norm: Float[Array, ""]
    """Global norm of the change; 0 without one."""


def update(
    optimizer: optax.GradientTransformation,
    state: TrainState,
    gradient: PyTree,
    trained: PyTree[Bool[Array, "..."]] | None,
    applied: Bool[Array, ""],
) -> Updated:
    """One update of the parameters that `trained` covers (None: of all), or none at all where `applied` is False."""

    def change() -> Updated:
        params = widened(state.params)
        if trained is None:
            updates, opt_state = optimizer.update(gradient, state.opt_state, params)
        else:
            frozen = freeze_outside(optimizer)
            updates, opt_state = frozen.update(gradient, state.opt_state, params, trained=trained)
        norm = optax.tree.norm(updates).astype(jnp.float32)
        return Updated(optax.apply_updates(state.params, updates), opt_state, norm)

    return lax.cond(applied, change, lambda: Updated(state.params, state.opt_state, jnp.zeros((), jnp.float32)))


def forget_left(
    optimizer: optax.GradientTransformation, before: Routing, after: Routing | None, params: PyTree, opt_state: PyTree
) -> PyTree:
    """The optimiser state for the next step: moments of what its routing does not train any more are 0."""
    old, new = (each.masks for each in (before, after or before))
    units = old.units.any(axis=0) & ~new.units.any(axis=0)
    rest = old.rest.any() & ~new.rest.any()

    def forget() -> PyTree:
        return forget_moments(optimizer, opt_state, expand(before.capo.unit_map, params, units, rest))

    return lax.cond(units.any() | rest, forget, lambda: opt_state)
