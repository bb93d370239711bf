"""How far a student is from a teacher of whom only the most likely tokens are known, as from a server that returns `k` log-probabilities a token.

Both distributions are looked at through the same `k + 1` outcomes: each of the teacher's tokens, and "any other". That makes of every divergence a
lower bound of the full one, which it reaches as the tail vanishes, and leaves both sides distributions: without the last outcome a student could lower
its loss by moving mass to where the teacher is not looked at.

Cost: the student's `head_selected` (four products), and arithmetic on `[E, k]`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trellium.ops.head import check_head, product_dtype
from trellium.ops.head_gradients import gradient_dtype
from trellium.ops.head_selected import selected_logprobs

_NEVER = -1e30


def top_k_divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    tokens: Tensor,
    teacher_logprob: Tensor,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Each edge's generalised Jensen-Shannon divergence over the teacher's tokens and the rest, differentiable in the student.

    Args:
        student_hidden: `[E, H]`; student_weight: `[V, H]`.
        tokens: `[E, K]` int64, the teacher's tokens, distinct within an edge.
        teacher_logprob: `[E, K]`, theirs, at the same temperature; constant. -inf where a server returned fewer than `K`.
        beta: 0 for forward KL(t ‖ s), 1 for reverse KL(s ‖ t), else as `divergence`.
        temperature, bias, logit_scale, softcap: the student's, as in `head.token_scores`.

    Returns:
        `[E]`, in float32, or float64 where the products are float64.

    Raises:
        ValueError: shapes that do not fit, a number out of its range.
    """
    check_head(student_hidden, student_weight, bias, temperature, logit_scale, softcap)
    if tokens.ndim != 2 or tokens.shape[0] != student_hidden.shape[0] or teacher_logprob.shape != tokens.shape:
        raise ValueError(
            f"tokens and teacher_logprob must be [E, K] with E = {student_hidden.shape[0]}, "
            f"got {list(tokens.shape)} and {list(teacher_logprob.shape)}"
        )
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must be in [0, 1], got {beta}")
    logprob, _, _ = selected_logprobs(
        student_hidden.to(product_dtype(student_hidden, student_weight)),
        student_weight,
        bias,
        tokens,
        float(temperature),
        float(logit_scale),
        softcap,
        gradient_dtype(student_weight),
    )
    student = with_tail(logprob)
    teacher = with_tail(teacher_logprob.detach().to(logprob.dtype))
    if beta == 0:
        return _kl(teacher, student)
    if beta == 1:
        return _kl(student, teacher)
    mixture = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def with_tail(logprob: Tensor) -> Tensor:
    """`[E, K + 1]`: the log-probabilities and that of everything else. Where rounding leaves nothing else, the least that rounding can tell from nothing."""
    known = logprob.clamp(min=_NEVER)
    rest = known.logsumexp(dim=1, keepdim=True).clamp(max=-torch.finfo(logprob.dtype).eps)
    return torch.cat([known, (-rest.expm1()).log()], dim=1)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(dim=1)
