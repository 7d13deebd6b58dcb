"""The choices that define one CAPO run, checked when they are made, and two presets."""

import dataclasses
from typing import Literal

from harnessrl_jax.capo.partition import Score
from harnessrl_jax.capo.probe import RELU, UP_RELU, Statistic
from harnessrl_jax.capo.units import UnitMap
from harnessrl_jax.errors import PartitionError

Routing = Literal["vjp", "reference", "fused", "position_local"]
Shared = Literal["sum", "pcgrad", "cagrad", "drop_smaller"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capo:
    """How gradients of action and args tokens are routed. Has no defaults; `default` and `reproduction` make one."""

    unit_map: UnitMap
    statistic: Statistic
    """What the probe averages."""
    score: Score
    top_fraction: float
    """κ: share of a layer's units in each role's partition, in (0, 1]."""
    min_tokens: int
    """Probed targets of a role that a unit must have been seen on; tells only where experts see different targets."""
    hysteresis: float
    """A member stays while it ranks in the top hysteresis · K; at least 1."""
    ema: float
    """Decay of the statistics at each step that probes something, in [0, 1)."""
    warmup: Literal["train", "probe"]
    """Until the first partition every parameter is trained, or none: batches are then only probed."""
    warmup_rollouts: int
    """Successful rollouts to probe before the first partition."""
    warmup_steps: int
    """Steps after which fewer probed rollouts suffice."""
    refresh_steps: int | None
    """Steps between two partitions; None keeps the first one (static)."""
    other_role: Literal["drop", "args", "ungated"]
    """What tokens that are neither action nor args train."""
    ungated: Literal["frozen", "sum"]
    """Parameters that no unit owns: frozen, or trained by the sum of all roles' gradients."""
    denominator: Literal["role", "shared"]
    """Each role's loss is its own mean, or all are divided by the weight of all roles."""
    shared: Shared
    """What units of both partitions receive: the sum of the gradients, or one with less conflict (`shared_factors`)."""
    cagrad: float
    """c of CAGrad, in [0, 1); read by `shared = "cagrad"` only."""
    routing: Routing
    """How the routed gradient is computed.

    `vjp`, `reference` and `fused` are equal to rounding. Only `vjp` holds the role gradients apart, which conflict
    metrics and every `shared` but "sum" need; `fused` is the fastest of them and needs the memory of a plain gradient.
    `position_local` is an *approximation* at the price of a plain gradient: see `position_local`.
    """

    def __post_init__(self):
        for name, low, value in (
            ("hysteresis", 1.0, self.hysteresis),
            ("min_tokens", 1, self.min_tokens),
            ("warmup_rollouts", 1, self.warmup_rollouts),
            ("warmup_steps", 0, self.warmup_steps),
            ("refresh_steps", 1, 1 if self.refresh_steps is None else self.refresh_steps),
        ):
            if not low <= value:
                raise PartitionError(f"CAPO: {name} must be at least {low}, got {value}")
        if not 0 < self.top_fraction <= 1:
            raise PartitionError(
                f"CAPO: top_fraction must be above 0 and at most 1, got {self.top_fraction}; "
                "0 would leave the roles without units, for plain training use no CAPO"
            )
        for name, value in (("ema", self.ema), ("cagrad", self.cagrad)):
            if not 0 <= value < 1:
                raise PartitionError(f"CAPO: {name} must be at least 0 and below 1, got {value}")
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.other_role == "ungated" and self.ungated == "frozen":
            raise PartitionError(
                "CAPO: other_role = 'ungated' trains the ungated parameters, but ungated = 'frozen' forbids it; "
                "use ungated = 'sum', or other_role = 'args' or 'drop'"
            )
        if self.other_role == "ungated" and self.routing == "position_local":
            raise PartitionError(
                "CAPO: routing = 'position_local' takes one gradient of all tokens, so it cannot keep those of "
                "other_role = 'ungated' off the units; use routing = 'fused', or other_role = 'args' or 'drop'"
            )
        if self.shared != "sum" and self.routing != "vjp":
            raise PartitionError(
                f"CAPO: shared = {self.shared!r} needs the gradients of both roles, which routing = {self.routing!r} "
                "never holds; use routing = 'vjp', or shared = 'sum'"
            )

    @property
    def roles(self) -> int:
        """Number of role losses: action, args, and the ungated one if other tokens train the ungated parameters."""
        return 3 if self.other_role == "ungated" else 2


def default(unit_map: UnitMap) -> Capo:
    """What we recommend: contrast scores, refreshed partitions, and ungated parameters that keep learning."""
    return Capo(
        unit_map=unit_map,
        statistic=RELU,
        score="contrast",
        top_fraction=0.25,
        min_tokens=1,
        hysteresis=1.1,
        ema=0.9,
        warmup="train",
        warmup_rollouts=64,
        warmup_steps=20,
        refresh_steps=20,
        other_role="args",
        ungated="sum",
        denominator="role",
        shared="sum",
        cagrad=0.5,
        routing="vjp",
    )


def reproduction(unit_map: UnitMap) -> Capo:
    """The paper as far as it is known: raw scores, one static partition from a probe before the first update.

    Everything outside the two partitions is frozen, and other tokens are not trained. Use
    `decoder_units(layers, include_gate=False)`: the gate is then ungated.
    """
    return dataclasses.replace(
        default(unit_map),
        statistic=UP_RELU,
        score="raw",
        hysteresis=1.0,
        warmup="probe",
        refresh_steps=None,
        other_role="drop",
        ungated="frozen",
    )
