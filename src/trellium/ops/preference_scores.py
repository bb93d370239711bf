"""From the terms of a batch of pairs to what its preference losses read.

Two options live here, because they are about tokens and not about pairs: LD-DPO, which weighs the tokens of the longer response that have no counterpart
in the shorter one, and WPO, which weighs a pair by how likely it is under the policy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trellium.ops.segments import (
    SampleScores,
    mean_per_sample,
    pairs_of,
    per_sample,
    place_in_sample,
    sample_scores,
    terms_per_sample,
)


@dataclass(frozen=True, slots=True)
class PairScores:
    """What policy and reference say of `pairs` pairs; zeros for a pair that fills up.

    Attributes:
        chosen: the scores of the chosen samples, each `[pairs]`; under LD-DPO their sums are weighted.
        rejected: the same of the rejected ones.
        chosen_nll: `[pairs]`, the negative log-probability of the chosen sample, every token in full. Differentiable.
        weight: `[pairs]`, WPO's constant weight; None without it.
        real: `[pairs]` bool, false for a pair that fills up a fixed number of them.
    """

    chosen: SampleScores
    rejected: SampleScores
    chosen_nll: Tensor
    weight: Tensor | None
    real: Tensor


def pair_scores(
    logprob: Tensor,
    reference_logprob: Tensor | tuple[Tensor, Tensor],
    sample: Tensor,
    *,
    mask: Tensor,
    real: Tensor,
    ld_alpha: float | None = None,
    log_sum_p2: Tensor | None = None,
) -> PairScores:
    """Sum terms to pairs.

    Args:
        logprob: `[T]`, the policy's log-probability of each term's token.
        reference_logprob: `[T]`, the reference's; or what it gives the chosen and the rejected samples, two `[pairs]`, summed with the same `ld_alpha`.
        sample: `[T]` int64, ascending among the terms that count: 2i for the chosen one of pair i, 2i + 1 for the rejected one.
        mask: `[T]` bool, false for terms that fill up; their scores may be anything.
        real: `[pairs]` bool, false for pairs that fill up; their terms do not count either.
        ld_alpha: weight of a token beyond the length of the pair's shorter response. None weighs all alike.
        log_sum_p2: `[T]`, the logarithm of Σ p² over the vocabulary where the policy predicts the token; asks for WPO's weights.

    Source: LD-DPO, Liu et al. 2024, "Length Desensitization in Direct Preference Optimization" (arXiv:2409.06411);
        WPO, Zhou et al. 2024, "WPO: Enhancing RLHF with Weighted Preference Optimization" (arXiv:2406.11827), eq. 2.
    """
    samples = 2 * real.shape[0]
    mask = mask & real[sample // 2]
    weight = None if ld_alpha is None else _length_desensitized(logprob, sample, samples, mask, ld_alpha)
    by_term = torch.zeros_like(logprob) if isinstance(reference_logprob, tuple) else reference_logprob
    scores = sample_scores(logprob, by_term, sample, samples, mask=mask, weight=weight)
    if isinstance(reference_logprob, tuple):
        sums = torch.stack(reference_logprob, dim=1).flatten().masked_fill(~real.repeat_interleave(2), 0.0)
        scores = replace(scores, reference_logprob=sums, log_ratio=scores.logprob - sums)
    fields = (scores.logprob, scores.reference_logprob, scores.log_ratio, scores.tokens)
    chosen, rejected = zip(*map(pairs_of, fields), strict=True)
    full = scores.logprob if ld_alpha is None else per_sample(logprob, sample, samples, mask)
    return PairScores(
        chosen=SampleScores(*chosen),
        rejected=SampleScores(*rejected),
        chosen_nll=-pairs_of(full)[0],
        weight=None if log_sum_p2 is None else _policy_weight(logprob, log_sum_p2, sample, samples, mask),
        real=real,
    )


def _length_desensitized(logprob: Tensor, sample: Tensor, samples: int, mask: Tensor, alpha: float) -> Tensor:
    """`[T]`: 1 for the tokens up to the length both of a pair have, `alpha` for those beyond."""
    shared = torch.minimum(*pairs_of(terms_per_sample(sample, samples, mask)))
    beyond = place_in_sample(sample, samples, mask) >= shared[sample // 2]
    return torch.ones_like(logprob).masked_fill(beyond, alpha)


def _policy_weight(logprob: Tensor, log_sum_p2: Tensor, sample: Tensor, samples: int, mask: Tensor) -> Tensor:
    """`[pairs]`: the product over a pair's two samples of exp(mean over tokens of log p - log Σ p²)."""
    aligned = (logprob.detach() - log_sum_p2.detach()).masked_fill(~mask, 0.0)
    chosen, rejected = pairs_of(mean_per_sample(aligned, sample, samples, mask))
    return (chosen + rejected).exp()
