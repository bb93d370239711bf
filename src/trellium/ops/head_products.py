"""How a head's matrices are multiplied.

PyTorch makes float32 products of the host with MKL, which does not use all that processors of other makes than Intel's have, and packs the whole head
again for every few rows. oneDNN, which PyTorch carries beside it, was 2.2 times as fast on a Zen 5, with 1,024 rows as with 85 (1,024 tokens, width 896).
So float32 products on the host are oneDNN's, by the operator that Inductor's code calls. It has no form that writes to a given place, which costs one more
pass over a tile near the cache. On other devices, emulated ones too, and where `torch.backends.mkldnn.enabled` is off, they are `torch.mm`'s.

A product of low precision is summed and returned in float32 where PyTorch can do so, on CUDA; see `head_tiles` for what is done elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def multiply(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """`out` filled with `left @ right`, all of one dtype."""
    if _is_onednn(left, right):
        return out.copy_(_linear(left, right))
    return torch.mm(left, right, out=out)


def add_product(accumulator: Tensor, left: Tensor, right: Tensor) -> None:
    """`accumulator += left @ right`, summed in the accumulator's dtype and never rounded to the operands'."""
    if left.dtype != accumulator.dtype and left.is_cuda:
        torch.addmm(accumulator, left, right, out_dtype=accumulator.dtype, out=accumulator)
        return
    left, right = left.to(accumulator.dtype), right.to(accumulator.dtype)
    if _is_onednn(left, right):
        accumulator.add_(_linear(left, right))
    else:
        accumulator.addmm_(left, right)


def set_product(place: Tensor, left: Tensor, right: Tensor) -> None:
    """`place = left @ right`, as `add_product` to zeros."""
    if left.dtype == place.dtype:
        multiply(left, right, place)
    else:
        add_product(place.zero_(), left, right)


def has_mixed_products(tensor: Tensor) -> bool:
    """Whether low-precision operands can be multiplied into a float32 sum."""
    return tensor.is_cuda


def _is_onednn(left: Tensor, right: Tensor) -> bool:
    if not (_ONEDNN and left.is_cpu and left.dtype == right.dtype == torch.float32 and torch.backends.mkldnn.enabled):
        return False
    return _is_plain(left) and _is_plain(right)


def _is_plain(matrix: Tensor) -> bool:
    """Whether rows or columns lie contiguous and none lies on another."""
    (rows, columns), (row, column) = matrix.shape, matrix.stride()
    return (column == 1 and row >= columns) or (row == 1 and column >= rows)


def _linear(left: Tensor, right: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(left, right.t(), None, "none", [], "")
