"""The operator behind `trellium.ops.divergence`: whole rows of two heads' logits, a block of edges at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trellium.ops.head_gradients import BlockGradients, fake_gradients
from trellium.ops.head_nll import give_gradients, save_gradients
from trellium.ops.head_rows import RowBlock, row_blocks, row_plan
from trellium.ops.head_sharding import reduce_sum, reduce_sums
from trellium.ops.head_tiles import Head

_NEVER = -1e30
"""The log-probability of a token out of the distribution: finite, so that differences and products of such are."""


def _log_probabilities(block: RowBlock, group: str) -> Tensor:
    """Replace the block's logits by log-probabilities; the log-sum-exp `[rows, 1]` that was taken off."""
    statistics = block.statistics()
    block.project(statistics)
    statistics.join_highest(group)
    highest = statistics.highest.unsqueeze(1)
    for z in block.tiles:
        if block.head.outer != 1.0:
            z.mul_(block.head.outer)
        statistics.total += torch.exp(z.sub_(highest), out=block.work("probability", *z.shape)).sum(dim=1)
    log_total = reduce_sum(statistics.total, group).log().unsqueeze(1)
    for z in block.tiles:
        z.sub_(log_total).clamp_(min=_NEVER)
    return highest + log_total


def _terms(kind: str, number: float, log_s: Tensor, log_t: Tensor) -> tuple[Tensor, Tensor]:
    """Of a tile: each edge's share of the divergence `[rows]`, and w = p_s · ∂d/∂p_s `[rows, tokens]`."""
    s, t = log_s.exp(), log_t.exp()
    if kind == "total_variation":
        gap = s - t
        return 0.5 * gap.abs().sum(dim=1), s.mul_(gap.sign_()).mul_(0.5)
    if (kind == "jsd" and number == 0) or (kind == "skewed_kl" and number == 0):  # KL(t ‖ s)
        return (t * (log_t - log_s)).sum(dim=1), t.neg_()
    if kind == "jsd" and number == 1:  # KL(s ‖ t)
        w = s.mul_(log_s - log_t)
        return w.sum(dim=1), w
    log_m = torch.logaddexp(log_s + math.log1p(-number), log_t + math.log(number))
    if kind == "skewed_kl":
        share = (t * (log_t - log_m)).sum(dim=1)
        return share, s.mul_((log_t - log_m).exp_()).mul_(number - 1)
    w = s.mul_(log_s - log_m).mul_(1 - number)
    return number * (t * (log_t - log_m)).sum(dim=1) + w.sum(dim=1), w


def _diverge(student: RowBlock, teacher: RowBlock, kind: str, number: float, group: str) -> Tensor:
    """Each edge's divergence `[rows]`; the student's tiles become the gradient of its products, without slope and edge weight."""
    log_sum = _log_probabilities(student, group)
    _log_probabilities(teacher, group)
    value = log_sum.new_zeros(log_sum.shape[0])
    total_w = torch.zeros_like(value)
    for log_s, log_t in zip(student.tiles, teacher.tiles, strict=True):
        share, w = _terms(kind, number, log_s, log_t)
        value += share
        total_w += w.sum(dim=1)
        log_t.copy_(w)  # the teacher's own is not needed any more
    value, total_w = reduce_sums([value, total_w], group)
    for log_s, w in zip(student.tiles, teacher.tiles, strict=True):
        bend = None
        if student.head.softcap is not None:  # the derivative of tanh, from the logit
            bend = log_s.add(log_sum).div_(student.head.outer).square_().neg_().add_(1.0)
        log_s.exp_().mul_(-total_w.unsqueeze(1)).add_(w)
        if bend is not None:
            log_s.mul_(bend)
    return value


@torch.library.custom_op("trellium::divergence", mutates_args=())
def divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    student_bias: Tensor | None,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    edge_weight: Tensor,
    kind: str,
    number: float,
    temperature: float,
    student_logit_scale: float,
    student_softcap: float | None,
    teacher_logit_scale: float,
    teacher_softcap: float | None,
    group: str,
    wants_hidden: bool,
    wants_weight: bool,
    wants_bias: bool,
    weight_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The loss, each edge's divergence, and the gradients of the student's hidden, weight and bias for an incoming gradient of 1; empty where not wanted.

    `number`: the beta or skew that `kind` has; `group`: as of a `VocabularyShard`.
    """
    student = Head(student_hidden, student_weight, student_bias, temperature, student_logit_scale, student_softcap)
    teacher = Head(teacher_hidden, teacher_weight, teacher_bias, temperature, teacher_logit_scale, teacher_softcap)
    teacher.statistics, teacher.products = student.statistics, student.products
    gradients = BlockGradients(student, (wants_hidden, wants_weight, wants_bias))
    edge_weight = edge_weight.to(student.statistics)
    values = torch.zeros_like(edge_weight)
    plan = row_plan((student, teacher), wants_hidden=wants_hidden, lends=wants_weight, group=group)
    for rows, blocks in row_blocks((student, teacher), plan, gradients):
        values[rows] = _diverge(blocks[0], blocks[1], kind, number, group)
        scale = edge_weight[rows] * student.slope
        grad_rows = blocks[0].multiply(scale, torch.ones_like(scale), gradients)
        if gradients.hidden is not None and grad_rows is not None:
            gradients.hidden[rows] = reduce_sum(grad_rows, group)
    loss = (values.masked_fill(edge_weight == 0, 0.0) * edge_weight).sum()
    return (loss, values, *gradients.pack(weight_dtype))


@divergence.register_fake
def _(  # type: ignore[no-untyped-def]
    student_hidden, student_weight, student_bias, teacher_hidden, teacher_weight, teacher_bias, edge_weight, kind, number,
    temperature, student_logit_scale, student_softcap, teacher_logit_scale, teacher_softcap, group,
    wants_hidden, wants_weight, wants_bias, weight_dtype,
):  # fmt: skip
    edges = student_hidden.shape[0]
    dtype = torch.float64 if student_hidden.dtype == torch.float64 else torch.float32
    values = student_hidden.new_empty(edges, dtype=dtype)
    leaves = (student_hidden, student_weight, student_bias)
    return (
        values.new_empty(()),
        values,
        *fake_gradients(*leaves, (wants_hidden, wants_weight, wants_bias), weight_dtype),
    )


divergence.register_autograd(give_gradients, setup_context=save_gradients)
