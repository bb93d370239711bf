"""Losses of samples that are each good or bad by themselves: KTO and the unpaired APO-zero.

A value per sample; the caller divides their sum by the real samples of its whole optimizer step, which makes a step independent of how it was cut
into micro-batches. KTO measures rewards from a reference point, an estimate of the KL between policy and reference that is made from
*mismatched* pairs: prompts with the completion of another row. It is held constant; `mismatched_kl` gives its two parts, so that micro-batches and
processes can be summed before the division.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trellium.errors import ConfigError, unknown_name
from trellium.ops.segments import SampleScores

UNPAIRED_LOSSES = ("kto", "apo_zero_unpaired")
"""The losses of samples without a partner."""


@dataclass(frozen=True, slots=True)
class UnpairedOptions:
    """Which loss, and how. Names, defaults and meaning are those of TRL's `KTOConfig`.

    Attributes:
        loss_type: of `UNPAIRED_LOSSES`.
        beta: strength of the tie to the reference, above 0.
        desirable_weight: factor of the loss of good samples, from 0.
        undesirable_weight: factor of the loss of bad samples, from 0.

    Raises:
        ConfigError: an unknown loss, a value out of its range.
    """

    loss_type: str = "kto"
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        if self.loss_type not in UNPAIRED_LOSSES:
            unknown = unknown_name("loss_type: there is no", str(self.loss_type), UNPAIRED_LOSSES)
            raise ConfigError(f"{unknown} There are {', '.join(UNPAIRED_LOSSES)}.")
        if not 0 < self.beta < math.inf:
            raise ConfigError(f"beta must be a number above 0, got {self.beta!r}")
        for name in ("desirable_weight", "undesirable_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a number from 0, got {getattr(self, name)!r}")

    @property
    def needs_kl(self) -> bool:
        """Whether mismatched pairs must be scored at all."""
        return self.loss_type == "kto"


def mismatched_kl(log_ratio: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the mismatched pairs' log-ratios and their number, both `[]` and constant: sum them over whatever shares one estimate.

    Args:
        log_ratio: `[S]`, log π/π_ref of each mismatched completion.
        real: `[S]` bool, false for what fills up; its log-ratio may be anything.
    """
    return log_ratio.detach().masked_fill(~real, 0.0).sum(), real.sum().to(log_ratio.dtype)


def reference_point(total: Tensor, count: Tensor) -> Tensor:
    """KTO's estimate of the KL, max(0, total / count), `[]`; 0 where there is nothing to estimate it from.

    The mean of log-ratios of one batch may be negative where the KL is not. Ethayarajh et al. 2024 (arXiv:2402.01306).
    """
    return (total / count.clamp(min=1.0)).clamp(min=0.0)


def unpaired_loss(
    scores: SampleScores, desirable: Tensor, real: Tensor, options: UnpairedOptions, reference_kl: Tensor | None = None
) -> Tensor:
    """λ_D · σ(-β (r - z)) of good samples and λ_U · σ(β (r - z)) of bad ones, `[S]`, r their log-ratio; 0 where `real` is false.

    KTO's z is the estimated KL; these are the λ - v of its paper. APO-zero is the same with z = 0.

    Args:
        scores: of the samples, each `[S]`.
        desirable: `[S]` bool, which samples are good. A batch may well have only one kind.
        real: `[S]` bool, false for what fills up; its scores may be anything.
        options: which loss, and how.
        reference_kl: `[]`, from `reference_point`; for "kto".

    Raises:
        ValueError: "kto" without `reference_kl`.

    Source: Ethayarajh et al. 2024, KTO (arXiv:2402.01306), eq. 7; D'Oosterlinck et al. 2024, APO (arXiv:2408.06266), eq. 7.
    """
    gap = scores.log_ratio.masked_fill(~real, 0.0)
    if options.needs_kl:
        if reference_kl is None:
            raise ValueError("the loss 'kto' needs reference_kl, from reference_point of the mismatched pairs")
        gap = gap - reference_kl.detach()
    loss = torch.where(
        desirable,
        options.desirable_weight * torch.sigmoid(-options.beta * gap),
        options.undesirable_weight * torch.sigmoid(options.beta * gap),
    )
    return loss.masked_fill(~real, 0.0)


def unpaired_metrics(
    scores: SampleScores, desirable: Tensor, real: Tensor, options: UnpairedOptions
) -> dict[str, tuple[Tensor, Tensor]]:
    """TRL's metrics by its names, each as the sum of its values and their number, both `[]` and constant.

    `rewards/margins` is the difference of the means of `rewards/chosen` and `rewards/rejected`, and so is made when those are read.
    """
    reward = options.beta * scores.log_ratio.detach()
    found = {}
    for kind, members in (("chosen", real & desirable), ("rejected", real & ~desirable)):
        for name, values in (("rewards", reward), ("logps", scores.logprob.detach())):
            found[f"{name}/{kind}"] = (values.masked_fill(~members, 0.0).sum(), members.sum().to(values.dtype))
    return found
