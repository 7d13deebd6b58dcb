"""`[algorithm]`: the kinds of training."""

from typing import Literal

import pydantic
from pydantic import Field

from harnessrl_jax.config.section import Section


class Policy(Section):
    """Policy gradient, plain or routed by role (CAPO)."""

    kind: Literal["policy"] = "policy"
    loss: Literal["clipped", "dual_clipped", "gspo", "cispo", "reinforce"] = "clipped"
    """`clipped` clips each token's ratio to the sampler, `gspo` one ratio for each call (and computes the batch once
    more to know it), `cispo` the ratio as a weight that leaves every token its gradient; `reinforce` has no clip."""
    clip_low: float = Field(default=0.2, ge=0.0, lt=1.0)
    clip_high: float = Field(default=0.28, ge=0.0)
    """The defaults suit a token's ratio; `gspo` wants both given, 3e-4 and 4e-4 in its paper."""
    dual_clip: float = Field(default=3.0, gt=1.0)
    """`dual_clipped`: the ratio above which a negative advantage costs no more."""
    importance: Literal["none", "truncated", "masked"] = "none"
    """`reinforce`: weight of each token for how the sampler's policy differs from the trainer's, cut off at
    `importance_limit`, or 0 outside [1 / `importance_limit`, `importance_limit`]."""
    importance_limit: float = Field(default=2.0, gt=1.0)
    routing: Literal["none", "vjp", "fused", "reference", "position_local"] = "vjp"
    """`none` is the plain gradient. `vjp`, `fused` and `reference` are equal forms of CAPO: `vjp` measures conflict,
    `fused` is faster and smaller, `reference` the definition. `position_local` is a cheap approximation."""
    score: Literal["contrast", "raw", "entropy", "random"] = "contrast"
    """`random` draws the units by the run's seed: a control for experiments, not a method."""
    top_fraction: float = Field(default=0.25, gt=0.0, le=1.0)
    """Units of a layer in each role's partition."""
    hysteresis: float = Field(default=1.1, ge=1.0)
    """A unit stays in a partition while it ranks in the top `hysteresis` x the partition's size."""
    statistic: Literal["relu", "up_relu", "abs", "fire"] = "relu"
    """What is averaged over a unit's activations."""
    include_gate: bool = True
    """Whether a unit owns its column of the gate projection too."""
    other_role: Literal["drop", "args", "ungated"] = "args"
    """What the tokens that are neither action nor arguments train."""
    ungated: Literal["frozen", "sum"] = "sum"
    """Parameters outside the MLP: frozen, or trained by the sum of both roles' gradients."""
    denominator: Literal["role", "shared"] = "role"
    """`role`: each role's loss is its own mean. `shared`: both are divided by the weight of all tokens."""
    shared: Literal["sum", "pcgrad", "cagrad", "drop_smaller"] = "sum"
    """How units of both partitions add the two gradients; all but `sum` need `routing = "vjp"`."""
    cagrad: float = Field(default=0.5, ge=0.0, lt=1.0)
    """c of `shared = "cagrad"`."""
    warmup: Literal["train", "probe"] = "train"
    """Steps before the first partition train every parameter, or none: their rollouts are then only probed."""
    warmup_steps: int = Field(default=20, ge=0)
    """Steps before the first partition, unless `warmup_rollouts` is reached earlier."""
    warmup_rollouts: int = Field(default=64, ge=1)
    """Probed successful rollouts after which warm-up may end."""
    refresh_steps: int = Field(default=20, ge=0)
    """Steps between two partitions; 0 keeps the first."""
    ema: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Decay per step of the activation statistics."""

    @pydantic.model_validator(mode="after")
    def _check_loss(self) -> "Policy":
        if self.importance != "none" and self.loss != "reinforce":
            raise ValueError(
                f"importance = {self.importance!r} needs loss = 'reinforce': {self.loss!r} takes its ratio to the "
                "sampler already, which would count twice"
            )
        if self.loss == "gspo" and not {"clip_low", "clip_high"} <= self.model_fields_set:
            raise ValueError(
                "loss = 'gspo' clips the mean ratio of a call, far closer to 1 than a token's: give clip_low and "
                "clip_high, 3e-4 and 4e-4 in its paper"
            )
        return self


class Supervised(Section):
    """Cross-entropy on captured rollouts of a scripted expert: the warm start."""

    kind: Literal["supervised"]
    rollouts: int = Field(ge=1)
    """Rollouts to collect before training."""
    keep_unsolved: float = Field(default=1.0, ge=0.0, le=1.0)
    """Share of the rollouts with verified reward below `solved_reward` that is kept."""
    solved_reward: float = Field(default=0.5, ge=0.0, le=1.0)
    rollouts_per_step: int = Field(default=16, ge=1)
    """Rollouts of one optimiser step; each is used once per epoch."""
