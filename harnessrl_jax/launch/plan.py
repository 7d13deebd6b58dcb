"""A Config and a kind of chip -> whether the run fits, and the least time of a step. No weights are read."""

import json
import math
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType
from rich.console import Console
from rich.table import Table

from harnessrl_jax.config import Config
from harnessrl_jax.errors import ShardingError
from harnessrl_jax.launch.model import model_folder
from harnessrl_jax.launch.trainer import make_optimizer_of, mesh_sizes, objective
from harnessrl_jax.models import DecoderConfig, init_params
from harnessrl_jax.training import AXES, DECODER_RULES, Gspo, Objective, Policy, init_state, state_shardings
from harnessrl_jax.training.chips import CHIPS, ChipName
from harnessrl_jax.training.cost_model import (
    Flops,
    Memory,
    Sampler,
    Seconds,
    Work,
    sampler_memory,
    step_flops,
    step_memory,
    step_seconds,
)

ROOM = 0.9
"""Share of a chip's memory that a plan may fill: the runtime, the programs and fragments take the rest."""


class Forecast(NamedTuple):
    """What a run would need."""

    model: DecoderConfig
    parameters: int
    sizes: dict[str, int]
    work: Work
    flops: Flops
    memory: Memory
    sampler: Sampler
    seconds: Seconds

    @property
    def first_device(self) -> float:
        """Bytes on the device that the sampler uses too."""
        return self.memory.total + self.sampler.total


def plan(config: Config, chip: ChipName, chips: int) -> int:
    """Prints the forecast. Returns the exit status: 1 if the run does not fit."""
    found = forecast(config, chip, chips)
    Console(highlight=False).print(*_heading(config, chip, found), sep="\n", soft_wrap=True)
    Console(highlight=False).print(_table(found, CHIPS[chip].memory))
    memory = CHIPS[chip].memory
    return int(memory is not None and found.first_device > ROOM * memory)


def forecast(config: Config, chip: ChipName, chips: int) -> Forecast:
    """The numbers, from the shapes of parameters and optimiser: of the model's folder only config.json is read.

    Raises:
      ShardingError: the chips or the parameters cannot be cut as the mesh says.
    """
    model = DecoderConfig.from_huggingface(json.loads((model_folder(config) / "config.json").read_text()))
    goal, optimizer = objective(config, model), make_optimizer_of(config)
    sizes = mesh_sizes(config.mesh, chips)
    if math.prod(sizes.values()) != chips:
        raise ShardingError(f"[mesh]: {sizes} are {math.prod(sizes.values())} devices, --chips says {chips}.")
    mesh = AbstractMesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    state = jax.eval_shape(lambda: init_state(init_params(model, jax.random.key(0)), optimizer, goal))
    work = work_of(config, goal)
    return Forecast(
        model=model,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        sizes=sizes,
        work=work,
        flops=step_flops(model, state.params, work),
        memory=step_memory(model, state, state_shardings(state, optimizer, mesh, DECODER_RULES), work),
        sampler=sampler_memory(model, state.params, cached_tokens(config)),
        seconds=step_seconds(model, state.params, work, sizes, CHIPS[chip]),
    )


def work_of(config: Config, goal: Objective) -> Work:
    """The largest step that the configuration allows: every row full, every path as long as a context."""
    packing, capo = config.packing, goal.capo if isinstance(goal, Policy) else None
    path = min(packing.row_slots, config.behaviour.context_tokens)
    roles, implementation = capo.roles if capo else 1, config.model.attention or "blockwise"
    apart = capo is not None and capo.routing == "vjp"
    return Work(
        rows=packing.max_rows,
        micro_rows=packing.micro_rows,
        slots=packing.row_slots,
        targets=packing.row_targets,
        pairs=packing.row_slots**2 if implementation == "dense" else packing.row_slots * path / 2,
        roles=roles if apart else 1,
        cotangents=1 if capo is None or capo.routing == "position_local" else roles,
        extra_forwards=int(isinstance(goal, Policy) and isinstance(goal.loss, Gspo)),
        implementation=implementation,
        remat=config.model.remat,
    )


def cached_tokens(config: Config) -> int:
    """Tokens whose keys and values the sampler has room for: its slots and the kept chunks."""
    behaviour = config.behaviour
    pages = (behaviour.prefix_cache_chunks + 1) * behaviour.prefill_chunk_tokens
    return behaviour.slots * behaviour.context_tokens + pages


def _heading(config: Config, chip: ChipName, found: Forecast) -> list[str]:
    axes = " x ".join(f"{axis} {size}" for axis, size in found.sizes.items())
    work, per_step = found.work, found.work.rows * found.work.slots
    return [
        f"{config.model.path}: {found.model.layers} layers, {found.parameters / 1e9:.3g} B parameters in float32",
        f"{math.prod(found.sizes.values())} x {chip}: mesh {axes}",
        f"a full step: {work.rows} rows x {work.slots} slots = {per_step:,} unique tokens, "
        f"{work.micro_rows} rows at a time, remat {work.remat}",
        f"  {found.flops.total:.3g} FLOPs: layers {found.flops.layers:.3g}, attention {found.flops.attention:.3g}, "
        f"head {found.flops.head:.3g}",
        f"  at least {found.seconds.compute:.3g} s of arithmetic at the chips' peak and "
        f"{found.seconds.communication:.3g} s of communication",
    ]


def _table(found: Forecast, limit: float | None) -> Table:
    table = Table(title="GB of memory", title_justify="left")
    table.add_column()
    table.add_column("every device", justify="right")
    table.add_column("the first, with the sampler", justify="right")
    gigabytes = lambda value: f"{value / 1e9:.2f}"
    for name, value in found.memory._asdict().items():
        table.add_row(name, gigabytes(value), gigabytes(value))
    for name, value in found.sampler._asdict().items():
        table.add_row(f"sampler's {name}", "", gigabytes(value))
    totals = (found.memory.total, found.first_device)
    table.add_section()
    table.add_row("total", *map(gigabytes, totals))
    table.add_row("the chip has", *((gigabytes(limit) if limit else "what the machine has",) * 2))
    table.add_row("", *(_verdict(total, limit) for total in totals))
    return table


def _verdict(total: float, limit: float | None) -> str:
    if limit is None:
        return ""
    share = f"{total / limit:.0%}"
    return f"fits, {share}" if total <= ROOM * limit else f"DOES NOT FIT, {share}"
