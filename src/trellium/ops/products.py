"""Float32 products of the host, by oneDNN.

PyTorch makes them with MKL, which uses half of what processors of other makes than Intel's have: on a Zen 5 a layer of 2,048 tokens and width 576 ran at 210
GFLOP/s on two cores forward and backward, by oneDNN, which PyTorch carries beside it, at 450 (forward), 490 (gradient of the input) and 370 (of the weight).
The product is the operator that Inductor's code calls. Sums differ from MKL's in their order alone. What it does not take (other dtypes
and devices, `torch.backends.mkldnn.enabled` off) is `torch.mm`'s as ever.
"""

from __future__ import annotations

import torch
from torch import Tensor

HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_NARROW = 256
"""Columns of a result below which oneDNN is quicker at the transpose of a product whose left factor lies column by column: 5 times at 16 columns, 1.1 at 192."""


def product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right`: `[M, K]` times `[K, N]`; without a derivative of its own."""
    if not is_onednn(left, right):
        return torch.mm(left, right)
    left, right = _without_gaps(left), _without_gaps(right)
    if left.stride(0) == 1 and right.shape[1] < min(_NARROW, left.shape[0]):
        return _multiply(right.t(), left.t()).t()
    return _multiply(left, right)


def is_onednn(left: Tensor, right: Tensor) -> bool:
    """Whether oneDNN makes this product."""
    if not (left.is_cpu and left.dtype == right.dtype == torch.float32):
        return False
    return HAS_ONEDNN and torch.backends.mkldnn.enabled


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(left, right.t(), None, "none", [], "")


def _without_gaps(matrix: Tensor) -> Tensor:
    """oneDNN takes a matrix that lies without gaps by rows or by columns; any other it multiplies a hundred times slower, element by element."""
    return matrix if matrix.is_contiguous() or matrix.t().is_contiguous() else matrix.contiguous()
