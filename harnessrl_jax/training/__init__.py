"""(train state, packed batch) -> (train state, metrics): objectives, sharding and one pure step."""

from harnessrl_jax.training.compilation import step_compiler_options
from harnessrl_jax.training.context_rows import context_row_fn
from harnessrl_jax.training.critic import critic_row_fn, make_values
from harnessrl_jax.training.objectives import (
    ActorCritic,
    Cispo,
    Clipped,
    Critic,
    DualClipped,
    Gspo,
    Objective,
    Policy,
    PolicyLoss,
    Reinforce,
    Supervised,
)
from harnessrl_jax.training.optimizer import learning_rate_schedule, make_optimizer, train_only
from harnessrl_jax.training.role_adapters import (
    RoleAdapters,
    adapter_row_fn,
    init_role_adapters,
    one_adapter_a_role,
    role_adapters_row_fn,
    role_adapters_state,
)
from harnessrl_jax.training.rows import RowFn, RowOutput, decoder_row_fn
from harnessrl_jax.training.sharding import (
    AXES,
    DECODER_RULES,
    ShardingRule,
    make_mesh,
    parameter_specs,
    place_batch,
    place_state,
    state_shardings,
)
from harnessrl_jax.training.state import TrainState, init_state
from harnessrl_jax.training.step import Step, make_step

__all__ = [
    "AXES",
    "DECODER_RULES",
    "ActorCritic",
    "Cispo",
    "Clipped",
    "Critic",
    "DualClipped",
    "Gspo",
    "Objective",
    "Policy",
    "PolicyLoss",
    "Reinforce",
    "RoleAdapters",
    "RowFn",
    "RowOutput",
    "ShardingRule",
    "Step",
    "Supervised",
    "TrainState",
    "adapter_row_fn",
    "context_row_fn",
    "critic_row_fn",
    "decoder_row_fn",
    "init_role_adapters",
    "init_state",
    "learning_rate_schedule",
    "make_mesh",
    "make_optimizer",
    "make_step",
    "make_values",
    "one_adapter_a_role",
    "parameter_specs",
    "place_batch",
    "place_state",
    "role_adapters_row_fn",
    "role_adapters_state",
    "state_shardings",
    "step_compiler_options",
    "train_only",
]
