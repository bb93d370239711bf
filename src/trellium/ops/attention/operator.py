"""`trellium::forest_attention`: one operator a direction, so that a compiled graph holds each as one node of static shape, whatever the forest.

How it computes is `trellium.ops.attention.cascade`; here stand its arguments, its shapes and its derivative. Where FlexAttention is to be asked instead
(`trellium.ops.attention.flex`), it differentiates itself, and is no operator of ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trellium.ops.attention import cascade, flex


def forest_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    subtree_end: Tensor,
    position_ids: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention in which each token sees its ancestors and itself: `trellium.ops.attention.forest_mask`, without the mask.

    Args:
        query: `[B, Hq, L, D]`.
        key: `[B, Hkv, L, D]`, `Hq` a multiple of `Hkv`: each key head answers `Hq / Hkv` query heads in a row.
        value: `[B, Hkv, L, Dv]`.
        subtree_end: `[B, L]` int64, one past the last token of the row that descends from each token.
        position_ids: `[B, L]` int64, each token's depth, one more than its parent's; read only with a window.
        scale: multiplies the logits; `D ** -0.5` if None.
        window: how many tokens a token sees at most, itself among them; None for all.
        softcap: bounds the scaled logits softly, as Gemma 2 does.
        sinks: `[Hq]`, a logit for each head that takes its share of the softmax and gives nothing, as in GPT-OSS.

    Returns:
        `[B, L, Hq, Dv]` in `query`'s dtype (heads before the width, as the output projection wants it). Differentiable in query, key, value, sinks.

    Raises:
        ValueError: shapes or dtypes that do not fit, a window or a cap that is not positive.

    Source: the merging by log-sum-exp is that of FlashAttention (Dao et al. 2022, section 3.1), over the chains of a forest instead of tiles.
    """
    _check(query, key, value, subtree_end, position_ids, window, softcap, sinks)
    scale = query.shape[3] ** -0.5 if scale is None else float(scale)
    if flex.takes(query, key, value):
        forest = (subtree_end, position_ids)
        return flex.attend(query, key, value, *forest, scale=scale, window=window, softcap=softcap, sinks=sinks)
    return _forest_attention(query, key, value, subtree_end, position_ids, scale, window, softcap, sinks)[0]


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    subtree_end: Tensor,
    position_ids: Tensor,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        raise ValueError(f"query, key and value must be [B, H, L, D], got {_shapes(query, key, value)}")
    rows, heads, length, width = query.shape
    answering = key.shape[1]
    if key.shape != (rows, answering, length, width) or value.shape[:3] != key.shape[:3] or heads % max(answering, 1):
        raise ValueError(
            "key must be [B, Hkv, L, D] and value [B, Hkv, L, Dv] beside a query [B, Hq, L, D] with Hq a multiple of Hkv, "
            f"got query, key, value of {_shapes(query, key, value)}"
        )
    if not query.dtype == key.dtype == value.dtype or not query.dtype.is_floating_point:
        raise ValueError(
            f"query, key and value must share a floating-point dtype, got {query.dtype}, {key.dtype}, {value.dtype}"
        )
    for name, integers in (("subtree_end", subtree_end), ("position_ids", position_ids)):
        if integers.shape != (rows, length) or integers.dtype != torch.int64:
            raise ValueError(f"{name} must be [{rows}, {length}] int64, got {_shapes(integers)} {integers.dtype}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 (the token itself), or None for none, got {window}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be above 0, or None for none, got {softcap}")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks must be [{heads}], one for each query head, got {_shapes(sinks)}")


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(list(tensor.shape)) for tensor in tensors)


@torch.library.custom_op("trellium::forest_attention", mutates_args=())
def _forest_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    subtree_end: Tensor,
    position_ids: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Output `[B, L, Hq, Dv]`, and for the backward the log-sum-exp `[B, Hq, L]`."""
    return cascade.forward(query, key, value, sinks, cascade.Rule(subtree_end, position_ids, scale, window, softcap))


@_forest_attention.register_fake
def _(query, key, value, subtree_end, position_ids, scale, window, softcap, sinks):  # type: ignore[no-untyped-def]
    rows, heads, length, _ = query.shape
    statistics = torch.float64 if query.dtype == torch.float64 else torch.float32
    return (
        query.new_empty((rows, length, heads, value.shape[3])),
        query.new_empty((rows, heads, length), dtype=statistics),
    )


@torch.library.custom_op("trellium::forest_attention_backward", mutates_args=())
def _forest_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    subtree_end: Tensor,
    position_ids: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients as `[B, L, H, D]`, and the sinks' (empty without sinks)."""
    rule = cascade.Rule(subtree_end, position_ids, scale, window, softcap)
    *grads, grad_sinks = cascade.backward(grad, query, key, value, sinks, out, lse, rule)
    return (*grads, lse.new_empty(0) if grad_sinks is None else grad_sinks)


@_forest_attention_backward.register_fake
def _(grad, query, key, value, subtree_end, position_ids, out, lse, scale, window, softcap, sinks):  # type: ignore[no-untyped-def]
    def by_place(tensor):  # type: ignore[no-untyped-def]
        rows, heads, length, width = tensor.shape
        return tensor.new_empty((rows, length, heads, width))

    of_sinks = lse.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return by_place(query), by_place(key), by_place(value), of_sinks


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, subtree_end, position_ids, scale, window, softcap, sinks = inputs
    out, lse = output
    ctx.save_for_backward(query, key, value, subtree_end, position_ids, out, lse, sinks)
    ctx.rule = scale, window, softcap
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: None) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 9
    *saved, sinks = ctx.saved_tensors
    of_query, of_key, of_value, of_sinks = _forest_attention_backward(grad, *saved, *ctx.rule, sinks)
    return (
        of_query.transpose(1, 2),
        of_key.transpose(1, 2),
        of_value.transpose(1, 2),
        *(None,) * 5,
        None if sinks is None else of_sinks,
    )


_forest_attention.register_autograd(_differentiate, setup_context=_save_for_backward)
