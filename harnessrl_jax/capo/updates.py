"""An optax optimiser -> one that leaves parameters outside the partition bit for bit as they are."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, PyTree, Shaped

from harnessrl_jax.capo.units import UnitMap, expand
from harnessrl_jax.errors import PartitionError


def freeze_outside(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Masks the *updates* of an optimiser; `update` takes the extra argument `trained`, such as U of `RoleMasks`.

    Masking gradients is not a freeze: weight decay and old momentum still move a parameter whose gradient is 0. Nor is
    a factor on gradients a weaker training: Adam divides it out. So `trained` acts on updates, as masks or as factors
    of the learning rate, of which 0 freezes. The state is that of `optimizer`.

    Raises:
      PartitionError: at `update`, when `trained` is missing.
    """
    inner = optax.with_extra_args_support(optimizer)

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None, *, trained: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        if trained is None:
            raise PartitionError(
                "freeze_outside: update() was called without `trained`; pass trained=masks.trained(unit_map, params)"
            )
        updates, state = inner.update(updates, state, params, **extra)
        return jax.tree.map(_scaled, trained, updates), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _scaled(factor: Array, update: Array) -> Array:
    # -0.0, because x + -0.0 is x for every x, while -0.0 + 0.0 is 0.0.
    kept = update if factor.dtype == bool else (factor * update).astype(update.dtype)
    return jnp.where(factor != 0, kept, -0.0).astype(update.dtype)


def forget_moments(optimizer: optax.GradientTransformation, state: PyTree, left: PyTree[Bool[Array, "..."]]) -> PyTree:
    """Sets the optimiser's per-parameter statistics to 0 where `left` is True: for units that leave the partition.

    A unit that enters later starts from zero moments under the global step count's bias correction, so its first
    updates are smaller than those of a fresh optimiser.

    Args:
      optimizer: the optimiser whose state it is.
      state: its state.
      left: one mask a parameter, broadcastable to it.
    """
    return optax.tree_map_params(optimizer, lambda moment, gone: jnp.where(gone, 0, moment), state, left)


class UnitFactors(NamedTuple):
    """Factors of the learning rate: masks, or numbers of which 0 freezes (soft routing: 2.0, 0.5, 0.1)."""

    units: Shaped[Array, "layer unit"]
    rest: Shaped[Array, ""]
    """For the ungated parameters."""


def routed_updates(optimizer: optax.GradientTransformation, unit_map: UnitMap) -> optax.GradientTransformationExtraArgs:
    """Everything an optimiser needs to obey a partition; `update` takes the extra argument `factors`, `UnitFactors`.

    Frozen parameters keep their bits through weight decay and momentum, and have no moments: those of units that a new
    partition leaves out are set to 0, and weight decay builds none while they are frozen. An update without signal (a
    gradient of norm 0) or with a gradient that is not finite changes neither parameters nor state, so that decay and
    momentum do not move weights that nothing was learnt about. The state is that of `optimizer`.

    Args:
      optimizer: any optax optimiser.
      unit_map: which entries the units own.

    Raises:
      PartitionError: at `init`, if the map does not fit the parameters; at `update`, when `factors` is missing.
    """
    frozen = freeze_outside(optimizer)

    def init(params: PyTree) -> PyTree:
        unit_map.units(params)
        return optimizer.init(params)

    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree | None = None,
        *,
        factors: UnitFactors | None = None,
        **extra: Any,
    ) -> tuple[PyTree, PyTree]:
        if factors is None:
            raise PartitionError("routed_updates: update() was called without `factors`; pass factors=UnitFactors(...)")
        trained = expand(unit_map, updates, *factors)

        def change() -> tuple[PyTree, PyTree]:
            changed, inner = frozen.update(updates, state, params, trained=trained, **extra)
            return changed, forget_moments(optimizer, inner, jax.tree.map(lambda factor: factor == 0, trained))

        def nothing() -> tuple[PyTree, PyTree]:
            return jax.tree.map(lambda leaf: jnp.full_like(leaf, -0.0), updates), state

        norm = optax.tree.norm(updates)
        return lax.cond(jnp.isfinite(norm) & (norm > 0), change, nothing)

    return optax.GradientTransformationExtraArgs(init, update)
