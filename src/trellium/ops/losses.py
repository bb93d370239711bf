"""Losses as pure functions of per-token scores.

A loss exists once. It knows nothing of models, rows or devices: it takes `[E]` scores and weights and returns a scalar, so every option works with
every layout. Reductions are explicit: a sum over edges divided by the `normalizer` that the caller gives.
"""

from __future__ import annotations

from torch import Tensor


def nll(logprob: Tensor, edge_weight: Tensor, normalizer: Tensor | float) -> Tensor:
    """Negative log-likelihood: `-Σ edge_weight · logprob / normalizer`.

    Args:
        logprob: `[E]`, the log-probability of each trained token.
        edge_weight: `[E]`, its weight; an edge of weight 0 does not count, whatever its score.
        normalizer: what the sum is divided by: the number of trained tokens of the whole optimizer step for a token mean.

    Returns:
        `[]`, in `logprob`'s dtype.
    """
    return -_weighted_sum(logprob, edge_weight) / normalizer


def dft(logprob: Tensor, edge_weight: Tensor, normalizer: Tensor | float) -> Tensor:
    """Dynamic fine-tuning: each token's negative log-likelihood times its own probability, which is held constant.

    Removes the inverse-probability factor that makes the gradient of supervised fine-tuning large where the model thinks a token unlikely.

    Args:
        logprob, edge_weight, normalizer: as for `nll`.

    Returns:
        `[]`, in `logprob`'s dtype.

    Source: Wu et al. 2025, "On the Generalization of SFT: A Reinforcement Learning Perspective with Reward Rectification" (arXiv:2508.05629).
    """
    return -_weighted_sum(logprob.detach().exp() * logprob, edge_weight) / normalizer


def _weighted_sum(score: Tensor, edge_weight: Tensor) -> Tensor:
    # Where the weight is 0 the score may be -inf (a token taken out of the distribution): 0 · -inf must not become the batch's loss.
    weight = edge_weight.to(score.dtype)
    return (score.masked_fill(weight == 0, 0.0) * weight).sum()
