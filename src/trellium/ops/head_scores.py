"""The operators behind `trellium.ops.head.token_scores`.

Forward: the vocabulary is the outer loop, so that a tile of the head is read and cast once, and the edges are the inner one; each tile of logits is
folded at once into an online log-sum-exp an edge. Backward: each tile is made again, turned in place into the gradient of its logits, and adds two
products. Both are custom operators: one node each in a compiled graph, whose compilation does not grow with the vocabulary.

Cost: one product of 2·E·V·H operations forward, three backward (two when the head is frozen); one exponential a logit in each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trellium.ops.head_gradients import LogitGradient, fake_gradients, sum_over_tiles
from trellium.ops.head_statistics import fold_tiles
from trellium.ops.head_tiles import Head


@torch.library.custom_op("trellium::token_scores", mutates_args=())
def token_scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    first_token: int,
    group: str,
    wants_entropy: bool,
    wants_log_sum_p2: bool,
    wants_mean_logit: bool,
    wants_top1: bool,
    weight_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Log-probability, entropy, log Σp², mean logit and top-1 (empty where not wanted), and for the backward the highest logit and log Σ exp(z - highest)."""
    head = Head(hidden, weight, bias, temperature, logit_scale, softcap)
    statistics = fold_tiles(
        head,
        target - first_token,
        group,
        moment=wants_entropy,
        squares=wants_log_sum_p2,
        plain=wants_mean_logit,
        first=wants_top1,
    )
    nothing = statistics.total.new_empty(0)
    found = (statistics.logprob(), statistics.entropy(), statistics.log_sum_p2(), statistics.plain)
    first = target.new_empty(0, dtype=torch.bool) if statistics.first is None else statistics.first
    return (
        *(nothing.clone() if value is None else value for value in found),
        first,
        statistics.highest,
        statistics.total.log(),
    )  # type: ignore[return-value]


def _empty(like: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    return like.new_empty(size, dtype=dtype)


@token_scores.register_fake
def _(  # type: ignore[no-untyped-def]
    hidden, weight, bias, target, temperature, logit_scale, softcap, first_token, group,
    wants_entropy, wants_log_sum_p2, wants_mean_logit, wants_top1, weight_dtype,
):  # fmt: skip
    edges = hidden.shape[0]
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    return (
        _empty(hidden, edges, dtype),
        *(
            _empty(hidden, edges if wants else 0, dtype)
            for wants in (wants_entropy, wants_log_sum_p2, wants_mean_logit)
        ),
        _empty(target, edges if wants_top1 else 0, torch.bool),
        _empty(hidden, edges, dtype),
        _empty(hidden, edges, dtype),
    )


@torch.library.custom_op("trellium::token_scores_backward", mutates_args=())
def token_scores_backward(
    grad_logprob: Tensor | None,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    entropy: Tensor,
    highest: Tensor,
    log_total: Tensor,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    first_token: int,
    group: str,
    wants_hidden: bool,
    wants_weight: bool,
    wants_bias: bool,
    weight_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias, empty where not wanted; each tile of logits is made again."""
    head = Head(hidden, weight, bias, temperature, logit_scale, softcap)
    return sum_over_tiles(
        head,
        LogitGradient(
            head,
            target - first_token,
            highest,
            log_total,
            of_target=grad_logprob,
            of_entropy=None if grad_entropy is None else (grad_entropy, entropy),
        ),
        buffers=1 + (grad_entropy is not None) + (softcap is not None),
        wanted=(wants_hidden, wants_weight, wants_bias),
        weight_dtype=weight_dtype,
        group=group,
    )


@token_scores_backward.register_fake
def _(  # type: ignore[no-untyped-def]
    grad_logprob, grad_entropy, hidden, weight, bias, target, entropy, highest, log_total, temperature, logit_scale, softcap,
    first_token, group, wants_hidden, wants_weight, wants_bias, weight_dtype,
):  # fmt: skip
    return fake_gradients(hidden, weight, bias, (wants_hidden, wants_weight, wants_bias), weight_dtype)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, target, *transform = inputs
    _, entropy, log_sum_p2, mean_logit, top1, highest, log_total = output
    ctx.save_for_backward(hidden, weight, bias, target, entropy, highest, log_total)
    ctx.transform, ctx.weight_dtype = transform[:5], transform[-1]
    ctx.mark_non_differentiable(log_sum_p2, mean_logit, top1, highest, log_total)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None, *_: None) -> tuple[Any, ...]:
    nothing = (None,) * 14
    if grad_logprob is None and grad_entropy is None:
        return nothing
    wanted = ctx.needs_input_grad[:3]
    arguments = (*ctx.saved_tensors, *ctx.transform, *wanted, ctx.weight_dtype)
    grads = token_scores_backward(grad_logprob, grad_entropy, *arguments)
    return (*(grad if want else None for grad, want in zip(grads, wanted, strict=True)), *nothing[3:])


token_scores.register_autograd(_differentiate, setup_context=_save_for_backward)
