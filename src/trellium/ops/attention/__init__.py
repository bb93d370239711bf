"""Attention over rows of trees.

`forest_attention` is the operator, `forest_mask` its plainest definition, `rows_are_chains` the case in which neither is needed.
"""

from trellium.ops.attention.mask import forest_mask, rows_are_chains
from trellium.ops.attention.operator import forest_attention

__all__ = ["forest_attention", "forest_mask", "rows_are_chains"]
