"""How a head's logits are cut into tiles, and made.

`hidden @ weight.T` is never held. A tile of it is made in a work buffer that the next tile overwrites, small enough to stay near the cache while
a few passes of elementwise arithmetic go over it, large enough for efficient products. Tiles of one problem are equal to within 64 tokens: no ragged
last one. Everything an operator allocates besides the weight's gradient is planned into `WORK_BYTES`.

Dtypes: every statistic and every accumulation is float32 (float64 where the products are). Operands of lower precision keep their rounding; in what they
are multiplied says `head_products`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trellium.ops import head_products

WORK_BYTES = 64 << 20
"""What one call may allocate besides the weight's gradient, where the gradient of `hidden` and the smallest tiles fit into it."""

TILE_BYTES = 4 << 20
"""The most that one tile of logits takes."""

EDGE_TILE = 2048
VOCABULARY_TILE = 1024
ALIGNMENT = 64
_SMALLEST_TILE_BYTES = 1 << 20


def even_split(length: int, target: int, alignment: int = 1) -> list[tuple[int, int]]:
    """Cut `[0, length)` into pieces of at most about `target`, equal to within `alignment`: no ragged last piece."""
    units = -(-length // alignment)
    pieces = max(1, -(-length // max(target, alignment)))
    bounds = [min(length, alignment * (piece * units // pieces)) for piece in range(pieces)] + [length]
    return list(itertools.pairwise(bounds))


def widest(pieces: list[tuple[int, int]]) -> int:
    """The length of the longest piece."""
    return max(stop - start for start, stop in pieces)


class Workspace:
    """Named buffers that are allocated once and overwritten by every tile."""

    def __init__(self, like: Tensor, size: int, dtype: torch.dtype) -> None:
        self._like, self._size, self._dtype = like, size, dtype
        self._buffers: dict[str, Tensor] = {}

    def resize(self, size: int) -> None:
        """Give up the buffers; those that are asked for from now on hold `size` elements."""
        self._size = size
        self._buffers.clear()

    def __call__(self, name: str, rows: int, columns: int, *, dtype: torch.dtype | None = None) -> Tensor:
        """A contiguous `[rows, columns]` view of the named buffer."""
        flat = self._buffers.get(name)
        if flat is None:
            flat = self._buffers[name] = self._like.new_empty(self._size, dtype=dtype or self._dtype)
        return flat[: rows * columns].view(rows, columns)


@dataclass(frozen=True, slots=True)
class HeadTile:
    """A few tokens of the vocabulary: which, their weights in the products' dtype, and their bias times `inner`."""

    start: int
    weight: Tensor
    bias: Tensor | None

    @property
    def width(self) -> int:
        return self.weight.shape[0]


class Head:
    """The logits `outer · f(inner · (hidden @ weight.T + bias))` of one head, with `f` = tanh under a soft cap and nothing otherwise."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: float,
        logit_scale: float,
        softcap: float | None,
    ) -> None:
        self.hidden, self.weight, self.bias, self.softcap = hidden, weight, bias, softcap
        self.statistics = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        self.products = hidden.dtype if head_products.multiplies_as_is(hidden) else self.statistics
        self.inner = logit_scale / temperature if softcap is None else logit_scale / softcap
        self.outer = 1.0 if softcap is None else softcap / temperature
        self.slope = self.inner * self.outer

    @property
    def lowest(self) -> float:
        """The least finite statistic: where a maximum starts, so that a logit of -inf never meets another."""
        return torch.finfo(self.statistics).min

    def tiles(self, pieces: list[tuple[int, int]]) -> Iterator[HeadTile]:
        """Each piece of the vocabulary, cast once."""
        for start, stop in pieces:
            bias = None if self.bias is None else self.bias[start:stop].to(self.statistics) * self.inner
            yield HeadTile(start, self.weight[start:stop].to(self.hidden.dtype).to(self.products), bias)

    def project(self, rows: Tensor, tile: HeadTile, out: Tensor, work: Workspace) -> Tensor:
        """`out` filled with `f(inner · (rows @ tile.T + bias))`: the logits, still without the factor `outer`."""
        if rows.dtype == out.dtype:
            head_products.multiply(rows, tile.weight.t(), out)
        else:
            out.copy_(head_products.multiply(rows, tile.weight.t(), work("product", *out.shape, dtype=rows.dtype)))
        if self.inner != 1.0:
            out.mul_(self.inner)
        if tile.bias is not None:
            out.add_(tile.bias)
        return out if self.softcap is None else out.tanh_()

    def take_bend(self, z: Tensor, work: Workspace) -> Tensor | None:
        """The soft cap's derivative at a tile of logits, None without a cap; and `z` gets the factor `outer`."""
        if self.softcap is None:
            return None
        bend = torch.mul(z, z, out=work("bend", *z.shape)).neg_().add_(1.0)  # of tanh
        z.mul_(self.outer)
        return bend

    def as_factor(self, tile: Tensor, work: Workspace) -> Tensor:
        """A tile of gradients in the products' dtype."""
        if tile.dtype == self.products:
            return tile
        return work("product", *tile.shape, dtype=self.products).copy_(tile)


def tile_plan(
    edges: int, vocabulary: int, width: int, *, itemsize: int, buffers: int, other_bytes: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Pieces of the edges and of the vocabulary, so that `buffers` tiles, one cast tile of the head and `other_bytes` stay within `WORK_BYTES`."""
    room = (WORK_BYTES - other_bytes) // (buffers + 1)
    size = min(TILE_BYTES, max(_SMALLEST_TILE_BYTES, room)) // itemsize
    rows = min(max(edges, 1), EDGE_TILE, max(1, size // VOCABULARY_TILE))
    edge_pieces = even_split(edges, rows)
    columns = min(size // max(widest(edge_pieces), 1), max(size // width, VOCABULARY_TILE))
    return edge_pieces, even_split(vocabulary, columns, ALIGNMENT)


@dataclass(frozen=True, slots=True)
class LogitTile:
    """The logits of some edges and tokens, still without the factor `outer`, in a buffer that may be overwritten."""

    tile: HeadTile
    rows: slice
    factors: Tensor
    z: Tensor
    work: Workspace


def logit_tiles(head: Head, *, buffers: int, other_bytes: int = 0) -> Iterator[LogitTile]:
    """All logits of a head, each tile in the buffer of the one before: tokens outside, edges inside.

    `buffers`: how many of a tile's size are needed at a time; `other_bytes`: what else the caller holds of `WORK_BYTES`.
    """
    factors = head.hidden.to(head.products)
    edge_pieces, token_pieces = tile_plan(
        *(head.hidden.shape[0], *head.weight.shape),
        itemsize=head.statistics.itemsize,
        buffers=buffers,
        other_bytes=other_bytes + (factors is not head.hidden) * factors.nbytes,
    )
    work = Workspace(head.hidden, widest(edge_pieces) * widest(token_pieces), head.statistics)
    for tile in head.tiles(token_pieces):
        for start, stop in edge_pieces:
            rows = factors[start:stop]
            z = head.project(rows, tile, work("z", stop - start, tile.width), work)
            yield LogitTile(tile, slice(start, stop), rows, z, work)
