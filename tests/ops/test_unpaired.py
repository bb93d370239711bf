from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.test_segments import Terms, make_terms
from trellium.errors import ConfigError
from trellium.ops.segments import sample_scores
from trellium.ops.unpaired import (
    UNPAIRED_LOSSES,
    UnpairedOptions,
    mismatched_kl,
    reference_point,
    unpaired_loss,
    unpaired_metrics,
)

LABELS = torch.tensor([True, False, False, True, True])
REAL = torch.ones(5, dtype=torch.bool)
OPTIONS = UnpairedOptions(beta=0.3, desirable_weight=1.3, undesirable_weight=0.7)


def scores_of(terms: Terms, samples: int):
    return sample_scores(terms.logprob, terms.reference_logprob, terms.sample, samples, mask=terms.mask)


def log_ratios(terms: Terms, samples: int) -> list[Tensor]:
    return [(terms.logprob[own] - terms.reference_logprob[own]).sum() for own in map(terms.of, range(samples))]


def value_and_gradient(loss: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    return loss.detach(), torch.autograd.grad(loss.sum(), terms.logprob)[0]


@pytest.mark.parametrize("loss", UNPAIRED_LOSSES)
@settings(max_examples=25, deadline=None)
@given(
    samples=st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=5),
    kl=st.floats(0, 3),
    seed=st.integers(0, 1000),
)
def test_each_loss_is_its_paper_s_in_value_and_gradient(loss, samples, kl, seed):
    lengths, labels = zip(*samples, strict=True)
    options = UnpairedOptions(loss_type=loss, beta=0.3, desirable_weight=1.3, undesirable_weight=0.7)
    terms, z = make_terms(list(lengths), seed=seed), torch.tensor(kl if loss == "kto" else 0.0, dtype=torch.float64)
    found = unpaired_loss(
        scores_of(terms, len(lengths)), torch.tensor(labels), torch.ones(len(lengths)) > 0, options, reference_kl=z
    )
    plain = []
    for r, good in zip(log_ratios(terms, len(lengths)), labels, strict=True):
        value = 1 / (1 + torch.exp(-0.3 * (r - z if good else z - r)))  # the paper's v, without its λ
        plain.append(1.3 * (1 - value) if good else 0.7 * (1 - value))
    torch.testing.assert_close(value_and_gradient(found, terms), value_and_gradient(torch.stack(plain), terms))


@pytest.mark.parametrize("loss", UNPAIRED_LOSSES)
def test_what_fills_up_changes_neither_loss_nor_gradient_nor_metric(loss):
    options, kl = UnpairedOptions(loss_type=loss), torch.tensor(0.5)
    alone, filled = make_terms([2, 3, 0, 1, 4]), make_terms([2, 3, 0, 1, 4], fillers=6)
    value, gradient = value_and_gradient(unpaired_loss(scores_of(alone, 5), LABELS, REAL, options, kl), alone)
    labels, real = torch.cat([LABELS, torch.tensor([True, False])]), torch.arange(7) < 5
    scores = scores_of(filled, 7)
    found, filled_gradient = value_and_gradient(unpaired_loss(scores, labels, real, options, kl), filled)
    assert torch.equal(found, torch.cat([value, value.new_zeros(2)]))
    assert torch.equal(filled_gradient[filled.mask], gradient)
    assert (filled_gradient[~filled.mask] == 0).all()
    assert unpaired_metrics(scores, labels, real, options) == unpaired_metrics(
        scores_of(alone, 5), LABELS, REAL, options
    )


def test_samples_that_fill_up_may_hold_anything():
    scores, real = scores_of(make_terms([1, 1]), 2), torch.tensor([True, False])
    scores.log_ratio.data[1] = torch.nan
    loss = unpaired_loss(scores, torch.tensor([True, True]), real, OPTIONS, torch.tensor(0.0))
    assert loss.isfinite().all()
    assert all(total.isfinite() for total, _ in unpaired_metrics(scores, real, real, OPTIONS).values())


def test_the_kl_is_the_mean_of_real_mismatched_pairs_and_never_below_zero():
    log_ratio, real = torch.tensor([1.0, -0.5, torch.nan], requires_grad=True), torch.tensor([True, True, False])
    total, count = mismatched_kl(log_ratio, real)
    assert (total.item(), count.item()) == (0.5, 2)
    assert not total.requires_grad
    assert reference_point(total, count).item() == 0.25
    assert reference_point(-total, count).item() == 0
    assert reference_point(*mismatched_kl(log_ratio, torch.zeros(3, dtype=torch.bool))).item() == 0


def test_the_reference_point_gets_no_gradient():
    kl = torch.tensor(0.5, requires_grad=True)
    loss = unpaired_loss(scores_of(make_terms([1, 1, 1, 1, 1]), 5), LABELS, REAL, OPTIONS, kl).sum()
    assert torch.autograd.grad(loss, kl, allow_unused=True) == (None,)


@pytest.mark.parametrize("label", [True, False])
def test_a_batch_of_one_kind_has_a_loss_and_counts_nothing_of_the_other(label):
    terms, labels = make_terms([2, 3]), torch.full((2,), label)
    scores, real = scores_of(terms, 2), torch.ones(2, dtype=torch.bool)
    loss, gradient = value_and_gradient(unpaired_loss(scores, labels, real, OPTIONS, torch.tensor(0.1)), terms)
    assert loss.isfinite().all()
    assert (gradient != 0).all()
    metrics = unpaired_metrics(scores, labels, real, OPTIONS)
    absent, present = ("rejected", "chosen") if label else ("chosen", "rejected")
    for name in ("rewards", "logps"):
        assert [value.item() for value in metrics[f"{name}/{absent}"]] == [0, 0]
        assert metrics[f"{name}/{present}"][1] == 2


def test_metrics_are_sums_over_each_kind():
    terms = make_terms([2, 3, 1, 1, 4])
    metrics = unpaired_metrics(scores_of(terms, 5), LABELS, REAL, OPTIONS)
    ratios = torch.stack(log_ratios(terms, 5)).detach()
    for kind, members in (("chosen", LABELS), ("rejected", ~LABELS)):
        total, count = metrics[f"rewards/{kind}"]
        torch.testing.assert_close(total, 0.3 * ratios[members].sum())
        assert count == members.sum()
        expected = sum(terms.logprob[terms.of(index)].sum() for index in members.nonzero())
        torch.testing.assert_close(metrics[f"logps/{kind}"][0], expected.detach())


def test_micro_batches_add_up_to_the_batch():
    terms, kl = make_terms([2, 3, 1, 1, 4]), torch.tensor(0.2)
    scores = scores_of(terms, 5)
    parts = [torch.arange(5) < 2, torch.arange(5) >= 2]
    total = sum(unpaired_loss(scores, LABELS, real, OPTIONS, kl).sum() for real in parts)
    torch.testing.assert_close(total, unpaired_loss(scores, LABELS, REAL, OPTIONS, kl).sum())


def test_kto_without_its_reference_point_is_refused():
    with pytest.raises(ValueError, match="needs reference_kl"):
        unpaired_loss(scores_of(make_terms([1] * 5), 5), LABELS, REAL, OPTIONS)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"loss_type": "kot"}, "Did you mean 'kto'"),
        ({"beta": 0.0}, "beta must be a number above 0"),
        ({"desirable_weight": -1.0}, "desirable_weight must be a number from 0"),
        ({"undesirable_weight": math.nan}, "undesirable_weight must be"),
    ],
)
def test_options_that_cannot_be_say_the_way_out(given, said):
    with pytest.raises(ConfigError, match=said):
        UnpairedOptions(**given)
