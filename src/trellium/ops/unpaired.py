"""Losses over completions that are marked good or bad one by one (Ethayarajh et al. 2024, KTO).

The point of comparison is an estimate of how far the policy is from the reference: the mean, over completions that answer another prompt, of policy minus
reference. It is held constant, and never below 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def divergence_estimate(policy: Tensor, reference: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """What the estimate is a mean of: the sum over samples, `[]`, and how many there are, `[]`; over processes, each is to be summed first.

    Args:
        policy, reference: `[B]`, log-probability of a completion of another row, its tokens summed.
        weight: `[B]`, 1, or 0 for rows that fill up the batch.
    """
    return ((policy - reference).detach().masked_fill(weight == 0, 0.0)).sum(), weight.sum()


def kto(ratio: Tensor, desirable: Tensor, divergence: Tensor, beta: float) -> Tensor:
    """KTO (Ethayarajh et al. 2024, eq. 7 and 8, weights apart).

    Args:
        ratio: `[B]`, log-probability of a completion, policy minus reference.
        desirable: `[B]` bool, whether it is marked good.
        divergence: `[]`, the estimate.
        beta: how much it costs to depart from the reference.

    Returns:
        `[B]` in (0, 1).
    """
    sign = torch.where(desirable, 1.0, -1.0)
    return torch.sigmoid(-beta * sign * (ratio - divergence))


def apo_zero_unpaired(ratio: Tensor, desirable: Tensor, divergence: Tensor, beta: float) -> Tensor:
    """APO-zero for completions that are not paired (D'Oosterlinck et al. 2024, eq. 7); arguments as for `kto`, of which the estimate is not read."""
    return kto(ratio, desirable, torch.zeros_like(divergence), beta)


UNPAIRED_LOSSES = {loss.__name__: loss for loss in (kto, apo_zero_unpaired)}
"""Every loss, by TRL's name."""
