from __future__ import annotations

import torch

from trellium.ops.losses import dft, nll


def test_nll_is_the_weighted_sum_over_the_normalizer():
    logprob = torch.tensor([-1.0, -2.0, -4.0])
    assert nll(logprob, torch.tensor([1.0, 0.5, 0.0]), 4).item() == 0.5
    assert nll(logprob, torch.ones(3), torch.tensor(7)).item() == 1.0


def test_an_edge_of_weight_zero_does_not_count_even_with_an_infinite_score():
    logprob = torch.tensor([-1.0, -torch.inf], requires_grad=True)
    for loss in (nll, dft):
        value = loss(logprob, torch.tensor([1.0, 0.0]), 1)
        assert value.isfinite()
        (gradient,) = torch.autograd.grad(value, logprob)
        assert gradient[1] == 0


def test_a_batch_that_trains_nothing_has_loss_zero():
    assert nll(torch.randn(4), torch.zeros(4), 1).item() == 0


def test_dft_weighs_each_token_by_its_constant_probability():
    logprob = torch.tensor([-0.1, -3.0], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([1.0, 2.0])
    value = dft(logprob, weight, 2)
    probability = logprob.detach().exp()
    torch.testing.assert_close(value, -(probability * logprob * weight).sum() / 2)
    (gradient,) = torch.autograd.grad(value, logprob)
    torch.testing.assert_close(gradient, -probability * weight / 2)
