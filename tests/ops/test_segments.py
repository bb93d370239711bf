from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trellium.ops.segments import (
    mean_per_sample,
    pairs_of,
    per_sample,
    place_in_sample,
    sample_scores,
    terms_per_sample,
)

RUBBISH = (torch.inf, -torch.inf, torch.nan, 1e30)


@dataclass
class Terms:
    """Scores of samples, one after the other, with what fills up in between."""

    logprob: Tensor
    reference_logprob: Tensor
    log_sum_p2: Tensor
    sample: Tensor
    mask: Tensor

    def of(self, sample: int) -> Tensor:
        """Where the terms of a sample are."""
        return (self.mask & (self.sample == sample)).nonzero().squeeze(1)


def make_terms(lengths: list[int], *, fillers: int = 0, seed: int = 0, dtype: torch.dtype = torch.float64) -> Terms:
    """The same scores for the same lengths and seed, whatever fills up; that holds rubbish, of any sample, at any place."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    logprob = -3 * torch.rand(count, generator=generator, dtype=torch.float64)
    reference = logprob + 0.3 * torch.randn(count, generator=generator, dtype=torch.float64)
    log_sum_p2 = -2 * torch.rand(count, generator=generator, dtype=torch.float64)
    sample = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))

    total = count + fillers
    places = torch.randperm(total, generator=generator)[:count].sort().values

    def spread(values: Tensor) -> Tensor:
        full = torch.tensor(RUBBISH, dtype=torch.float64).repeat(total)[:total].to(dtype)
        return full.index_copy(0, places, values.to(dtype))

    everywhere = torch.randint(max(len(lengths), 1), (total,), generator=generator).index_copy(0, places, sample)
    mask = torch.zeros(total, dtype=torch.bool).index_fill(0, places, True)
    return Terms(spread(logprob).requires_grad_(), spread(reference), spread(log_sum_p2), everywhere, mask)


lengths_of_samples = st.lists(st.integers(0, 5), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(lengths=lengths_of_samples, fillers=st.integers(0, 5), seed=st.integers(0, 1000))
def test_sums_means_counts_and_places_are_those_of_each_sample_alone(lengths, fillers, seed):
    terms = make_terms(lengths, fillers=fillers, seed=seed)
    weight = torch.rand(len(terms.sample), dtype=torch.float64) * terms.mask
    arguments = (terms.sample, len(lengths))
    sums, means = (of(terms.logprob, *arguments, weight) for of in (per_sample, mean_per_sample))
    counts, places = (of(*arguments, terms.mask) for of in (terms_per_sample, place_in_sample))
    for index, length in enumerate(lengths):
        own = terms.of(index)
        weighted = (terms.logprob[own] * weight[own]).sum()
        torch.testing.assert_close(sums[index], weighted)
        torch.testing.assert_close(means[index], weighted / weight[own].sum() if length else weighted)
        assert counts[index] == length
        assert places[own].tolist() == list(range(length))


@settings(max_examples=20, deadline=None)
@given(lengths=lengths_of_samples, fillers=st.integers(0, 5), seed=st.integers(0, 1000))
def test_scores_of_samples_do_not_see_what_fills_up(lengths, fillers, seed):
    def scores_and_gradient(terms: Terms):
        scores = sample_scores(terms.logprob, terms.reference_logprob, terms.sample, len(lengths), mask=terms.mask)
        (gradient,) = torch.autograd.grad((scores.logprob**2 + scores.log_ratio**3).sum(), terms.logprob)
        assert (gradient[~terms.mask] == 0).all()
        return scores.logprob, scores.reference_logprob, scores.log_ratio, scores.tokens, gradient[terms.mask]

    without = scores_and_gradient(make_terms(lengths, seed=seed))
    assert all(map(torch.equal, scores_and_gradient(make_terms(lengths, fillers=fillers, seed=seed)), without))
    assert without[3].tolist() == lengths


def test_values_without_weights_are_summed_and_averaged_as_they_are():
    values, sample = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 0, 2])
    assert per_sample(values, sample, 3).tolist() == [3, 0, 4]
    assert mean_per_sample(values, sample, 3).tolist() == [1.5, 0, 4]


def test_a_log_ratio_keeps_what_the_difference_of_long_sums_loses():
    tokens = 20_000
    logprob = -3 * torch.rand(tokens, generator=torch.Generator().manual_seed(0))
    difference = torch.full((tokens,), 1e-5)
    scores = sample_scores(
        logprob + difference,
        logprob,
        torch.zeros(tokens, dtype=torch.int64),
        1,
        mask=torch.ones(tokens, dtype=torch.bool),
    )
    expected = ((logprob + difference).double() - logprob.double()).sum()
    assert abs(scores.log_ratio[0] - expected) < 1e-5 * expected
    assert abs(scores.logprob[0] - scores.reference_logprob[0] - expected) > 1e-3 * expected


def test_pairs_alternate_and_an_odd_sample_is_refused():
    chosen, rejected = pairs_of(torch.arange(6))
    assert (chosen.tolist(), rejected.tolist()) == ([0, 2, 4], [1, 3, 5])
    with pytest.raises(ValueError, match="even, got 3"):
        pairs_of(torch.arange(3))
