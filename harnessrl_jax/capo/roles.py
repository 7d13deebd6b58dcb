"""Token roles and calls of a batch -> which role's gradient each target belongs to."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from harnessrl_jax.trajectories.records import Role

ACTION, ARGS, UNGATED = 0, 1, 2
"""Index of a role's loss, gradient and masks. UNGATED exists only when other tokens train the ungated parameters."""

NO_GRADIENT = -1


def gradient_roles(
    role: Int[Array, "row target"],
    call: Int[Array, "row target"],
    counted: Bool[Array, "row target"],
    *,
    other_role: Literal["drop", "args", "ungated"],
) -> Int[Array, "row target"]:
    """The gradient that each target belongs to.

    ACTION and ARGS tokens keep their role. OTHER tokens (thoughts, syntax, end of turn) have no gradient ("drop"), join
    ARGS ("args") or train the ungated parameters alone ("ungated"). A call with neither ACTION nor ARGS tokens, such as
    output that could not be parsed, joins ARGS rather than being dropped: format errors must stay visible to the loss.

    Args:
      role: `Role` of each target.
      call: number of the call that sampled it; equal for the targets of a call, wherever the batch holds them.
      counted: True where the target is in the loss at all.
      other_role: what OTHER tokens train.

    Returns:
      ACTION, ARGS, UNGATED or NO_GRADIENT.
    """
    labelled = counted & ((role == Role.ACTION) | (role == Role.ARGS))
    if other_role == "drop":
        rest = jnp.where(any_of(call, labelled), NO_GRADIENT, ARGS)
    else:
        rest = ARGS if other_role == "args" else UNGATED
    gradient = jnp.where(role == Role.ACTION, ACTION, jnp.where(role == Role.ARGS, ARGS, rest))
    return jnp.where(counted, gradient, NO_GRADIENT).astype(jnp.int32)


def any_of(owner: Int[Array, "row target"], mark: Bool[Array, "row target"]) -> Bool[Array, "row target"]:
    """For each target: is any target of the same owner (call, rollout) marked, in whatever row it stands?"""
    index, marked = _marked(owner, mark)
    return marked[index]


def number_of_owners(owner: Int[Array, "row target"], mark: Bool[Array, "row target"]) -> Int[Array, ""]:
    """How many different owners have a marked target."""
    return _marked(owner, mark)[1].sum(dtype=jnp.int32)


def _marked(
    owner: Int[Array, "row target"], mark: Bool[Array, "row target"]
) -> tuple[Int[Array, "row target"], Bool[Array, " owner"]]:
    """Owners numbered 0, 1, ... in the order of their ids (ids may be any integers), and whether each has a mark."""
    _, index = jnp.unique(owner.ravel(), return_inverse=True, size=owner.size, fill_value=-1)
    marked = jnp.zeros(owner.size, bool).at[index].max(mark.ravel())
    return index.reshape(owner.shape), marked
