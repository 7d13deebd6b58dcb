"""An optax optimiser -> one that leaves parameters outside the partition bit for bit as they are."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, PyTree

from harnessrl_jax.errors import PartitionError


def freeze_outside(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Masks the *updates* of an optimiser; `update` takes the extra argument `trained`, the mask U of `RoleMasks`.

    Masking gradients is not a freeze: weight decay and old momentum still move a parameter whose gradient is 0. The
    state is that of `optimizer`.

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
        # -0.0, because x + -0.0 is x for every x, while -0.0 + 0.0 is 0.0.
        return jax.tree.map(lambda mask, leaf: jnp.where(mask, leaf, -0.0), trained, updates), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


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
