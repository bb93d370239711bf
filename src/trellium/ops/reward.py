"""The loss of a reward model: Bradley and Terry's, over pairs of scalar rewards.

A value per pair; the caller divides their sum by the real pairs of its whole optimizer step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trellium.ops.segments import pairs_of


def reward_loss(
    reward: Tensor, real: Tensor, *, margin: Tensor | None = None, center_rewards_coefficient: float | None = None
) -> Tensor:
    """-log σ(R_c - R_r - margin) + coefficient · (R_c + R_r)², `[pairs]`; 0 for a pair that fills up.

    Args:
        reward: `[2 · pairs]`, the reward of the chosen sample of pair i at 2i, of the rejected one at 2i + 1.
        real: `[pairs]` bool, false for a pair that fills up; its rewards and margin may be anything.
        margin: `[pairs]`, by how much the chosen one should be better; 0 where None.
        center_rewards_coefficient: pulls the mean of a pair's rewards to 0; None leaves it where it is.

    Source: Ouyang et al. 2022 (arXiv:2203.02155), eq. 1; margins, Touvron et al. 2023, Llama 2 (arXiv:2307.09288), eq. 2; centring, Eisenstein et
        al. 2023 (arXiv:2312.09244), eq. 2.
    """
    chosen, rejected = _blanked_pairs(reward, real)
    difference = chosen - rejected
    if margin is not None:
        difference = difference - margin.to(difference.dtype).masked_fill(~real, 0.0)
    loss = -F.logsigmoid(difference)
    if center_rewards_coefficient is not None:
        loss = loss + center_rewards_coefficient * (chosen + rejected) ** 2
    return loss.masked_fill(~real, 0.0)


def reward_metrics(reward: Tensor, real: Tensor) -> dict[str, Tensor]:
    """TRL's metrics by its names, constant.

    `accuracy`, `margin` and `mean_reward` (over a pair's two samples) are `[pairs]`, 0 for a pair that fills up: their mean is the sum over the number of
    real pairs. `min_reward` and `max_reward` are `[]`, over the batch: +inf and -inf where no pair is real, so that further minima and
    maxima go on from them. Arguments as for `reward_loss`.
    """
    chosen, rejected = _blanked_pairs(reward.detach(), real)
    both = torch.stack([chosen, rejected])
    return {
        "accuracy": (chosen > rejected).to(reward.dtype),
        "margin": chosen - rejected,
        "mean_reward": both.mean(dim=0),
        "min_reward": both.masked_fill(~real, torch.inf).amin(),
        "max_reward": both.masked_fill(~real, -torch.inf).amax(),
    }


def _blanked_pairs(reward: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    chosen, rejected = pairs_of(reward)
    return chosen.masked_fill(~real, 0.0), rejected.masked_fill(~real, 0.0)
