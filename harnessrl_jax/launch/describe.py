"""What a run is about to do, in words."""

from pathlib import Path
from typing import Any

import jax

from harnessrl_jax.config import Config
from harnessrl_jax.launch.problems import Side
from harnessrl_jax.models import DecoderConfig
from harnessrl_jax.monitor import Plan


def plan(
    config: Config, run_dir: Path, model: DecoderConfig, params: Any, side: Side, heldout: Side, step: int
) -> Plan:
    """The plan that is shown before the work begins."""
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    harness = config.harness
    program = Path(side.command[1 if len(side.command) > 1 else 0]).name
    facts = [
        ("model", f"{config.model.path}: {model.layers} layers, {size / 1e6:.2f} M parameters"),
        ("task", f"{len(side.tasks):,} training questions, {len(heldout.tasks)} held-out"),
        ("harness", f"{program} in {harness.workers} processes; trains {', '.join(harness.trainable_agents)}"),
        ("algorithm", _algorithm(config)),
        ("devices", f"{jax.device_count()} x {jax.devices()[0].device_kind}"),
    ]
    return Plan(
        title=config.name,
        about=config.about,
        facts=facts,
        run_dir=run_dir,
        steps=config.steps,
        done_steps=step,
        expected_s=config.expected_minutes * 60 or None,
    )


def _algorithm(config: Config) -> str:
    if config.algorithm.kind == "supervised":
        return "supervised, cross-entropy on captured rollouts"
    rollouts = config.rollouts
    name = "policy gradient" if config.algorithm.routing == "none" else "CAPO"
    return f"{name}; {rollouts.groups} x {rollouts.group_size} rollouts a step"
