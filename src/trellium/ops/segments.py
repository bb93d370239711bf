"""Terms to samples: sums, means, counts and places over what each sample says of its own tokens.

A term is one trained token of one sample: `sample[T]` says of which, and terms come in the order of samples, then of positions. What fills up the fixed
number of terms has weight 0 and may hold anything, infinities too: it is blanked before any arithmetic, so that neither a sum nor a gradient sees it.
One `index_add` a sum, O(T), no shape that depends on data; on the host the order of additions is fixed.

Samples of a preference stand in pairs: the chosen one at 2i, the rejected one at 2i + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SampleScores:
    """What policy and reference say of `S` samples.

    Attributes:
        logprob: `[S]`, the policy's log-probability of the sample's trained tokens; differentiable.
        reference_logprob: `[S]`, the reference's.
        log_ratio: `[S]`, the first minus the second, but summed from the differences at each token: the difference of two long sums would lose
            what the two agree on. Differentiable.
        tokens: `[S]` float, the number of trained tokens.
    """

    logprob: Tensor
    reference_logprob: Tensor
    log_ratio: Tensor
    tokens: Tensor


def sample_scores(
    logprob: Tensor,
    reference_logprob: Tensor,
    sample: Tensor,
    samples: int,
    *,
    mask: Tensor,
    weight: Tensor | None = None,
) -> SampleScores:
    """Sum the scores of terms to those of samples; a sample without terms has zeros.

    Args:
        logprob: `[T]`, the policy's log-probability of each term's token.
        reference_logprob: `[T]`, the reference's; it gets no gradient.
        sample: `[T]` int64 in `[0, samples)`, also where the mask is false.
        samples: `S`.
        mask: `[T]` bool, false for what fills up.
        weight: `[T]`, by which a term counts in the sums; 1 where None. `tokens` ignores it.
    """
    weight = mask.to(logprob.dtype) if weight is None else weight.masked_fill(~mask, 0.0)
    reference = reference_logprob.detach().to(logprob.dtype).masked_fill(~mask, 0.0)
    difference = logprob.masked_fill(~mask, 0.0) - reference
    return SampleScores(
        logprob=per_sample(logprob, sample, samples, weight),
        reference_logprob=per_sample(reference, sample, samples, weight),
        log_ratio=per_sample(difference, sample, samples, weight),
        tokens=terms_per_sample(sample, samples, mask).to(logprob.dtype),
    )


def per_sample(values: Tensor, sample: Tensor, samples: int, weight: Tensor | None = None) -> Tensor:
    """Σ weight · value over each sample's terms, `[samples]`; 0 for a sample without any.

    Args:
        values: `[T]`; where the weight is 0 it may be anything.
        sample: `[T]` int64 in `[0, samples)`.
        samples: how many there are, those without terms included.
        weight: `[T]` or bool, 1 where None.
    """
    if weight is not None:
        values = values.masked_fill(weight == 0, 0.0) * weight.to(values.dtype)
    return values.new_zeros(samples).index_add(0, sample, values)


def mean_per_sample(values: Tensor, sample: Tensor, samples: int, weight: Tensor | None = None) -> Tensor:
    """Σ weight · value / Σ weight over each sample's terms, `[samples]`; 0 where the weights sum to 0. Arguments as for `per_sample`."""
    weight = torch.ones_like(values) if weight is None else weight.to(values.dtype)
    total = per_sample(weight, sample, samples)
    return per_sample(values, sample, samples, weight) / total.masked_fill(total == 0, 1.0)


def terms_per_sample(sample: Tensor, samples: int, mask: Tensor) -> Tensor:
    """How many terms of each sample count, `[samples]` int64."""
    return per_sample(mask.to(torch.int64), sample, samples)


def place_in_sample(sample: Tensor, samples: int, mask: Tensor) -> Tensor:
    """How many counting terms of its own sample stand before each term, `[T]` int64; without meaning where the mask is false."""
    before_sample = terms_per_sample(sample, samples, mask).cumsum(0)
    before_term = mask.to(torch.int64).cumsum(0) - 1
    first = torch.cat([before_sample.new_zeros(1), before_sample[:-1]])
    return before_term - first[sample]


def pairs_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """The chosen and the rejected of `[2 · pairs]` samples, each `[pairs]`.

    Raises:
        ValueError: an odd number of samples.
    """
    if values.shape[0] % 2:
        raise ValueError(
            f"a pair is a chosen and a rejected sample, 2i and 2i + 1: their number must be even, got {values.shape[0]}"
        )
    return values[0::2], values[1::2]
