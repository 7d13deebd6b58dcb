"""Conflict-Aware Policy Optimization: activations -> partitions of units; one gradient a role -> one routed gradient.

Two losses share the policy: one over action labels, one over their arguments. A probe measures which units are active
before the tokens of each role, a partition assigns the most specific units to each role, and routing gives each role's
gradient to its own units only. Everything here is a pure function of arrays and works with any model whose parameters
a `UnitMap` can name.
"""

from harnessrl_jax.capo.agreement import assert_same_partition
from harnessrl_jax.capo.attach import Attachment
from harnessrl_jax.capo.conflict import Conflict, conflict
from harnessrl_jax.capo.families import (
    adapter_units,
    decoder_units,
    expert_units,
    head_units,
    layer_units,
    lora_units,
)
from harnessrl_jax.capo.foreign import StoredFactors, routed_loss, stored_factors, trained_units
from harnessrl_jax.capo.fused import fused_gradient, position_local
from harnessrl_jax.capo.partition import (
    RandomScore,
    contrast_scores,
    entropy_scores,
    partition,
    raw_scores,
)
from harnessrl_jax.capo.probe import (
    ABSOLUTE,
    FIRE,
    POSITIVE_SHARE,
    RELU,
    UP_RELU,
    ExpertUnits,
    Probe,
    Statistic,
    head_norm,
    probe_row,
    probe_targets,
)
from harnessrl_jax.capo.roles import ACTION, ARGS, UNGATED, gradient_roles
from harnessrl_jax.capo.routing import RoleMasks, everything, reference_gradient, role_gradients, role_masks, route
from harnessrl_jax.capo.schedule import CapoState, advance, fixed_partition, init_capo
from harnessrl_jax.capo.settings import Capo, default, reproduction
from harnessrl_jax.capo.shared import scaled, shared_factors
from harnessrl_jax.capo.units import UnitMap, UnitSlice, Whole, expand, unit_products
from harnessrl_jax.capo.updates import UnitFactors, forget_moments, freeze_outside, routed_updates

__all__ = [
    "ABSOLUTE",
    "ACTION",
    "ARGS",
    "FIRE",
    "POSITIVE_SHARE",
    "RELU",
    "UNGATED",
    "UP_RELU",
    "Attachment",
    "Capo",
    "CapoState",
    "Conflict",
    "ExpertUnits",
    "Probe",
    "RandomScore",
    "RoleMasks",
    "Statistic",
    "StoredFactors",
    "UnitFactors",
    "UnitMap",
    "UnitSlice",
    "Whole",
    "adapter_units",
    "advance",
    "assert_same_partition",
    "conflict",
    "contrast_scores",
    "decoder_units",
    "default",
    "entropy_scores",
    "everything",
    "expand",
    "expert_units",
    "fixed_partition",
    "forget_moments",
    "freeze_outside",
    "fused_gradient",
    "gradient_roles",
    "head_norm",
    "head_units",
    "init_capo",
    "layer_units",
    "lora_units",
    "partition",
    "position_local",
    "probe_row",
    "probe_targets",
    "raw_scores",
    "reference_gradient",
    "reproduction",
    "role_gradients",
    "role_masks",
    "route",
    "routed_loss",
    "routed_updates",
    "scaled",
    "shared_factors",
    "stored_factors",
    "trained_units",
    "unit_products",
]
