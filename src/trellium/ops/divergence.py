"""How far a student's distribution is from a teacher's, without the logits of either.

Both heads are projected once, over the whole vocabulary for a block of edges at a time, as many as fit into `head_tiles.WORK_BYTES`; the divergence of
each edge and the gradients of the student follow before the logits are gone. Every divergence here is one pair of formulas: its value Σ d, and
w = p · ∂d/∂p for the student's p, from which the gradient of the student's logits is w - p · Σ w.

Cost: one product of 2·E·V·H operations for each model and two for the student's gradients (one when its head is frozen), whatever the divergence.
As in `head_nll`, gradients are made in the forward pass and the backward can run once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trellium.ops import divergence_rows
from trellium.ops.head import product_dtype
from trellium.ops.head_gradients import gradient_dtype
from trellium.ops.head_sharding import VocabularyShard, shard_arguments

KINDS = ("jsd", "skewed_kl", "total_variation")
"""The divergences; forward and reverse KL are "jsd" at its ends."""


def divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    edge_weight: Tensor | None = None,
    *,
    kind: str = "jsd",
    beta: float = 0.5,
    skew: float = 0.1,
    temperature: float = 1.0,
    student_bias: Tensor | None = None,
    student_logit_scale: float = 1.0,
    student_softcap: float | None = None,
    teacher_bias: Tensor | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, Tensor]:
    """`Σ edge_weight · D(teacher, student)`, with gradients for the student, and each edge's own D.

    Args:
        student_hidden: `[E, H]`; student_weight: `[V, H]`. Nothing is computed for the student's head when it is frozen.
        teacher_hidden: `[E, H']`; teacher_weight: `[V, H']`, over the same vocabulary. Constants.
        edge_weight: `[E]`, constant; None for all ones. An edge of weight 0 does not count.
        kind: "jsd", the generalised Jensen-Shannon divergence `beta · KL(t ‖ m) + (1 - beta) · KL(s ‖ m)`, `m = beta · t + (1 - beta) · s`, with
            forward KL(t ‖ s) at `beta` 0 and reverse KL(s ‖ t) at 1; "skewed_kl", `KL(t ‖ skew · t + (1 - skew) · s)`; "total_variation",
            half of Σ |s - t|.
        beta: of "jsd", in [0, 1].
        skew: of "skewed_kl", in [0, 1).
        temperature: divides both models' logits.
        student_bias, teacher_bias, …_logit_scale, …_softcap: what each head does to its product, as in `head.token_scores`.
        shard: both heads and biases are this part of a vocabulary split over ranks; hidden states, and what is returned, are the same on every rank.

    Returns:
        The loss `[]`, and `[E]` divergences without gradient, in float32, or float64 where the student's products are float64.

    Raises:
        ValueError: shapes that do not fit, another vocabulary, a number out of its range.
        RuntimeError: from autograd, at a second backward through the same loss.

    Source: GKD, Agarwal et al. 2024 (arXiv:2306.13649), eq. 1; skewed KL, DistiLLM, Ko et al. 2024 (arXiv:2402.03898); total variation, f-DISTILL,
        Wen et al. 2023 (arXiv:2307.15190).
    """
    _check_shapes(
        student_hidden, student_weight, teacher_hidden, teacher_weight, edge_weight, student_bias, teacher_bias
    )
    _check_numbers(kind, beta, skew, temperature)
    leaves = (student_hidden, student_weight, student_bias)
    wanted = [torch.is_grad_enabled() and leaf is not None and leaf.requires_grad for leaf in leaves]
    dtype = product_dtype(student_hidden, student_weight)
    if edge_weight is None:
        edge_weight = student_hidden.new_ones(student_hidden.shape[0], dtype=torch.float32)
    loss, edges, *_ = divergence_rows.divergence(
        student_hidden.to(dtype),
        student_weight,
        student_bias,
        teacher_hidden.detach().to(product_dtype(teacher_hidden, teacher_weight)),
        teacher_weight.detach(),
        None if teacher_bias is None else teacher_bias.detach(),
        edge_weight.detach(),
        kind,
        float(skew if kind == "skewed_kl" else beta),
        float(temperature),
        float(student_logit_scale),
        student_softcap,
        float(teacher_logit_scale),
        teacher_softcap,
        shard_arguments(shard)[1],
        *wanted,
        gradient_dtype(student_weight),
    )
    return loss, edges


def _check_shapes(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    edge_weight: Tensor | None,
    student_bias: Tensor | None,
    teacher_bias: Tensor | None,
) -> None:
    pairs = (
        ("student", student_hidden, student_weight, student_bias),
        ("teacher", teacher_hidden, teacher_weight, teacher_bias),
    )
    for name, hidden, weight, bias in pairs:
        if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
            raise ValueError(
                f"{name}_hidden must be [E, H] and {name}_weight [V, H], got {list(hidden.shape)} and {list(weight.shape)}"
            )
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"{name}_bias must be [V] = [{weight.shape[0]}], got {list(bias.shape)}")
    edges = student_hidden.shape[0]
    if teacher_hidden.shape[0] != edges:
        raise ValueError(f"student and teacher must have the same edges, got {edges} and {teacher_hidden.shape[0]}")
    if student_weight.shape[0] != teacher_weight.shape[0]:
        raise ValueError(
            f"student and teacher must have one vocabulary, got {student_weight.shape[0]} and {teacher_weight.shape[0]} tokens. "
            "If only padding rows differ, cut both heads to the tokenizer's length."
        )
    if edge_weight is not None and edge_weight.shape != (edges,):
        raise ValueError(f"edge_weight must be [E] = [{edges}], got {list(edge_weight.shape)}")


def _check_numbers(kind: str, beta: float, skew: float, temperature: float) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {KINDS}, got {kind!r}")
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must be in [0, 1], got {beta}")
    if not 0 <= skew < 1:
        raise ValueError(f"skew must be in [0, 1), got {skew}")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
