"""The loss of reward models: the better of two answers gets the higher number (Bradley and Terry 1952)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def bradley_terry(
    chosen: Tensor, rejected: Tensor, *, margin: Tensor | None = None, center: float | None = None
) -> Tensor:
    """`-log sigmoid(chosen - rejected - margin) + center · (chosen + rejected)²`, `[P]`.

    Args:
        chosen, rejected: `[P]` rewards.
        margin: `[P]`, by how much the chosen is better (Touvron et al. 2023, Llama 2, eq. 2).
        center: the weight of rewards that are not around 0 (Eisenstein et al. 2023, eq. 2); None for none.
    """
    difference = chosen - rejected if margin is None else chosen - rejected - margin
    loss = -F.logsigmoid(difference)
    return loss if center is None else loss + center * (chosen + rejected) ** 2
