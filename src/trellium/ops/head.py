"""Scores and losses of tokens without their logits.

`token_scores` says what a head thinks of each target: log-probability, entropy and three more, differentiable, in four products of 2·E·V·H operations.
`weighted_nll` is the loss of supervised fine-tuning in three. Neither holds `hidden @ weight.T`: see `head_tiles` and `head_rows` for how tiles are made
and in which dtypes, `head_products` for who multiplies them, `head_scores` and `head_nll` for the two operators and their costs, `head_sharding` for a
head split over ranks.

Memory above inputs and the weight's gradient: `head_tiles.WORK_BYTES` (64 MiB) at any vocabulary, the gradient of `hidden` included, as long as that
itself leaves room for a few MiB of tiles. `weighted_nll` in low precision holds the weight's gradient in float32 beside its rounded one.

Every call returns a weight's gradient of its own, which autograd adds to the one it holds. To add to `weight.grad` from inside would save that tensor and
one pass over it a micro-batch (520 MiB and 0.03 processor-seconds at 152,000 tokens of width 896, of the 1.3 that 256 edges take), but pass by everything
that listens to gradients: hooks, DDP's and FSDP's reductions, `torch.autograd.grad`, the scaler of float16. It is left to autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trellium.ops import head_nll, head_scores
from trellium.ops.head_gradients import gradient_dtype
from trellium.ops.head_sharding import VocabularyShard, shard_arguments

OUTPUTS = ("logprob", "entropy", "log_sum_p2", "mean_logit", "top1")
"""What `token_scores` can be asked for."""

NLL_OUTPUTS = ("logprob", "entropy", "top1")
"""What `weighted_nll` can be asked for beside the loss."""

MODES = ("nll", "dft")
"""The losses that `weighted_nll` knows."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What the head says about `E` targets; a field is None if it was not asked for.

    Attributes:
        logprob: `[E]`, the target's log-probability; differentiable.
        entropy: `[E]`, entropy of the distribution over the vocabulary in nats; differentiable.
        log_sum_p2: `[E]`, the logarithm of Σ p² over the vocabulary (WPO's weights).
        mean_logit: `[E]`, the mean over the vocabulary of the logits as the distribution has them: scaled, capped and divided by the temperature.
        top1: `[E]` bool, whether the target is the most likely token (the first of equals).
    """

    logprob: Tensor | None = None
    entropy: Tensor | None = None
    log_sum_p2: Tensor | None = None
    mean_logit: Tensor | None = None
    top1: Tensor | None = None


def token_scores(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    outputs: Sequence[str] = ("logprob",),
    shard: VocabularyShard | None = None,
) -> TokenScores:
    """Score each target under `softmax(cap(logit_scale · (hidden @ weight.T + bias)) / temperature)`, `cap(z) = softcap · tanh(z / softcap)`.

    Args:
        hidden: `[E, H]`, the hidden state that predicts each target.
        weight: `[V, H]`, the output head. Nothing is computed for it when it is frozen.
        target: `[E]` int64 in `[0, V)`.
        bias: `[V]`; an entry of -inf takes its token out of the distribution.
        temperature: divides the logits last.
        logit_scale: multiplies the logits first.
        softcap: bounds the scaled logits softly, as Gemma 2 does.
        outputs: which of `OUTPUTS` to make; each costs only if asked for.
        shard: `weight` and `bias` are this part of a head whose vocabulary is split over ranks. `hidden` and `target` (numbered over the
            whole vocabulary) are the same on every rank, and so is what is returned.

    Returns:
        `TokenScores` of `[E]` tensors in float32, or float64 where the products are float64.

    Raises:
        ValueError: shapes that do not fit, an unknown output, a temperature, scale or cap that is not usable.

    A weight of low precision whose `grad_dtype` is float32 gets its gradient in float32, unrounded, and sums it so over accumulation steps.

    Source: online softmax, Milakov and Gimelshein 2018 (arXiv:1805.02867).
    """
    _check(hidden, weight, target, bias, temperature, logit_scale, softcap)
    if isinstance(outputs, str) or not outputs or not set(outputs) <= set(OUTPUTS):
        raise ValueError(f"outputs must name some of {OUTPUTS}, got {outputs!r}")
    logprob, *others, _, _ = head_scores.token_scores(
        hidden.to(product_dtype(hidden, weight)),
        weight,
        bias,
        target,
        float(temperature),
        float(logit_scale),
        softcap,
        *shard_arguments(shard),
        *(name in outputs for name in OUTPUTS[1:]),
        gradient_dtype(weight),
    )
    found = dict(zip(OUTPUTS, (logprob, *others), strict=True))
    return TokenScores(**{name: found[name] for name in outputs})


def weighted_nll(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    edge_weight: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    mode: str = "nll",
    label_smoothing: float = 0.0,
    outputs: Sequence[str] = (),
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, TokenScores]:
    """`-Σ edge_weight · logprob`, its gradients made on the way: three products instead of the four of `token_scores` and a loss.

    The fused form of `ops.losses.nll` and `ops.losses.dft` with a normalizer of 1; put the normalizer into `edge_weight` or divide after.

    Args:
        hidden, weight, target, bias, temperature, logit_scale, softcap, shard: as for `token_scores`.
        edge_weight: `[E]`, constant; an edge of weight 0 does not count, whatever its score. Weights of classes are a factor in it:
            `class_weight[target]`.
        mode: "nll", or "dft" to weigh each edge by its own probability as well, held constant.
        label_smoothing: the share of each edge's loss, in [0, 1), that is the mean of `-log p` over the whole vocabulary instead of the target's. Of
            "nll" only. With it a token that a bias of -inf takes out of the distribution makes the loss infinite.
        outputs: which of `NLL_OUTPUTS` to return beside the loss, for metrics: without gradients.

    Returns:
        The loss `[]`, in the statistics' dtype, and the scores asked for.

    Raises:
        ValueError: as `token_scores`; an unknown mode; a label smoothing out of its range or with "dft".
        RuntimeError: from autograd, at a second backward through the same loss.

    Source: label smoothing, Szegedy et al. 2016 (arXiv:1512.00567), as in transformers' trainer; gradients in the forward pass, Hsu et al. 2024, Liger Kernel (arXiv:2410.10989); DFT, Wu et al. 2025 (arXiv:2508.05629).
    """
    _check(hidden, weight, target, bias, temperature, logit_scale, softcap)
    if edge_weight.shape != target.shape:
        raise ValueError(f"edge_weight must be [E] = {list(target.shape)}, got {list(edge_weight.shape)}")
    if isinstance(outputs, str) or not set(outputs) <= set(NLL_OUTPUTS):
        raise ValueError(f"outputs must name some of {NLL_OUTPUTS}, got {outputs!r}")
    if mode not in MODES:
        raise ValueError(f"mode must be one of {MODES}, got {mode!r}")
    if not 0 <= label_smoothing < 1 or (label_smoothing and mode != "nll"):
        raise ValueError(
            f"label_smoothing must be in [0, 1), and 0 for any mode but 'nll', got {label_smoothing} for {mode!r}"
        )
    arguments = (hidden.to(product_dtype(hidden, weight)), weight, bias, target)
    transform = (float(temperature), float(logit_scale), softcap, *shard_arguments(shard))
    dft, wants_entropy, wants_top1 = mode == "dft", "entropy" in outputs, "top1" in outputs
    edge_weight, dtype = edge_weight.detach(), gradient_dtype(weight)
    wanted = [torch.is_grad_enabled() and leaf is not None and leaf.requires_grad for leaf in (hidden, weight, bias)]
    if any(wanted):
        loss, logprob, entropy, top1, *_ = head_nll.weighted_nll(
            *arguments, edge_weight, *transform, dft, float(label_smoothing), wants_entropy, wants_top1, *wanted, dtype
        )
    else:  # larger tiles, and nothing to hold whole rows for
        logprob, entropy, _, mean_logit, top1, highest, log_total = head_scores.token_scores(
            *arguments, *transform, wants_entropy, False, label_smoothing > 0, wants_top1, dtype
        )
        uniform = (mean_logit - highest) - log_total if label_smoothing else None
        edge_weight = edge_weight.to(logprob.dtype)
        loss = head_nll.loss_of(logprob, uniform, edge_weight, dft=dft, label_smoothing=label_smoothing)
    found = {"logprob": logprob, "entropy": entropy, "top1": top1}
    return loss, TokenScores(**{name: found[name] for name in outputs})


def product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """What operands are rounded to: the wider of the two, or autocast's."""
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    device_type = hidden.device.type
    if dtype != torch.float64 and torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    return dtype


def _check(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *transform: Any) -> None:
    check_head(hidden, weight, bias, *transform)
    if target.shape != hidden.shape[:1]:
        raise ValueError(f"target must be [E] = [{hidden.shape[0]}], got {list(target.shape)}")


def check_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
) -> None:
    """Raise ValueError where a head's arguments do not fit each other or are not usable."""
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden must be [E, H] and weight [V, H], got {list(hidden.shape)} and {list(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [V] = [{weight.shape[0]}], got {list(bias.shape)}")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    if logit_scale == 0:
        raise ValueError("logit_scale must not be 0: every token would be equally likely")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be above 0, or None for none, got {softcap}")
