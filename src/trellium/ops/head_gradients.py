"""The gradients of a head's hidden states, weight and bias: how they are summed, and how an operator returns them.

Two ways to gather them. `sum_over_tiles` visits each tile of the vocabulary once, so a tile's gradient is summed in float32 and rounded once.
`BlockGradients` sums over blocks of edges, which visit the whole vocabulary each, in float32 for all of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trellium.ops import head_products
from trellium.ops.head_sharding import reduce_sum
from trellium.ops.head_tiles import Head, HeadTile, LogitTile, logit_tiles

Wanted = tuple[bool, bool, bool]
"""Of which of hidden, weight and bias a gradient is wanted."""


def gradient_dtype(weight: Tensor) -> torch.dtype:
    """The dtype to make `weight`'s gradient in: its own, or float32 where its `grad_dtype` says so.

    A graph that is being compiled cannot ask; there the gradient is rounded once and autograd sums it in `grad_dtype`.
    """
    wanted = weight.grad_dtype if weight.is_leaf and not torch.compiler.is_compiling() else weight.dtype
    return torch.float32 if wanted == torch.float32 else weight.dtype


def pack_gradients(
    head: Head, found: tuple[Tensor | None, Tensor | None, Tensor | None], weight_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """As an operator returns them: in the leaves' dtypes, empty where None."""
    hidden, weight, bias = found
    return (
        head.hidden.new_empty(0) if hidden is None else hidden.to(head.hidden.dtype),
        head.weight.new_empty(0, dtype=weight_dtype) if weight is None else weight.to(weight_dtype),
        head.weight.new_empty(0) if bias is None or head.bias is None else bias.to(head.bias.dtype),
    )


def fake_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Wanted, weight_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """What `pack_gradients` returns, without its values."""
    return (
        torch.empty_like(hidden) if wanted[0] else hidden.new_empty(0),
        torch.empty_like(weight, dtype=weight_dtype) if wanted[1] else weight.new_empty(0, dtype=weight_dtype),
        torch.empty_like(bias) if wanted[2] and bias is not None else weight.new_empty(0),
    )


