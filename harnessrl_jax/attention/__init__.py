"""Attention over packed prefix trees: queries, keys, values and one integer a token -> output."""

from harnessrl_jax.attention.context import balanced_order
from harnessrl_jax.attention.interface import Implementation, default_implementation, plan_for, tree_attention
from harnessrl_jax.attention.mask import TreeMask, row_mask, visible
from harnessrl_jax.attention.plan import BLOCK, TilePlan, make_plan, tile_full, tile_key, tile_query

__all__ = [
    "BLOCK",
    "Implementation",
    "TilePlan",
    "TreeMask",
    "balanced_order",
    "default_implementation",
    "make_plan",
    "plan_for",
    "row_mask",
    "tile_full",
    "tile_key",
    "tile_query",
    "tree_attention",
    "visible",
]
