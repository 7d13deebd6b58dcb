"""A frozen model and low-rank adapters -> row functions that train the adapters: one for all targets, or one a role.

One adapter a role is the baseline "two adapters" (DART): roles are kept apart by giving each its own parameters,
instead of by choosing units of the model. In `make_step` it is CAPO with two units that never change:

    row_fn = role_adapters_row_fn(row_fn, params, scale=2.0)
    objective = Policy(..., capo=one_adapter_a_role(adapters, other_role="args"))
    state = role_adapters_state(adapters, optimizer, objective)
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Key, PyTree

from harnessrl_jax.capo import Capo, adapter_units, default, fixed_partition
from harnessrl_jax.models import Adapters, adapted, init_adapters
from harnessrl_jax.training.objectives import Objective
from harnessrl_jax.training.rows import Row, RowFn, RowOutput
from harnessrl_jax.training.state import TrainState, init_state

RoleAdapters = dict[Literal["action", "args"], Adapters]
"""The adapter of each role. Both are added to the model, for every token."""


def init_role_adapters(params: PyTree, key: Key[Array, ""], *, rank: int, where: Callable[[str], bool]) -> RoleAdapters:
    """Two adapters of the same kernels that change nothing yet; arguments and errors as in `init_adapters`."""
    action, args = jax.random.split(key)
    return {
        "action": init_adapters(params, action, rank=rank, where=where),
        "args": init_adapters(params, args, rank=rank, where=where),
    }


def adapter_row_fn(row_fn: RowFn, frozen: PyTree, *, scale: float) -> RowFn:
    """The row function whose parameters are `Adapters`: one low-rank adapter for all targets, on a frozen model.

    Args:
      row_fn: the model's.
      frozen: the model's parameters; constants of every step that is compiled with this function.
      scale: of the adapter, as in `adapted`.
    """
    return lambda adapters, row: row_fn(adapted(frozen, adapters, scale=scale), row)


def role_adapters_row_fn(row_fn: RowFn, frozen: PyTree, *, scale: float) -> RowFn:
    """The row function whose parameters are `RoleAdapters`; arguments as in `adapter_row_fn`.

    There is nothing to probe, so the two units are reported with an activation of 0.
    """

    def run(adapters: RoleAdapters, row: Row) -> RowOutput:
        output = row_fn(adapted(frozen, *adapters.values(), scale=scale), row)
        return output._replace(units=(jnp.zeros((*output.logp.shape, len(adapters))),))

    return run


def one_adapter_a_role(adapters: RoleAdapters, *, other_role: Literal["drop", "args"]) -> Capo:
    """The routing under which a role's loss trains its own adapter and no other.

    Args:
      adapters: for their names and shapes.
      other_role: what tokens that are neither action nor args train: nothing, or the adapter of the args.

    References:
      DART, https://arxiv.org/abs/2602.00994
    """
    return dataclasses.replace(
        default(adapter_units(adapters)), refresh_steps=None, other_role=other_role, ungated="frozen"
    )


def role_adapters_state(
    adapters: RoleAdapters, optimizer: optax.GradientTransformation, objective: Objective
) -> TrainState:
    """`init_state` of an objective with `one_adapter_a_role`, which holds from the first step on."""
    own = jnp.eye(2, dtype=bool)[:, None]  # [role, layer, unit]
    return init_state(adapters, optimizer, objective)._replace(capo=fixed_partition(own))
