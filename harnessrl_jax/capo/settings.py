"""The choices that define one CAPO run, checked when they are made."""

import dataclasses
from typing import Literal

from harnessrl_jax.capo.probe import Phi
from harnessrl_jax.capo.units import UnitMap
from harnessrl_jax.errors import PartitionError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capo:
    """How gradients of action and args tokens are routed. Has no defaults: the configuration holds them."""

    unit_map: UnitMap
    phi: Phi
    """What the probe averages."""
    score: Literal["raw", "contrast"]
    top_fraction: float
    """κ: share of a layer's units in each role's partition, in (0, 1]."""
    hysteresis: float
    """A member stays while it ranks in the top hysteresis · K; at least 1."""
    ema: float
    """Decay of the statistics at each step that probes something, in [0, 1)."""
    warmup_rollouts: int
    """Successful rollouts to probe before the first partition; until then every parameter is trained."""
    warmup_steps: int
    """Steps after which fewer probed rollouts suffice."""
    refresh_steps: int
    """Steps between two partitions."""
    other_role: Literal["drop", "args", "ungated"]
    """What tokens that are neither action nor args train."""
    ungated: Literal["frozen", "sum"]
    """Parameters that no unit owns: frozen, or trained by the sum of all roles' gradients."""
    denominator: Literal["role", "shared"]
    """Each role's loss is its own mean, or all are divided by the weight of all roles."""
    routing: Literal["vjp", "reference"]
    """Two equal forms. `reference` needs no gradient buffer per role, but more time, and cannot measure conflict."""

    def __post_init__(self):
        for name, low, high, value in (
            ("hysteresis", 1.0, float("inf"), self.hysteresis),
            ("warmup_rollouts", 1, float("inf"), self.warmup_rollouts),
            ("warmup_steps", 0, float("inf"), self.warmup_steps),
            ("refresh_steps", 1, float("inf"), self.refresh_steps),
        ):
            if not low <= value <= high:
                raise PartitionError(f"CAPO: {name} must be at least {low}, got {value}")
        if not 0 < self.top_fraction <= 1:
            raise PartitionError(
                f"CAPO: top_fraction must be above 0 and at most 1, got {self.top_fraction}; "
                "0 would leave the roles without units, for plain training use no CAPO"
            )
        if not 0 <= self.ema < 1:
            raise PartitionError(f"CAPO: ema must be at least 0 and below 1, got {self.ema}")
        if self.other_role == "ungated" and self.ungated == "frozen":
            raise PartitionError(
                "CAPO: other_role = 'ungated' trains the ungated parameters, but ungated = 'frozen' forbids it; "
                "use ungated = 'sum', or other_role = 'args' or 'drop'"
            )

    @property
    def roles(self) -> int:
        """Number of role losses: action, args, and the ungated one if other tokens train the ungated parameters."""
        return 3 if self.other_role == "ungated" else 2