def sum_over_tiles(
    head: Head,
    logit_gradient: Callable[[LogitTile], Tensor],
    *,
    buffers: int,
    wanted: Wanted,
    weight_dtype: torch.dtype,
    group: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients, from what turns each tile of logits into its gradient, in a buffer of its work. `group`: as of a `VocabularyShard`."""
    hidden = torch.zeros_like(head.hidden, dtype=head.statistics) if wanted[0] else None
    gathered = _TileGradients(head, weight=wanted[1], bias=wanted[2], dtype=weight_dtype)
    for logits in logit_tiles(head, buffers=buffers, other_bytes=0 if hidden is None else hidden.nbytes):
        grad = logit_gradient(logits)
        factor = head.as_factor(grad, logits.work)
        if hidden is not None:
            head_products.add_product(hidden[logits.rows], factor, logits.tile.weight)
        gathered.add(logits, grad, factor)
    gathered.close()
    if hidden is not None:
        reduce_sum(hidden, group)
    return pack_gradients(head, (hidden, gathered.weight, gathered.bias), weight_dtype)


class LogitGradient:
    """What turns a tile of logits into the gradient of Σ `of_target` · log p[target] + `of_entropy` · entropy + `of_all` · Σ log p, `[edges]` each.

    With the p of the tile, d log p[target] = 1[target] - p, d entropy = -p · (log p + entropy), d Σ log p = 1 - V · p.
    """

    def __init__(
        self,
        head: Head,
        target: Tensor,
        highest: Tensor,
        log_total: Tensor,
        *,
        of_target: Tensor | None,
        of_entropy: tuple[Tensor, Tensor] | None = None,
        of_all: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """`of_entropy`: with the entropies; `of_all`: with the number of tokens V, `[edges]`."""
        self._head, self._target, self._highest, self._log_total = head, target, highest, log_total
        self._of_p = torch.zeros_like(highest)  # what multiplies -p
        self._of_target = self._of_entropy = self._of_all = None
        if of_target is not None:
            self._of_target = of_target.to(head.statistics) * head.slope
            self._of_p += self._of_target
        if of_entropy is not None:
            self._of_entropy = of_entropy[0].to(head.statistics) * head.slope
            self._of_p += self._of_entropy * of_entropy[1]
        if of_all is not None:
            self._of_all = of_all[0].to(head.statistics) * head.slope
            self._of_p += self._of_all * of_all[1]

    def __call__(self, logits: LogitTile) -> Tensor:
        """The gradient of one tile, in a buffer; the logits are overwritten."""
        z, rows = logits.z, logits.rows
        bend = self._head.take_bend(z, logits.work)
        z.sub_(self._highest[rows].unsqueeze(1)).sub_(self._log_total[rows].unsqueeze(1))  # log p
        if self._of_entropy is None:
            grad = z.exp_().mul_(-self._of_p[rows].unsqueeze(1))
        else:
            grad = torch.exp(z, out=logits.work("probability", *z.shape))
            z.clamp_(min=self._head.lowest).mul_(-self._of_entropy[rows].unsqueeze(1))
            grad.mul_(z.sub_(self._of_p[rows].unsqueeze(1)))
        if self._of_target is not None:
            _add_at_targets(grad, self._target[rows] - logits.tile.start, self._of_target[rows])
        if self._of_all is not None:
            grad.add_(self._of_all[rows].unsqueeze(1))
        return grad if bend is None else grad.mul_(bend)


def _add_at_targets(tile: Tensor, place: Tensor, addend: Tensor) -> None:
    """Add `addend` `[rows]` to each row's entry at `place`, where that lies in the tile."""
    width = tile.shape[1]
    here = (place >= 0) & (place < width)
    tile.scatter_add_(1, place.clamp(0, width - 1).unsqueeze(1), torch.where(here, addend, 0.0).unsqueeze(1))


class _TileGradients:
    """The gradients of the weight and the bias, a tile of the vocabulary after the other."""

    def __init__(self, head: Head, *, weight: bool, bias: bool, dtype: torch.dtype) -> None:
        self.statistics = head.statistics
        self.weight = torch.empty_like(head.weight, dtype=dtype) if weight else None
        self.bias = torch.empty_like(head.bias) if bias and head.bias is not None else None
        self._tile: HeadTile | None = None
        self._of_weight: Tensor | None = None
        self._of_bias: Tensor | None = None

    def add(self, logits: LogitTile, grad: Tensor, factor: Tensor) -> None:
        """`grad`: the tile's gradient in the statistics' dtype; `factor`: the same in the products'."""
        fresh = logits.tile is not self._tile
        if fresh:
            self.close()
            self._open(logits.tile)
        if self._of_bias is not None:
            self._of_bias.add_(grad.sum(dim=0))
        if self._of_weight is not None:
            sum_product = head_products.set_product if fresh else head_products.add_product
            sum_product(self._of_weight, factor.t(), logits.factors)

    def _open(self, tile: HeadTile) -> None:
        self._tile = tile
        columns = slice(tile.start, tile.start + tile.width)
        if self.weight is not None:
            part = self.weight[columns]
            exact = part.dtype == self.statistics
            self._of_weight = part if exact else torch.empty_like(part, dtype=self.statistics)
        if self.bias is not None:
            self._of_bias = torch.zeros_like(self.bias[columns], dtype=self.statistics)

    def close(self) -> None:
        """Round the sums of the tile that is open."""
        if self._tile is None:
            return
        columns = slice(self._tile.start, self._tile.start + self._tile.width)
        if self.weight is not None and self.weight.dtype != self.statistics:
            self.weight[columns] = self._of_weight
        if self.bias is not None:
            self.bias[columns] = self._of_bias


class BlockGradients:
    """The gradients of hidden, weight and bias, None where not wanted, a block of edges after the other."""

    def __init__(self, head: Head, wanted: Wanted) -> None:
        self._head = head
        self.hidden = torch.zeros_like(head.hidden) if wanted[0] else None
        self.weight = torch.empty_like(head.weight, dtype=head.statistics) if wanted[1] else None
        self.bias = None
        if wanted[2] and head.bias is not None:
            self.bias = torch.zeros_like(head.bias, dtype=head.statistics)
        self._fresh = True

    def add_weight(self, columns: slice, factor: Tensor, rows: Tensor) -> None:
        """Add `factor.T @ rows` to the tokens `columns`; within the first block, fill them with it."""
        assert self.weight is not None
        sum_product = head_products.set_product if self._fresh else head_products.add_product
        sum_product(self.weight[columns], factor.t(), rows)

    def close_block(self) -> None:
        """The block's tiles are all added."""
        self._fresh = False

    def pack(self, weight_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        if self._fresh and self.weight is not None:  # no edges
            self.weight.zero_()
        return pack_gradients(self._head, (self.hidden, self.weight, self.bias), weight_dtype)
