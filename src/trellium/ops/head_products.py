"""How a head's matrices are multiplied.

Float32 products on the host are oneDNN's (`trellium.ops.products`): 2.2 times as fast as MKL's on a Zen 5, with 1,024 rows as with 85 (1,024 tokens, width
896), because MKL packs the whole head again for every few rows. oneDNN's have no form that writes to a given place, which costs one more pass over a tile
near the cache. On other devices, emulated ones too, and where `torch.backends.mkldnn.enabled` is off, they are `torch.mm`'s.

bfloat16 operands are multiplied as they are where the machine can: on CUDA into a float32 sum, and on hosts with the instructions (AVX512-BF16 or AMX) into
bfloat16, the only result that PyTorch offers there. Such a product is summed in float32 and rounded once; what is made of it, statistics and sums of
products alike, is float32. That is the rounding of full bfloat16 logits and of their gradients. Where there are no such instructions low-precision operands
are multiplied as float32, which is ten times faster than bfloat16 that a host imitates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trellium.ops.products import is_onednn, product

_HAS_BFLOAT16 = torch.backends.mkldnn.is_available() and (
    torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
)


def multiply(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """`out` filled with `left @ right`, all of one dtype."""
    if is_onednn(left, right):
        return out.copy_(product(left, right))
    return torch.mm(left, right, out=out)


def add_product(accumulator: Tensor, left: Tensor, right: Tensor) -> None:
    """`accumulator += left @ right`: the sum in the accumulator's dtype, the product too where there is such a one."""
    if left.dtype != accumulator.dtype and left.is_cuda:
        torch.addmm(accumulator, left, right, out_dtype=accumulator.dtype, out=accumulator)
        return
    if left.dtype != accumulator.dtype and is_low_on_host(left):
        accumulator.add_(torch.mm(left, right))
        return
    left, right = left.to(accumulator.dtype), right.to(accumulator.dtype)
    if is_onednn(left, right):
        accumulator.add_(product(left, right))
    else:
        accumulator.addmm_(left, right)


def set_product(place: Tensor, left: Tensor, right: Tensor) -> None:
    """`place = left @ right`, as `add_product` to zeros."""
    if left.dtype == place.dtype:
        multiply(left, right, place)
    elif is_low_on_host(left):
        place.copy_(torch.mm(left, right))
    else:
        add_product(place.zero_(), left, right)


def multiplies_as_is(tensor: Tensor) -> bool:
    """Whether operands of low precision like `tensor` are multiplied as they are rather than as float32."""
    return tensor.is_cuda or is_low_on_host(tensor)


def is_low_on_host(tensor: Tensor) -> bool:
    """Whether the host has instructions for `tensor`'s low precision."""
    return tensor.is_cpu and tensor.dtype == torch.bfloat16 and _HAS_BFLOAT16 and torch.backends.mkldnn.enabled
