"""(partition state, statistics of a step) -> the next partition state: warm-up, moving average, refresh."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from harnessrl_jax.capo.partition import partition
from harnessrl_jax.capo.probe import Probe
from harnessrl_jax.capo.settings import Capo


class CapoState(NamedTuple):
    """Everything the schedule needs; part of the train state and of its checkpoints."""

    units: Bool[Array, "role layer unit"]
    """The partition, roles in the order action, args; all False during warm-up."""
    active: Bool[Array, ""]
    """False during warm-up, when every parameter is trained by every role."""
    total: Float[Array, "role layer unit"]
    """S: moving sum of φ(activation)."""
    tokens: Float[Array, "role layer unit"]
    """n: moving count of the probed targets."""
    rollouts: Int[Array, ""]
    """Successful rollouts probed since the start."""
    steps: Int[Array, ""]
    """Steps since the start."""
    age: Int[Array, ""]
    """Steps since the partition was made."""
    refreshes: Int[Array, ""]
    """Partitions made since the start."""


def init_capo(layers: int, units: int) -> CapoState:
    """The state before the first step: warm-up, nothing probed."""
    # One array a field, never shared: a donated state may not hold the same buffer twice.
    return CapoState(
        units=jnp.zeros((2, layers, units), bool),
        active=jnp.zeros((), bool),
        total=jnp.zeros((2, layers, units), jnp.float32),
        tokens=jnp.zeros((2, layers, units), jnp.float32),
        rollouts=jnp.zeros((), jnp.int32),
        steps=jnp.zeros((), jnp.int32),
        age=jnp.zeros((), jnp.int32),
        refreshes=jnp.zeros((), jnp.int32),
    )


def fixed_partition(units: Bool[Array, "role layer unit"]) -> CapoState:
    """A state whose partition is given and active at once; with `refresh_steps = None` it stays for good."""
    return init_capo(*units.shape[1:])._replace(units=jnp.array(units), active=jnp.ones((), bool))


def advance(
    state: CapoState, probe: Probe, rollouts: Int[Array, ""], allowed: Bool[Array, ""], settings: Capo
) -> CapoState:
    """The state for the next step.

    S and n decay by `ema` at a step that probed something and are kept at one that did not, so that statistics never
    fade away while no rollout succeeds. Warm-up ends when `warmup_rollouts` were probed, or after `warmup_steps`, but
    never before some unit of each role was seen on `min_tokens` targets. After that a new partition is made every
    `refresh_steps`.

    Args:
      state: of the current step.
      probe: statistics of the current step's targets.
      rollouts: how many successful rollouts they came from.
      allowed: False postpones a due partition (the step should have changed parameters and did not).
      settings: the choices.
    """
    seen = (probe.tokens > 0).any()
    total = jnp.where(seen, settings.ema * state.total + probe.total, state.total)
    tokens = jnp.where(seen, settings.ema * state.tokens + probe.tokens, state.tokens)
    probed, steps, age = state.rollouts + rollouts, state.steps + 1, state.age + 1
    warm = (probed >= settings.warmup_rollouts) | (steps >= settings.warmup_steps)
    refresh_due = jnp.zeros((), bool) if settings.refresh_steps is None else age >= settings.refresh_steps
    eligible = tokens >= settings.min_tokens
    due = jnp.where(state.active, refresh_due, warm) & allowed & eligible.any(axis=(1, 2)).all()

    def refresh() -> Bool[Array, "role layer unit"]:
        return partition(
            Probe(total, tokens, probe.dropped).mean(),
            state.units,
            eligible,
            score=settings.score,
            top_fraction=settings.top_fraction,
            hysteresis=settings.hysteresis,
        )

    return CapoState(
        units=lax.cond(due, refresh, lambda: state.units),
        active=state.active | due,
        total=total,
        tokens=tokens,
        rollouts=probed,
        steps=steps,
        age=jnp.where(due, 0, age),
        refreshes=state.refreshes + due,
    )
