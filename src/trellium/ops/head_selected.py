"""The log-probabilities of several given tokens an edge, without logits: what a teacher's top-k is compared with.

The same walk over tiles as `head_scores`, with `K` places an edge gathered instead of one; the backward scatters `K`. Cost: one product of 2·E·V·H
operations forward, three backward (two when the head is frozen).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trellium.ops.head_gradients import fake_gradients, sum_over_tiles
from trellium.ops.head_statistics import Statistics
from trellium.ops.head_tiles import Head, LogitTile, logit_tiles


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
    chosen = hidden.new_zeros(tokens.shape, dtype=head.statistics)
    statistics = Statistics(chosen, tokens.new_zeros(hidden.shape[0]), lowest=head.lowest)
    for logits in logit_tiles(head, buffers=1):
        rows, z = logits.rows, logits.z if head.outer == 1.0 else logits.z.mul_(head.outer)
        here, place = _inside(tokens[rows], logits.tile.start, logits.tile.width)
        chosen[rows] = torch.where(here, z.gather(1, place), chosen[rows])
        statistics.fold(z, rows, logits.tile.start, logits.work)
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
    grad = grad.to(head.statistics) * head.slope
    minus_sum = -grad.sum(dim=1, keepdim=True)

    def logit_gradient(logits: LogitTile) -> Tensor:
        rows, z = logits.rows, logits.z
        bend = head.take_bend(z, logits.work)
        z.sub_(highest[rows].unsqueeze(1)).sub_(log_total[rows].unsqueeze(1)).exp_()
        z.mul_(minus_sum[rows])
        here, place = _inside(tokens[rows], logits.tile.start, logits.tile.width)
        z.scatter_add_(1, place, torch.where(here, grad[rows], 0.0))
        return z if bend is None else z.mul_(bend)

    return sum_over_tiles(
        head,
        logit_gradient,
        buffers=1 + (softcap is not None),
        wanted=(wants_hidden, wants_weight, wants_bias),
        weight_dtype=weight_dtype,
    )


@selected_logprobs_backward.register_fake
def _(  # type: ignore[no-untyped-def]
    grad, hidden, weight, bias, tokens, highest, log_total, temperature, logit_scale, softcap,
    wants_hidden, wants_weight, wants_bias, weight_dtype,
):  # fmt: skip
    return fake_gradients(hidden, weight, bias, (wants_hidden, wants_weight, wants_bias), weight_dtype)


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
