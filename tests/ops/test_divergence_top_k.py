from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.test_divergence import call, models, plain_divergence, plain_log_probabilities
from tests.ops.test_head import cut_small
from trellium.ops.divergence_top_k import top_k_divergence


@settings(max_examples=40, deadline=None)
@given(
    edges=st.integers(0, 7),
    vocabulary=st.integers(8, 200),
    count=st.integers(1, 7),
    with_bias=st.booleans(),
    beta=st.sampled_from([0.0, 0.3, 1.0]),
    temperature=st.sampled_from([1.0, 0.7]),
    softcap=st.sampled_from([None, 3.0]),
    small=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_it_is_the_divergence_of_the_distributions_seen_through_the_teacher_s_tokens(
    edges, vocabulary, count, with_bias, beta, temperature, softcap, small, seed
):
    student, teacher, leaves = models(edges, vocabulary, with_bias=with_bias, seed=seed)
    log_t = plain_log_probabilities(*teacher, temperature, 1.0, None)
    teacher_logprob, tokens = log_t.topk(count, dim=-1)
    options = {"beta": beta, "temperature": temperature, "softcap": softcap, "bias": student[2]}
    weights = torch.rand(edges, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        if small:
            cut_small(patch, 2, 64)
        values = top_k_divergence(student[0], student[1], tokens, teacher_logprob, **options)
        gradients = torch.autograd.grad((values * weights).sum(), leaves)

    def seen(log_p):
        known = log_p.exp().gather(1, tokens)
        return torch.cat([known, 1 - known.sum(1, keepdim=True)], 1).log()

    log_s = plain_log_probabilities(*student, temperature, 1.0, softcap)
    plain = plain_divergence(seen(log_s), seen(log_t), "jsd", beta)
    torch.testing.assert_close(values, plain, rtol=1e-9, atol=1e-9)
    for ours, theirs in zip(gradients, torch.autograd.grad((plain * weights).sum(), leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_it_bounds_the_full_divergence_from_below_and_reaches_it(beta):
    student, teacher, _ = models(6, 40, with_bias=False)
    full = call(student, teacher, None, ("jsd", beta))[1]
    log_t = plain_log_probabilities(*teacher, 1.0, 1.0, None)
    before = torch.zeros_like(full)
    for count in (1, 10, 39):
        teacher_logprob, tokens = log_t.topk(count, dim=-1)
        seen = top_k_divergence(student[0], student[1], tokens, teacher_logprob, beta=beta)
        assert (seen >= before - 1e-9).all()
        assert (seen <= full + 1e-9).all()
        before = seen.detach()
    torch.testing.assert_close(before, full)  # all but one token, which is the tail


def test_places_that_a_server_left_empty_and_a_certain_teacher_stay_finite():
    student, _, leaves = models(2, 40, with_bias=False, dtype=torch.float32)
    tokens = torch.tensor([[3, 4, 5], [6, 7, 8]])
    teacher_logprob = torch.tensor([[0.0, -torch.inf, -torch.inf], [-0.1, -3.0, -torch.inf]])
    for beta in (0.0, 0.5):
        values = top_k_divergence(student[0], student[1], tokens, teacher_logprob, beta=beta)
        assert values.isfinite().all()
        assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(values.sum(), leaves))


def test_what_does_not_fit_is_refused_by_name():
    hidden, weight, tokens = torch.zeros(3, 4), torch.zeros(10, 4), torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"must be \[E, K\]"):
        top_k_divergence(hidden, weight, tokens, torch.zeros(3, 3))
    with pytest.raises(ValueError, match="beta must be in"):
        top_k_divergence(hidden, weight, tokens, torch.zeros(3, 2), beta=-1.0)
