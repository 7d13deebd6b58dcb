"""Parameters, optimiser and objective -> the state of training, one pytree."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int, PyTree

from harnessrl_jax.capo import Capo, CapoState, RoleMasks, init_capo, role_masks
from harnessrl_jax.errors import PartitionError
from harnessrl_jax.training.objectives import Objective, capo_of


class TrainState(NamedTuple):
    """Everything an optimiser step reads and writes; also what a checkpoint holds of it."""

    params: PyTree
    opt_state: PyTree
    step: Int[Array, ""]
    """Finished calls of the step function, those that changed no parameter included."""
    capo: CapoState | tuple[()]
    """The partition and its schedule; () for objectives without one."""


def init_state(params: PyTree, optimizer: optax.GradientTransformation, objective: Objective) -> TrainState:
    """The state before the first step.

    Raises:
      PartitionError: CAPO's unit map does not fit the parameters.
    """
    capo = capo_of(objective)
    return TrainState(
        params=params,
        opt_state=optimizer.init(widened(params)),
        step=jnp.zeros((), jnp.int32),
        capo=init_capo(capo.unit_map.layers, capo.unit_map.units(params)) if capo else (),
    )


def widened(tree: PyTree) -> PyTree:
    """The tree in float32 at least: the type in which gradients are summed and the optimiser computes."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), tree)


class Routing(NamedTuple):
    """How the gradients of one step are routed."""

    capo: Capo
    state: CapoState
    masks: RoleMasks


def routing_of(objective: Objective, state: CapoState | tuple[()]) -> Routing | None:
    """The routing of a step; None for an objective without CAPO.

    Raises:
      PartitionError: the objective needs a partition and the state holds none.
    """
    capo = capo_of(objective)
    if capo is None:
        return None
    if not isinstance(state, CapoState):
        raise PartitionError(
            "make_step: the objective routes gradients by role, but the train state holds no partition; "
            "make the state with init_state(params, optimizer, objective) of the same objective"
        )
    return Routing(capo, state, role_masks(state, roles=capo.roles, ungated=capo.ungated))


def may_train(routing: Routing | None) -> Bool[Array, ""]:
    """False while CAPO only probes: before the first partition, if its warm-up does not train."""
    if routing is None or routing.capo.warmup == "train":
        return jnp.ones((), bool)
    return routing.state.active
