"""The operator behind `trellium.ops.head.weighted_nll`: a loss linear in the log-probability, with its gradients made in the forward pass.

A block of edges is projected over the whole vocabulary (`head_rows`). Its normalizers are then known before its logits are gone, so the gradients follow
without making them again: three products of 2·E·V·H operations (two when the head is frozen) and one exponential a logit, instead of four and two. The
normalizer, the edge's weight and the slope scale operands of `[block, H]`, not the logits. Label smoothing costs a second exponential. Where fewer
than `head_rows.PAYING_ROWS` edges a block leave room for their rows, as with 8,192 edges of 152,000 tokens, four products over large tiles take less time
than three of so few rows, and are made instead.

The price is that the weight's gradient is summed over blocks, in float32, and that gradients live from the forward to the backward. The backward
multiplies them by the incoming gradient in place, so it can run once; a second one is refused by autograd. A head of lower precision is cast once a
block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trellium.ops.head_gradients import BlockGradients, LogitGradient, Wanted, fake_gradients, sum_over_tiles
from trellium.ops.head_rows import RowBlock, RowPlan, row_blocks, row_plan
from trellium.ops.head_sharding import reduce_sum
from trellium.ops.head_statistics import Statistics, fold_tiles
from trellium.ops.head_tiles import Head


@dataclass(frozen=True, slots=True)
class _Loss:
    """What is made of each edge's distribution; `target` counted from this rank's first token, `wanted` as of `Statistics`."""

    target: Tensor
    edge_weight: Tensor
    dft: bool
    label_smoothing: float
    group: str
    wanted: dict[str, bool]

    def scale(self, statistics: Statistics, rows: slice) -> Tensor:
        """What the gradient of each edge's smoothed negative log-probability is multiplied by."""
        weight = self.edge_weight[rows]
        return weight * statistics.logprob().exp() if self.dft else weight


class _Found(NamedTuple):
    """Of each edge: log-probability, mean log-probability over the vocabulary, entropy, top-1; the last three None where not wanted."""

    logprob: Tensor
    uniform: Tensor | None
    entropy: Tensor | None
    top1: Tensor | None

    @staticmethod
    def of(statistics: Statistics) -> _Found:
        return _Found(statistics.logprob(), statistics.mean_logprob(), statistics.entropy(), statistics.first)


Gradients = tuple[Tensor, Tensor, Tensor]


def _by_rows(
    head: Head, loss: _Loss, plan: RowPlan, wanted: Wanted, weight_dtype: torch.dtype
) -> tuple[_Found, Gradients]:
    """In three products, a block of whole rows after the other."""
    gradients = BlockGradients(head, wanted)
    parts = []
    for rows, (block,) in row_blocks((head,), plan, gradients):
        statistics = block.statistics(loss.target[rows], **loss.wanted)
        _differentiate(block, statistics, loss)
        grad_rows = block.multiply(loss.scale(statistics, rows) * head.slope, statistics.total, gradients)
        if gradients.hidden is not None and grad_rows is not None:
            gradients.hidden[rows] = reduce_sum(grad_rows, loss.group)
        parts.append(_Found.of(statistics))
    columns = zip(*parts, strict=True)
    found = _Found(*(None if column[0] is None else torch.cat(column) for column in columns))
    return found, gradients.pack(weight_dtype)


def _differentiate(block: RowBlock, statistics: Statistics, loss: _Loss) -> None:
    """Fill the statistics, and the block's tiles with `total` times the gradient of each edge's smoothed negative log-probability."""
    smooths = loss.label_smoothing > 0
    block.project(statistics, fold=smooths)
    statistics.join_highest(loss.group)
    if not smooths:
        block.exponentiate(statistics)
    statistics.join_sums(block.pieces[-1][1], loss.group)
    if smooths:
        block.smooth(statistics, loss.label_smoothing)
    block.subtract_at_targets(statistics, 1.0 - loss.label_smoothing)


def _by_tiles(head: Head, loss: _Loss, wanted: Wanted, weight_dtype: torch.dtype) -> tuple[_Found, Gradients]:
    """In four products over large tiles, each logit made twice: where whole rows leave no room for enough edges."""
    statistics = fold_tiles(head, loss.target, loss.group, **loss.wanted)
    scale = loss.scale(statistics, slice(None))
    smoothed = scale * loss.label_smoothing / statistics.vocabulary
    gradient = LogitGradient(
        head,
        loss.target,
        statistics.highest,
        statistics.total.log(),
        of_target=scale * (loss.label_smoothing - 1.0),
        of_all=(-smoothed, statistics.vocabulary) if loss.label_smoothing else None,
    )
    gradients = sum_over_tiles(
        head,
        gradient,
        buffers=1 + (head.softcap is not None),
        wanted=wanted,
        weight_dtype=weight_dtype,
        group=loss.group,
    )
    return _Found.of(statistics), gradients


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
    loss = _Loss(
        target - first_token,
        edge_weight.to(head.statistics),
        dft,
        label_smoothing,
        group,
        {"moment": wants_entropy, "first": wants_top1, "plain": label_smoothing > 0},
    )
    wanted = (wants_hidden, wants_weight, wants_bias)
    plan = row_plan((head,), wants_hidden=wants_hidden, lends=wants_weight, group=group)
    if plan.pays:
        found, gradients = _by_rows(head, loss, plan, wanted, weight_dtype)
    else:
        found, gradients = _by_tiles(head, loss, wanted, weight_dtype)
    return (
        loss_of(found.logprob, found.uniform, loss.edge_weight, dft=dft, label_smoothing=label_smoothing),
        found.logprob,
        found.logprob.new_empty(0) if found.entropy is None else found.entropy,
        target.new_empty(0, dtype=torch.bool) if found.top1 is None else found.top1,
        *gradients,
    )


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
