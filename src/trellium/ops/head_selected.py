"""The log-probabilities of several given tokens an edge, without logits: what a teacher's top-k is compared with.

The same walk over tiles as `head_scores`, with `K` places an edge gathered instead of one; the backward scatters `K`. Cost: one product of 2·E·V·H
operations forward, three backward (two when the head is frozen).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trellium.ops.head_scores import Statistics, WeightGradient
from trellium.ops.head_tiles import Head, Workspace, add_product, tile_plan, widest


def _inside(tokens: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Which of the tokens lie in a tile, and where (0 for those that do not)."""
    place = tokens - start
    here = (place >= 0) & (place < width)
    return here, place.masked_fill(~here, 0)


@torch.library.custom_op("trellium::selected_logprobs", mutates_args=())
def selected_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    weight_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """`[E, K]` log-probabilities, and for the backward the highest logit and log Σ exp(z - highest), `[E]`."""
    head = Head(hidden, weight, bias, temperature, logit_scale, softcap)
    (edges, width), itemsize = hidden.shape, head.statistics.itemsize
    factors = hidden.to(head.products)
    edge_pieces, token_pieces = tile_plan(
        edges,
        weight.shape[0],
        width,
        itemsize=itemsize,
        buffers=1,
        other_bytes=(factors is not hidden) * factors.nbytes,
    )
    work = Workspace(hidden, widest(edge_pieces) * widest(token_pieces), head.statistics)
    chosen = hidden.new_zeros(tokens.shape, dtype=head.statistics)
    statistics = Statistics(chosen, tokens.new_zeros(edges), lowest=head.lowest)
    for tile in head.tiles(token_pieces):
        for start, stop in edge_pieces:
            z = head.project(factors[start:stop], tile, work("z", stop - start, tile.width), work)
            if head.outer != 1.0:
                z.mul_(head.outer)
            here, place = _inside(tokens[start:stop], tile.start, tile.width)
            chosen[start:stop] = torch.where(here, z.gather(1, place), chosen[start:stop])
            statistics.fold(z, slice(start, stop), tile.start, work)
    log_total = statistics.total.log()
    return (chosen - statistics.highest.unsqueeze(1)) - log_total.unsqueeze(1), statistics.highest, log_total


@selected_logprobs.register_fake
def _(hidden, weight, bias, tokens, temperature, logit_scale, softcap, weight_dtype):  # type: ignore[no-untyped-def]
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    edges = hidden.shape[0]
    return tuple(hidden.new_empty(shape, dtype=dtype) for shape in (tokens.shape, (edges,), (edges,)))


@torch.library.custom_op("trellium::selected_logprobs_backward", mutates_args=())
def selected_logprobs_backward(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    highest: Tensor,
    log_total: Tensor,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    wants_hidden: bool,
    wants_weight: bool,
    wants_bias: bool,
    weight_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias, empty where not wanted. d Σ_k g_k logprob_k = Σ_k g_k 1[token_k] - p Σ_k g_k."""
    head = Head(hidden, weight, bias, temperature, logit_scale, softcap)
    (edges, width), itemsize = hidden.shape, head.statistics.itemsize
    grad = grad.to(head.statistics) * head.slope
    factors = hidden.to(head.products)
    grad_hidden = torch.zeros_like(hidden, dtype=head.statistics) if wants_hidden else None
    held = (factors is not hidden) * factors.nbytes + (0 if grad_hidden is None else grad_hidden.nbytes)
    edge_pieces, token_pieces = tile_plan(
        edges, weight.shape[0], width, itemsize=itemsize, buffers=1 + (softcap is not None), other_bytes=held
    )
    work = Workspace(hidden, widest(edge_pieces) * widest(token_pieces), head.statistics)
    gathered = WeightGradient(head, weight=wants_weight, bias=wants_bias, dtype=weight_dtype)
    minus_sum = -grad.sum(dim=1, keepdim=True)
    for tile in head.tiles(token_pieces):
        gathered.open(tile)
        for start, stop in edge_pieces:
            z = head.project(factors[start:stop], tile, work("z", stop - start, tile.width), work)
            bend = None
            if softcap is not None:  # the derivative of tanh
                bend = torch.mul(z, z, out=work("bend", *z.shape)).neg_().add_(1.0)
                z.mul_(head.outer)
            z.sub_(highest[start:stop].unsqueeze(1)).sub_(log_total[start:stop].unsqueeze(1)).exp_()
            z.mul_(minus_sum[start:stop])
            here, place = _inside(tokens[start:stop], tile.start, tile.width)
            z.scatter_add_(1, place, torch.where(here, grad[start:stop], 0.0))
            if bend is not None:
                z.mul_(bend)
            factor = head.as_factor(z, work)
            if grad_hidden is not None:
                add_product(grad_hidden[start:stop], factor, tile.weight)
            gathered.add(z, factor, factors[start:stop])
        gathered.close(tile)
    return (
        hidden.new_empty(0) if grad_hidden is None else grad_hidden.to(hidden.dtype),
        weight.new_empty(0, dtype=weight_dtype) if gathered.weight is None else gathered.weight,
        weight.new_empty(0) if gathered.bias is None else gathered.bias,
    )


@selected_logprobs_backward.register_fake
def _(  # type: ignore[no-untyped-def]
    grad, hidden, weight, bias, tokens, highest, log_total, temperature, logit_scale, softcap,
    wants_hidden, wants_weight, wants_bias, weight_dtype,
):  # fmt: skip
    return (
        torch.empty_like(hidden) if wants_hidden else hidden.new_empty(0),
        torch.empty_like(weight, dtype=weight_dtype) if wants_weight else weight.new_empty(0, dtype=weight_dtype),
        torch.empty_like(bias) if wants_bias and bias is not None else weight.new_empty(0),
    )


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, tokens, *transform, ctx.weight_dtype = inputs
    ctx.save_for_backward(hidden, weight, bias, tokens, *output[1:])
    ctx.transform = transform
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 8
    wanted = ctx.needs_input_grad[:3]
    grads = selected_logprobs_backward(grad, *ctx.saved_tensors, *ctx.transform, *wanted, ctx.weight_dtype)
    return (*(found if want else None for found, want in zip(grads, wanted, strict=True)), *(None,) * 5)


selected_logprobs.register_autograd(_differentiate, setup_context=_save_for_backward)
