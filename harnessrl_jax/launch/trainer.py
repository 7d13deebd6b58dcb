"""A Config and a model -> the compiled step and its state on the mesh."""

from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.experimental.multihost_utils import broadcast_one_to_all, process_allgather
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from harnessrl_jax import config as configuration
from harnessrl_jax.capo import (
    ABSOLUTE,
    FIRE,
    RELU,
    UP_RELU,
    Capo,
    CapoState,
    RandomScore,
    UnitMap,
    assert_same_partition,
    decoder_units,
    expert_units,
)
from harnessrl_jax.config import Config
from harnessrl_jax.errors import ShardingError
from harnessrl_jax.models import DecoderConfig
from harnessrl_jax.training import (
    DECODER_RULES,
    Cispo,
    Clipped,
    DualClipped,
    Gspo,
    Objective,
    Policy,
    PolicyLoss,
    Reinforce,
    RowFn,
    Supervised,
    TrainState,
    context_row_fn,
    decoder_row_fn,
    init_state,
    learning_rate_schedule,
    make_mesh,
    make_optimizer,
    make_step,
    place_batch,
    place_state,
    state_shardings,
    step_compiler_options,
)
from harnessrl_jax.trajectories import PackedBatch


class Trainer(NamedTuple):
    """A compiled step, and where its state lies. With several processes, each of them makes the same calls."""

    step: Any
    """The jitted `training.Step`."""
    mesh: Mesh
    shardings: TrainState

    def run(self, state: TrainState, batch: PackedBatch, rows_used: int) -> tuple[TrainState, dict[str, Any]]:
        """One optimiser step on the batch of the first process; what the others give is only its shape.

        The state given is consumed; metrics come back as numbers and lists of numbers.
        """
        batch, rows = broadcast_one_to_all((batch, np.int32(rows_used)))
        with jax.set_mesh(self.mesh):  # attention cuts rows and heads by it
            state, metrics = self.step(state, place_batch(batch, self.mesh), rows)
        numbers = {name: np.asarray(value).tolist() for name, value in jax.device_get(metrics).items()}
        numbers["compilations"] = self.step._cache_size()
        if isinstance(state.capo, CapoState) and numbers["capo/age"] == 0:
            assert_same_partition(state.capo.units, process_allgather)
        return state, numbers

    def weights(self, state: TrainState) -> Any:
        """The parameters as arrays that this process can read whole."""
        return state.params if jax.process_count() == 1 else process_allgather(state.params, tiled=True)


def make_trainer(config: Config, model: DecoderConfig, params: Any) -> tuple[Trainer, TrainState]:
    """Builds mesh, optimiser and step, and places the first state on the mesh.

    Raises:
      ShardingError: the devices do not fit the mesh of the configuration.
    """
    mesh = mesh_of(config.mesh, jax.device_count())
    optimizer = make_optimizer_of(config)
    goal = objective(config, model)
    row_fn = model_row_fn(config, model, goal, mesh)
    state = init_state(params, optimizer, goal)
    shardings = state_shardings(state, optimizer, mesh, DECODER_RULES)
    step = make_step(row_fn, optimizer, goal, micro_rows=config.packing.micro_rows, shardings=shardings)
    everywhere = NamedSharding(mesh, PartitionSpec())
    compiled = jax.jit(
        step, donate_argnums=0, out_shardings=(shardings, everywhere), compiler_options=step_compiler_options()
    )
    return Trainer(compiled, mesh, shardings), place_state(state, shardings)


def make_optimizer_of(config: Config) -> optax.GradientTransformation:
    """The optimiser and its schedule."""
    return make_optimizer(
        learning_rate=learning_rate_schedule(
            peak=config.optimizer.learning_rate,
            warmup_steps=config.optimizer.warmup_steps,
            decay=config.optimizer.schedule,
            steps=config.steps,
            final_fraction=0.1,
        ),
        b1=config.optimizer.b1,
        b2=config.optimizer.b2,
        eps=1e-8,
        weight_decay=config.optimizer.weight_decay,
        clip_norm=config.optimizer.clip_norm,
    )


