"""Who attends to whom in a row of trees: the reference.

Rows are trees in depth-first order, so a token's descendants stand in one run behind it and a single comparison is the whole mask. The dense
mask costs R·L² booleans: it is what faster forms are tested against. A row that is one chain, padded by a second chain on the right, needs no mask
under causal attention: no real token has padding before it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def forest_mask(subtree_end: Tensor, position_ids: Tensor, window: int | None = None) -> Tensor:
    """Token `q` may attend to token `k` iff `k <= q < subtree_end[k]`, and with a window iff also `position[q] - position[k] < window`.

    Args:
        subtree_end: `[R, L]` int64, one past the last token of the row that descends from each token.
        position_ids: `[R, L]` int64, each token's depth in its own sequence; read only with a window.
        window: how many tokens a token sees at most, itself among them; None for all.

    Returns:
        `[R, 1, L, L]` bool, True where attention is allowed; every token sees itself.
    """
    place = torch.arange(subtree_end.shape[1], device=subtree_end.device)
    query, key = place.view(1, -1, 1), place.view(1, 1, -1)
    allowed = (key <= query) & (query < subtree_end.unsqueeze(1))
    if window is not None:
        allowed &= position_ids.unsqueeze(2) - position_ids.unsqueeze(1) < window
    return allowed.unsqueeze(1)


def rows_are_chains(subtree_end: Tensor) -> Tensor:
    """`[]` bool: each row is one chain from its start, and at most one more chain (its padding) behind it.

    Such rows need no mask and no positions: causal attention over `arange` gives the real tokens exactly what they see alone.
    """
    length = subtree_end.shape[1]
    end = subtree_end[:, :1]
    place = torch.arange(length, device=subtree_end.device)
    return (subtree_end == torch.where(place < end, end, length)).all()
