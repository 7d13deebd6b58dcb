"""Attention over packed prefix trees: queries, keys, values and one integer a token -> output."""

from harnessrl_jax.attention.interface import Implementation, tree_attention
from harnessrl_jax.attention.mask import TreeMask, row_mask, visible

__all__ = ["Implementation", "TreeMask", "row_mask", "tree_attention", "visible"]
