"""The operator behind `trellium.ops.head.weighted_nll`: a loss linear in the log-probability, with its gradients made in the forward pass.

A block of edges is projected over the whole vocabulary (`head_rows`). Its normalizers are then known before its logits are gone, so the gradients follow
without making them again: three products of 2·E·V·H operations (two when the head is frozen) and one exponential a logit, instead of four and two. The
normalizer, the edge's weight and the slope scale operands of `[block, H]`, not the logits. Label smoothing costs a second exponential.

The price is that the weight's gradient is summed over blocks, in float32, and that gradients live from the forward to the backward. The backward
multiplies them by the incoming gradient in place, so it can run once; a second one is refused by autograd. A head of lower precision is cast once a
block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trellium.ops.head_gradients import BlockGradients, fake_gradients
from trellium.ops.head_rows import RowBlock, row_blocks
from trellium.ops.head_sharding import reduce_sum
from trellium.ops.head_statistics import Statistics
from trellium.ops.head_tiles import Head


def _differentiate_block(
    block: RowBlock, statistics: Statistics, edge_weight: Tensor, dft: bool, label_smoothing: float, group: str
) -> Tensor:
    """Fill the statistics, and the block's tiles with the gradient of its products, but for the factor over `total` that is returned."""
    smooths = label_smoothing > 0
    block.project(statistics, fold=smooths)
    statistics.join_highest(group)
    if not smooths:
        block.exponentiate(statistics)
    statistics.join_sums(block.pieces[-1][1], group)
    if smooths:
        block.smooth(statistics, label_smoothing)
    block.subtract_at_targets(statistics, 1.0 - label_smoothing)
    scale = edge_weight * block.head.slope
    return scale * statistics.logprob().exp() if dft else scale


@torch.library.custom_op("trellium::weighted_nll", mutates_args=())
def weighted_nll(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    edge_weight: Tensor,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    first_token: int,
    group: str,
    dft: bool,
    label_smoothing: float,
    wants_entropy: bool,
    wants_top1: bool,
    wants_hidden: bool,
    wants_weight: bool,
    wants_bias: bool,
    weight_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, log-probability, entropy, top-1, and the gradients of hidden, weight and bias for an incoming gradient of 1; empty where not wanted."""
    head = Head(hidden, weight, bias, temperature, logit_scale, softcap)
    gradients = BlockGradients(head, (wants_hidden, wants_weight, wants_bias))
    edge_weight = edge_weight.to(head.statistics)
    logprob = torch.zeros_like(edge_weight)
    uniform = torch.zeros_like(edge_weight) if label_smoothing else None
    entropy = logprob.new_zeros(logprob.shape[0] if wants_entropy else 0)
    top1 = target.new_zeros(target.shape[0] if wants_top1 else 0, dtype=torch.bool)
    wanted = {"moment": wants_entropy, "first": wants_top1, "plain": uniform is not None}
    for rows, (block,) in row_blocks((head,), gradients, other_bytes=hidden.nbytes if wants_hidden else 0):
        statistics = block.statistics(target[rows] - first_token, **wanted)
        scale = _differentiate_block(block, statistics, edge_weight[rows], dft, label_smoothing, group)
        grad_rows = block.multiply(scale, statistics.total, gradients)
        if gradients.hidden is not None and grad_rows is not None:
            gradients.hidden[rows] = reduce_sum(grad_rows, group)
        logprob[rows] = statistics.logprob()
        if uniform is not None:
            uniform[rows] = statistics.mean_logprob()
        if wants_entropy:
            entropy[rows] = statistics.entropy()
        if statistics.first is not None:
            top1[rows] = statistics.first
    loss = loss_of(logprob, uniform, edge_weight, dft=dft, label_smoothing=label_smoothing)
    return (loss, logprob, entropy, top1, *gradients.pack(weight_dtype))


def loss_of(
    logprob: Tensor, uniform: Tensor | None, edge_weight: Tensor, *, dft: bool, label_smoothing: float
) -> Tensor:
    """`-Σ edge_weight · logprob`, or with DFT `-Σ edge_weight · p · logprob`. An edge of weight 0 does not count, whatever its score.

    `uniform`: the mean log-probability over the vocabulary, which takes `label_smoothing` of the target's place.
    """
    scale = edge_weight * logprob.exp() if dft else edge_weight
    if uniform is not None:
        logprob = (1.0 - label_smoothing) * logprob + label_smoothing * uniform
    return -(logprob.masked_fill(edge_weight == 0, 0.0) * scale).sum()


@weighted_nll.register_fake
def _(  # type: ignore[no-untyped-def]
    hidden, weight, bias, target, edge_weight, temperature, logit_scale, softcap, first_token, group, dft, label_smoothing,
    wants_entropy, wants_top1, wants_hidden, wants_weight, wants_bias, weight_dtype,
):  # fmt: skip
    edges = hidden.shape[0]
    logprob = hidden.new_empty(edges, dtype=torch.float64 if hidden.dtype == torch.float64 else torch.float32)
    return (
        logprob.new_empty(()),
        logprob,
        logprob.new_empty(edges if wants_entropy else 0),
        target.new_empty(edges if wants_top1 else 0, dtype=torch.bool),
        *fake_gradients(hidden, weight, bias, (wants_hidden, wants_weight, wants_bias), weight_dtype),
    )


@torch.library.custom_op("trellium::scale_gradient", mutates_args=("gradient",))
def _scale_gradient(gradient: Tensor, factor: Tensor) -> None:
    """`gradient *= factor`: a gradient of the head's size is not copied."""
    gradient.mul_(factor)


@_scale_gradient.register_fake
def _(gradient, factor):  # type: ignore[no-untyped-def]
    return None


def save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """For an operator that returns a loss, other things, and last the gradients of its first three inputs."""
    ctx.save_for_backward(*output[-3:])
    ctx.inputs = len(inputs)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def give_gradients(ctx: Any, grad_loss: Tensor | None, *_: None) -> tuple[Any, ...]:
    """The saved gradients times the incoming one, in place."""
    found: list[Tensor | None] = [None] * ctx.inputs
    if grad_loss is None:
        return tuple(found)
    for place, gradient in enumerate(ctx.saved_tensors):
        if ctx.needs_input_grad[place]:
            _scale_gradient(gradient, grad_loss)
            found[place] = gradient
    return tuple(found)


weighted_nll.register_autograd(give_gradients, setup_context=save_gradients)
