from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.test_head import cut_small, full_log_probabilities
from trellium.ops.divergence import divergence

CASES = [
    ("jsd", 0.0),
    ("jsd", 1.0),
    ("jsd", 0.5),
    ("jsd", 0.1),
    ("skewed_kl", 0.1),
    ("skewed_kl", 0.0),
    ("total_variation", 0.5),
]


def plain_log_probabilities(hidden, weight, bias, temperature, scale, softcap) -> Tensor:
    return full_log_probabilities(
        hidden, weight, bias=bias, temperature=temperature, logit_scale=scale, softcap=softcap
    )


def plain_divergence(log_s: Tensor, log_t: Tensor, kind: str, number: float) -> Tensor:
    """Each edge's, by definition."""

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return (p.exp() * (p - q)).sum(-1)

    if kind == "total_variation":
        return 0.5 * (log_s.exp() - log_t.exp()).abs().sum(-1)
    if number == 0:
        return kl(log_t, log_s)
    if kind == "jsd" and number == 1:
        return kl(log_s, log_t)
    log_m = torch.log(number * log_t.exp() + (1 - number) * log_s.exp())
    return kl(log_t, log_m) if kind == "skewed_kl" else number * kl(log_t, log_m) + (1 - number) * kl(log_s, log_m)


def models(edges: int, vocabulary: int, *, with_bias: bool, seed: int = 0, dtype=torch.float64):
    """Hidden states, head and bias of a student of width 5 and a teacher of width 7."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for width in (5, 7):
        hidden, weight = (torch.randn(n, width, generator=generator, dtype=torch.float64) for n in (edges, vocabulary))
        bias = torch.randn(vocabulary, generator=generator, dtype=torch.float64) if with_bias else None
        made.append([None if tensor is None else tensor.to(dtype) for tensor in (hidden, weight, bias)])
    leaves = [leaf.requires_grad_() for leaf in made[0] if leaf is not None]
    return made[0], made[1], leaves


def call(student, teacher, edge_weight, case, *, temperature=1.0, scales=(1.0, 1.0), softcaps=(None, None)):
    return divergence(
        student[0],
        student[1],
        teacher[0],
        teacher[1],
        edge_weight,
        kind=case[0],
        beta=case[1],
        skew=0.1 if case[0] != "skewed_kl" else case[1],
        temperature=temperature,
        student_bias=student[2],
        teacher_bias=teacher[2],
        student_logit_scale=scales[0],
        teacher_logit_scale=scales[1],
        student_softcap=softcaps[0],
        teacher_softcap=softcaps[1],
    )


@settings(max_examples=60, deadline=None)
@given(
    edges=st.integers(0, 9),
    vocabulary=st.integers(1, 300),
    with_bias=st.booleans(),
    case=st.sampled_from(CASES),
    temperature=st.sampled_from([1.0, 0.7, 3.0]),
    scales=st.sampled_from([(1.0, 1.0), (0.25, -2.0)]),
    softcaps=st.sampled_from([(None, None), (3.0, None), (4.0, 20.0)]),
    small=st.booleans(),
    untrained=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_loss_and_gradients_are_those_of_full_logits(
    edges, vocabulary, with_bias, case, temperature, scales, softcaps, small, untrained, seed
):
    student, teacher, leaves = models(edges, vocabulary, with_bias=with_bias, seed=seed)
    edge_weight = torch.rand(edges, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    edge_weight[:: 1 if untrained else 3] = 0
    with pytest.MonkeyPatch.context() as patch:
        if small:
            cut_small(patch, 2, 64)
        loss, values = call(
            student, teacher, edge_weight, case, temperature=temperature, scales=scales, softcaps=softcaps
        )
        gradients = torch.autograd.grad(loss / 3, leaves)
    log_s, log_t = (
        plain_log_probabilities(*model, temperature, scale, softcap)
        for model, scale, softcap in zip((student, teacher), scales, softcaps, strict=True)
    )
    plain = plain_divergence(log_s, log_t, *case)
    torch.testing.assert_close(values, plain, rtol=1e-10, atol=1e-10)
    expected = (plain * edge_weight).sum()
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected / 3, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_a_model_does_not_diverge_from_itself(case):
    student, _, leaves = models(5, 100, with_bias=True)
    same = [tensor.detach().clone() for tensor in student]
    loss, values = call(student, same, None, case)
    torch.testing.assert_close(values, torch.zeros_like(values), rtol=0, atol=1e-12)
    if case[0] != "total_variation":  # whose slope is not continuous there
        for gradient in torch.autograd.grad(loss, leaves):
            assert gradient.abs().max() < 1e-12


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_no_further_from_the_truth_than_full_logits(case, dtype):
    student, teacher, leaves = models(20, 300, with_bias=False, dtype=dtype)
    loss, _ = call(student, teacher, None, case)
    gradients = torch.autograd.grad(loss, leaves)
    assert [gradient.dtype for gradient in gradients] == [dtype, dtype]

    def full_logits(models) -> tuple[Tensor, ...]:
        log_s, log_t = ((hidden @ weight.T).to(statistics).log_softmax(-1) for hidden, weight, _ in models)
        value = plain_divergence(log_s, log_t, *case).sum()
        return (value, *torch.autograd.grad(value, models[0][:2]))

    statistics = torch.float32
    plain = full_logits((student, teacher))
    statistics = torch.float64
    exact = [
        [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in model]
        for model in (student, teacher)
    ]
    truth = full_logits(exact)
    for ours, theirs, true in zip((loss, *gradients), plain, truth, strict=True):
        allowed = 2 * (theirs - true).norm() + torch.finfo(dtype).eps * true.norm()
        assert (ours - true).norm() <= allowed


def test_tokens_that_neither_model_can_say_do_not_count():
    student, teacher, leaves = models(6, 200, with_bias=True)
    with torch.no_grad():
        student[2][:70] = teacher[2][:70] = -torch.inf
    loss, values = call(student, teacher, None, ("jsd", 0.5))
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss, leaves))
    cut = [[model[0], model[1][70:], model[2][70:]] for model in (student, teacher)]
    torch.testing.assert_close(values, call(*cut, None, ("jsd", 0.5))[1], rtol=1e-10, atol=1e-10)


def test_the_jensen_shannon_divergence_is_bounded_where_logits_are_huge():
    student, teacher, leaves = models(6, 200, with_bias=False)
    student[0] = (student[0].detach() * 1e5).requires_grad_()
    teacher[0] = teacher[0] * -1e5
    loss, values = call(student, teacher, None, ("jsd", 0.5))
    assert ((values >= 0) & (values <= math.log(2) + 1e-9)).all()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss, [student[0], leaves[1]]))


def test_neither_the_teacher_nor_a_frozen_head_gets_a_gradient():
    student, teacher, _ = models(5, 100, with_bias=False)
    student[1].requires_grad_(False)
    teacher = [None if tensor is None else tensor.requires_grad_() for tensor in teacher]
    call(student, teacher, None, ("jsd", 1.0))[0].backward()
    assert student[0].grad.any()
    assert student[1].grad is None
    assert teacher[0].grad is None


def test_it_is_one_graph():
    student, teacher, leaves = models(5, 100, with_bias=True)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=False)
    ours, theirs = (function(student, teacher, None, ("jsd", 0.3))[0] for function in (compiled, call))
    torch.testing.assert_close(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "hellinger"}, "kind must be one of"),
        ({"beta": 1.5}, r"beta must be in \[0, 1\]"),
        ({"skew": 1.0}, r"skew must be in \[0, 1\)"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"teacher_weight": torch.zeros(11, 4)}, "one vocabulary, got 10 and 11"),
        ({"teacher_hidden": torch.zeros(2, 4)}, "same edges, got 3 and 2"),
        ({"edge_weight": torch.ones(2)}, r"edge_weight must be \[E\]"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(change, message):
    arguments = {
        "student_hidden": torch.zeros(3, 4),
        "student_weight": torch.zeros(10, 4),
        "teacher_hidden": torch.zeros(3, 4),
        "teacher_weight": torch.zeros(10, 4),
    }
    with pytest.raises(ValueError, match=message):
        divergence(**{**arguments, **change})
