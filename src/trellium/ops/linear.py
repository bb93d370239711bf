"""`trellium::product`: a linear layer whose products are those of `trellium.ops.products`, differentiable as often as asked, one node in a compiled graph."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trellium.ops.products import HAS_ONEDNN, product

_FEW_ROWS = 32
"""A decoding step's rows; below them calling costs more than multiplying."""


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`: `input` `[…, K]` times the transpose of `weight` `[N, K]`, plus `bias` `[N]`; differentiable."""
    if not _is_ours(input, weight):
        return F.linear(input, weight, bias)
    rows = _product(input.reshape(-1, input.shape[-1]), weight.t())
    output = rows.view(*input.shape[:-1], weight.shape[0])
    return output if bias is None else output + bias


def _is_ours(input: Tensor, weight: Tensor) -> bool:
    """Whether these are plain float32 matrices of the host, of more than a few rows, that no autocast would round."""
    if not (HAS_ONEDNN and input.is_cpu and weight.is_cpu and input.dtype == weight.dtype == torch.float32):
        return False
    if torch.is_autocast_enabled("cpu") or input.numel() < _FEW_ROWS * input.shape[-1]:
        return False
    return all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in (input, weight))


@torch.library.custom_op("trellium::product", mutates_args=())
def _product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right`: `[M, K]` times `[K, N]`, contiguous."""
    return product(left, right).contiguous()


@_product.register_fake
def _(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[1]))


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    left, right = inputs
    ctx.save_for_backward(left if ctx.needs_input_grad[1] else None, right if ctx.needs_input_grad[0] else None)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    left, right = ctx.saved_tensors
    of_left = _product(grad, right.t()) if ctx.needs_input_grad[0] else None
    # By its transpose, so that it lies as the weight does: `right` is a weight's transpose.
    of_right = _product(grad.t(), left).t() if ctx.needs_input_grad[1] else None
    return of_left, of_right


_product.register_autograd(_backward, setup_context=_keep)
