"""Positions in three dimensions for rows of trees, of models that place an image's tokens by time, height and width (M-RoPE).

Such a model makes them itself, for one sequence a row. In a tree they are as simple: a token stands where its path has come to, which each word moves on by
one and each image, once it is over, by what its model says; within an image a token is off from there by its place in the grid. Both are asked of the
model, on a sequence of one image and one word, so they are its own whatever its rule is. Where a path has come to is a sum over a token's ancestors, which
two cumulative sums give for all tokens of a row.

Cost: a question for each image, and two passes over the tokens.

Source: the positions are those of Qwen2-VL (Wang et al. 2024, § 2.1); a model is only taken to follow it if it gives the same for a sequence with two images.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

GRID = "image_grid_thw"


def knows_positions(backbone: nn.Module) -> bool:
    """Whether a model's own positions of a sequence with two images are those that are made here."""
    if not hasattr(backbone, "get_rope_index"):
        return False
    try:
        merged = _merge(backbone)
        grids = torch.tensor([[1, 2 * merged, 4 * merged], [1, 6 * merged, 2 * merged]])
        types = torch.tensor([[0, 0, *[1] * 8, 0, *[1] * 12, 0, 0, 0]])
        own = _own_positions(backbone, types, grids)
        ends = torch.full_like(types, types.shape[1])
        made = tree_positions(backbone, ends, types, grids)
    except (TypeError, ValueError, AttributeError, IndexError, KeyError, RuntimeError):
        return False  # it asks for more than images and their grids
    return own.shape == made.shape and bool((own == made).all())


def tree_positions(backbone: Any, subtree_end: Tensor, types: Tensor, grids: Tensor | None) -> Tensor:
    """`[3, R, L]` int64: time, height and width of every token.

    Args:
        backbone: the model below the head, for which `knows_positions`.
        subtree_end: `[R, L]` int64.
        types: `[R, L]` int64, 1 for tokens of images; an image's lie one behind the other in its row.
        grids: `[N, 3]` int64, of each image in the order in which they lie in the flattened batch; None where there is none.
    """
    advance = torch.ones_like(types).flatten()
    offset = advance.new_zeros(3, advance.numel())
    places = types.flatten().nonzero()[:, 0]
    begin = 0
    for grid in [] if grids is None else grids:
        tokens = int(grid.prod()) // _merge(backbone) ** 2
        alone = _own_positions(backbone, torch.tensor([[*[1] * tokens, 0]], device=types.device), grid[None])[:, 0]
        image = places[begin : begin + tokens]
        advance[image], offset[:, image] = 0, alone[:, :tokens]
        advance[image[-1]] = alone[0, tokens]
        begin += tokens
    return _along_paths(advance.view_as(types), subtree_end) + offset.view(3, *types.shape)


def _along_paths(values: Tensor, subtree_end: Tensor) -> Tensor:
    """`[R, L]`, for each token the sum of the `values` of its ancestors."""
    before = values.cumsum(1) - values
    over = torch.zeros(values.shape[0], values.shape[1] + 1, dtype=values.dtype, device=values.device)
    over.scatter_add_(1, subtree_end, values)  # those whose subtrees have ended
    return before - over[:, :-1].cumsum(1)


def _own_positions(backbone: Any, types: Tensor, grids: Tensor) -> Tensor:
    return backbone.get_rope_index(torch.zeros_like(types), mm_token_type_ids=types, image_grid_thw=grids)[0]


def _merge(backbone: Any) -> int:
    return backbone.config.vision_config.spatial_merge_size
