"""Conflict-Aware Policy Optimization: activations -> partitions of units; one gradient a role -> one routed gradient.

Two losses share the policy: one over action labels, one over their arguments. A probe measures which units are active
before the tokens of each role, a partition assigns the most specific units to each role, and routing gives each role's
gradient to its own units only. Everything here is a pure function of arrays and works with any model whose parameters
a `UnitMap` can name.
"""

from harnessrl_jax.capo.conflict import Conflict, conflict
from harnessrl_jax.capo.partition import contrast_scores, partition, raw_scores
from harnessrl_jax.capo.probe import Probe, absolute, probe_row, probe_targets, relu
from harnessrl_jax.capo.roles import ACTION, ARGS, UNGATED, gradient_roles
from harnessrl_jax.capo.routing import RoleMasks, everything, reference_gradient, role_gradients, role_masks, route
from harnessrl_jax.capo.schedule import CapoState, advance, init_capo
from harnessrl_jax.capo.settings import Capo
from harnessrl_jax.capo.units import UnitMap, UnitSlice, decoder_units, expand, unit_products
from harnessrl_jax.capo.updates import forget_moments, freeze_outside

__all__ = [
    "ACTION",
    "ARGS",
    "UNGATED",
    "Capo",
    "CapoState",
    "Conflict",
    "Probe",
    "RoleMasks",
    "UnitMap",
    "UnitSlice",
    "absolute",
    "advance",
    "conflict",
    "contrast_scores",
    "decoder_units",
    "everything",
    "expand",
    "forget_moments",
    "freeze_outside",
    "gradient_roles",
    "init_capo",
    "partition",
    "probe_row",
    "probe_targets",
    "raw_scores",
    "reference_gradient",
    "relu",
    "role_gradients",
    "role_masks",
    "route",
    "unit_products",
]
