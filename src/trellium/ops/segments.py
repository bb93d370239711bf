"""Sums over the terms of each sample.

A batch's terms come by sample, then by place, with fillers of weight 0 at the end. What a filler holds never counts, whatever it is, and has no gradient.
Linear in terms.
"""

from __future__ import annotations

import torch
from torch import Tensor


def per_sample(values: Tensor, sample: Tensor, weight: Tensor, samples: int) -> Tensor:
    """The sum of each sample's terms.

    Args:
        values: `[T]`.
        sample: `[T]` int64, whose term each is.
        weight: `[T]`, 0 for fillers; other values only say that it is none.
        samples: `S`.

    Returns:
        `[S]`, in the dtype of `values`; 0 for a sample without terms.
    """
    return values.new_zeros(samples).index_add(0, sample, values.masked_fill(weight == 0, 0.0))


def lengths_of(sample: Tensor, weight: Tensor, samples: int) -> Tensor:
    """`[S]` float32, how many terms each sample has."""
    return per_sample(torch.ones_like(weight, dtype=torch.float32), sample, weight, samples)


def place_in_sample(sample: Tensor, lengths: Tensor) -> Tensor:
    """`[T]` int64, the place of each term among those of its sample, from 0.

    Args:
        sample: `[T]` int64.
        lengths: `[S]`, as of `lengths_of`.
    """
    counts = lengths.to(torch.int64)
    return torch.arange(len(sample), device=sample.device) - (counts.cumsum(0) - counts)[sample]