def model_row_fn(config: Config, model: DecoderConfig, goal: Objective, mesh: Mesh) -> RowFn:
    """The decoder as the objective reads it, its attention cut by hand where the compiler cannot cut it."""
    how: dict[str, Any] = {
        "temperature": config.behaviour.temperature if config.algorithm.kind == "policy" else 1.0,
        "implementation": config.model.attention,
        "remat": config.model.remat,
        "collect": goal.capo.statistic.reads if isinstance(goal, Policy) and goal.capo else None,
    }
    by_hand = mesh.shape["context"] > 1 or model.kv_heads % mesh.shape["tensor"]
    return context_row_fn(model, mesh, **how) if by_hand else decoder_row_fn(model, **how)


def mesh_of(sizes: configuration.Mesh, devices: int) -> Mesh:
    """The mesh of a configuration on all devices. Raises ShardingError if they cannot be cut so."""
    return make_mesh(**mesh_sizes(sizes, devices), devices=None)


def mesh_sizes(sizes: configuration.Mesh, devices: int) -> dict[str, int]:
    """Devices along each axis; `data = 0` becomes all that the other axes leave.

    Raises:
      ShardingError: the other axes do not divide the devices.
    """
    others = sizes.fsdp * sizes.tensor * sizes.context
    if sizes.data == 0 and devices % others:
        raise ShardingError(
            f"[mesh]: {devices} devices cannot be cut into fsdp {sizes.fsdp} x tensor {sizes.tensor} x context "
            f"{sizes.context}; choose sizes whose product divides {devices}."
        )
    data = sizes.data or devices // others
    return {"data": data, "fsdp": sizes.fsdp, "tensor": sizes.tensor, "context": sizes.context}


def objective(config: Config, model: DecoderConfig) -> Objective:
    """What the configuration's algorithm optimises."""
    algorithm = config.algorithm
    if algorithm.kind == "supervised":
        return Supervised()
    capo = None
    if algorithm.routing != "none":
        capo = Capo(
            unit_map=_units(model, include_gate=algorithm.include_gate),
            statistic={"relu": RELU, "up_relu": UP_RELU, "abs": ABSOLUTE, "fire": FIRE}[algorithm.statistic],
            score=RandomScore(config.seed) if algorithm.score == "random" else algorithm.score,
            top_fraction=algorithm.top_fraction,
            min_tokens=32 if model.experts else 1,  # an expert sees only the tokens that are sent to it
            hysteresis=algorithm.hysteresis,
            ema=algorithm.ema,
            warmup=algorithm.warmup,
            warmup_rollouts=algorithm.warmup_rollouts,
            warmup_steps=algorithm.warmup_steps,
            refresh_steps=algorithm.refresh_steps or None,
            other_role=algorithm.other_role,
            ungated=algorithm.ungated,
            denominator=algorithm.denominator,
            shared=algorithm.shared,
            cagrad=algorithm.cagrad,
            routing=algorithm.routing,
        )
    return Policy(clip_low=algorithm.clip_low, clip_high=algorithm.clip_high, capo=capo, loss=policy_loss(algorithm))


def _units(model: DecoderConfig, *, include_gate: bool) -> UnitMap:
    """The neurons of the decoder's MLPs, or of all its experts."""
    if model.experts is None:
        return decoder_units(model.layers, include_gate=include_gate)
    return expert_units(model.layers, include_gate=include_gate, bias=model.experts.form == "clamped")


def policy_loss(algorithm: configuration.Policy) -> PolicyLoss:
    """The loss the configuration names."""
    match algorithm.loss:
        case "clipped":
            return Clipped()
        case "dual_clipped":
            return DualClipped(dual_clip=algorithm.dual_clip)
        case "gspo":
            return Gspo(sequence="call")
        case "cispo":
            return Cispo()
        case "reinforce":
            return Reinforce(importance=algorithm.importance, limit=algorithm.importance_limit)
