"""Attention over a forest by FlexAttention, where that has a backward: on CUDA, outside of compiled graphs.

The kernel takes a mask as a function of two places, here the forest's one comparison, and a table of which blocks of 128 x 128 places it must look into. That
table needs no mask either: of a block of keys before a block of queries, the largest `subtree_end` says whether any query sees any key, the least
whether every query sees every key. So a batch costs (L / 128)² numbers and no wait for the device, and the kernel works on the forest's own area, rounded up
to blocks; under a window also on blocks within its reach by depth. A sink is a part with the value 0, merged by the log-sum-exp.

Its forward is tested compiled on the CPU and its derivative through FlexAttention's unfused form, both against the mask; on a GPU it was not run. What the
kernels are not sure to take (`takes`) is left to the cascade, and compiled graphs have the operator as one node.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BLOCK = 128
WIDTHS = (16, 32, 64, 128, 256)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether FlexAttention is to be asked."""
    groups = query.shape[1] // key.shape[1]
    return (
        query.device.type == "cuda"
        and query.dtype in _DTYPES
        and query.shape[3] in WIDTHS
        and value.shape[3] in WIDTHS
        and groups & (groups - 1) == 0
        and not torch.compiler.is_compiling()
    )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    subtree_end: Tensor,
    position_ids: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    kernel: Callable[..., Any] | None = None,
) -> Tensor:
    """As `trellium.ops.attention.forest_attention`, whose arguments these are; `kernel` computes in the place of compiled FlexAttention."""
    from torch.nn.attention.flex_attention import AuxRequest

    options = {
        "score_mod": _bend(query, scale, softcap),
        "block_mask": _last.of(subtree_end, position_ids, window),
        "scale": 1.0,
        "enable_gqa": query.shape[1] != key.shape[1],
    }
    kernel = kernel or _compiled()
    if sinks is None:
        return kernel(query, key, value, **options).transpose(1, 2)
    out, extra = kernel(query, key, value, return_aux=AuxRequest(lse=True), **options)
    share = torch.sigmoid(extra.lse - sinks.to(extra.lse.dtype).view(1, -1, 1))  # that is not the sink's
    return (out * share.unsqueeze(3)).to(query.dtype).transpose(1, 2)


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def _bend(query: Tensor, scale: float, softcap: float | None) -> Callable[..., Tensor]:
    """A product to its logit. Numbers are tensors, which Dynamo takes as they come; a second value of a float would be a symbol, which the kernel refuses."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    factor = torch.full((), scale, dtype=dtype, device=query.device)
    if softcap is None:
        return lambda product, row, head, query, key: product * factor
    cap = torch.full((), softcap, dtype=dtype, device=query.device)
    return lambda product, row, head, query, key: cap * torch.tanh(product * factor / cap)


# ---- which blocks


def block_mask(subtree_end: Tensor, position_ids: Tensor, window: int | None) -> Any:
    """The `BlockMask` of a forest: its mask as a function, and which blocks it leaves out, or lets through whole."""
    from torch.nn.attention.flex_attention import BlockMask

    length = subtree_end.shape[1]
    some, every = blocks(subtree_end, position_ids, window)
    partly = some & ~every
    tables = [table for kind in (partly, every) for table in _ordered(kind)]
    mask = _mask_of(subtree_end, position_ids, window)
    return BlockMask.from_kv_blocks(*tables, BLOCK_SIZE=BLOCK, mask_mod=mask, seq_lengths=(length, length))


def blocks(subtree_end: Tensor, position_ids: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """`[R, n, n]` bool each, blocks of queries by blocks of keys: where there may be a query that sees a key, and where every query sees every key.

    A block that is not whole, at the end of a row, is never one of the second kind. Under a window none is, and the first kind may be more than it must.
    """
    length = subtree_end.shape[1]
    count = -(-length // BLOCK)

    def of_blocks(values: Tensor, fill: int) -> Tensor:
        return torch.nn.functional.pad(values, (0, count * BLOCK - length), value=fill).view(-1, count, BLOCK)

    block = torch.arange(count, device=subtree_end.device)
    starts, before = (block * BLOCK).view(1, -1, 1), block.view(1, 1, -1) < block.view(1, -1, 1)
    ends = of_blocks(subtree_end, 0)
    reached = ends.amax(2).unsqueeze(1) > starts
    some = before & reached | torch.eye(count, dtype=torch.bool, device=block.device)
    if window is None:
        return some, before & (ends.amin(2).unsqueeze(1) >= starts + BLOCK)
    nearest = of_blocks(position_ids, length).amin(2).unsqueeze(2) - of_blocks(position_ids, -1).amax(2).unsqueeze(1)
    return some & (nearest < window), torch.zeros_like(some)


def _ordered(kind: Tensor) -> tuple[Tensor, Tensor]:
    """For each block of queries, how many blocks of keys are of a kind, and those before all others; `[R, 1, n]`, `[R, 1, n, n]` int32."""
    order = kind.to(torch.int8).argsort(dim=2, descending=True, stable=True)
    return kind.sum(2, dtype=torch.int32).unsqueeze(1), order.to(torch.int32).unsqueeze(1)


def _mask_of(subtree_end: Tensor, position_ids: Tensor, window: int | None) -> Callable[..., Tensor]:
    if window is None:
        return lambda row, head, query, key: (key <= query) & (query < subtree_end[row, key])
    reach = torch.full((), window, device=subtree_end.device)

    def mask(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = position_ids[row, query] - position_ids[row, key] < reach
        return (key <= query) & (query < subtree_end[row, key]) & near

    return mask


class _Last:
    """The block masks of the batch at hand, for all of its layers.

    They are known by the memory that their forest lies in and by how often it was written, and hold on to it, so nobody else can come to lie there.
    """

    def __init__(self) -> None:
        self._key: tuple = ()
        self._masks: dict[int | None, Any] = {}
        self._held: tuple[Tensor, ...] = ()

    def of(self, subtree_end: Tensor, position_ids: Tensor, window: int | None) -> Any:
        forest = (subtree_end, position_ids)
        if any(one.is_inference() for one in forest):  # they do not count their writes
            return block_mask(subtree_end, position_ids, window)
        key = tuple((one.data_ptr(), one._version, one.shape, one.stride(), one.device) for one in forest)
        if key != self._key:
            self._key, self._masks, self._held = key, {}, forest
        if window not in self._masks:
            self._masks[window] = block_mask(subtree_end, position_ids, window)
        return self._masks[window]


_last = _Last()
