"""Whole rows of a head's logits, a block of edges at a time: what an operator needs that makes gradients before the logits are gone.

As many edges as fit into `WORK_BYTES`, with one exception. Until the first block is done nothing has been added to the weight's gradient, and its memory
holds the first block's logits: a tile's lie where the gradient of the tile's tokens will be, `[rows, tokens]` in the room of `[tokens, H]`, so up to `H`
edges need no memory of their own. With 152,000 tokens of width 896 that is a block of 896 edges instead of blocks of 40 to 100. Each block reads the head
twice and adds to all of its gradient, so few large blocks are what makes the products efficient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trellium.ops import head_products, head_tiles
from trellium.ops.head_gradients import BlockGradients
from trellium.ops.head_sharding import reduce_maximum
from trellium.ops.head_statistics import Statistics
from trellium.ops.head_tiles import Head, Workspace, even_split, widest

LENT_ROWS = 1024
"""The most edges whose logits lie in the weight's gradient: more are not more efficient, and their work buffers leave the cache."""

FEWEST_ROWS = 16
"""Edges of a block where not even these fit, as where the gradient of `hidden` takes all of `WORK_BYTES`."""

PAYING_ROWS = 96
"""Edges a block above which three products cost less than four over large tiles, measured with 152,000 tokens of width 896."""

_WORK_BUFFERS = 5
"""Tiles that one block's arithmetic may need besides the rows: a capped, a bent, an exponential, a product and a factor."""


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Pieces of the edges whose logits lie in the weight's gradient, those that have room of their own, and the pieces of the vocabulary."""

    lent: list[tuple[int, int]]
    own: list[tuple[int, int]]
    tokens: list[tuple[int, int]]

    @property
    def pays(self) -> bool:
        """Whether the blocks are large enough, on average, to cost less than making every logit a second time."""
        blocks = self.lent + self.own
        return len(blocks) == 1 or (len(blocks) > 1 and blocks[-1][1] >= PAYING_ROWS * len(blocks))


def row_plan(heads: Sequence[Head], *, wants_hidden: bool, lends: bool, group: str = "") -> RowPlan:
    """Cut so that whole rows of all heads' logits fit into `WORK_BYTES`. `lends`: whether there will be a gradient of the first one's weight.

    The ranks of `group` cut their edges alike, by the largest of their parts of the vocabulary.
    """
    first = heads[0]
    edges, vocabulary, itemsize = first.hidden.shape[0], first.weight.shape[0], first.statistics.itemsize
    width = max(head.hidden.shape[1] for head in heads)
    columns = min(head_tiles.VOCABULARY_TILE, head_tiles.TILE_BYTES // (itemsize * width))
    columns = max(head_tiles.ALIGNMENT, columns)
    held = first.hidden.nbytes if wants_hidden else 0
    room = (head_tiles.WORK_BYTES - held) // itemsize - 4 * columns * width

    largest = (
        int(reduce_maximum(first.hidden.new_tensor(vocabulary, dtype=torch.int64), group)) if group else vocabulary
    )

    def fitting(rooms: int) -> int:
        return max(FEWEST_ROWS, room // (rooms * (largest + width) + _WORK_BUFFERS * columns + 3 * width))

    own = fitting(len(heads))
    lends = lends and first.weight.is_contiguous()
    lent = min(first.hidden.shape[1], LENT_ROWS, fitting(len(heads) - 1)) if lends else 0
    tokens = even_split(vocabulary, columns, head_tiles.ALIGNMENT)
    if edges == 0:
        return RowPlan([], [], tokens)
    if edges <= own or lent < own:
        return RowPlan([], even_split(edges, own), tokens)
    lent = min(edges, lent)
    rest = even_split(edges - lent, own) if edges > lent else []
    return RowPlan([(0, lent)], [(start + lent, stop + lent) for start, stop in rest], tokens)


@dataclass(frozen=True, slots=True)
class Room:
    """Where a block's logits lie: the tile of the tokens from `start` on begins at `start · stride`. `lent`: by the weight's gradient."""

    flat: Tensor
    stride: int
    lent: bool = False


class RowBlock:
    """The logits of a few edges over the whole vocabulary, each tile of them contiguous."""

    def __init__(self, head: Head, rows: slice, room: Room, pieces: list[tuple[int, int]], work: Workspace) -> None:
        self.head, self.pieces, self.work, self._room = head, pieces, work, room
        self.factors = head.hidden[rows].to(head.products)
        self.count = self.factors.shape[0]
        self.rows = slice(0, self.count)
        self.tiles = [
            room.flat[start * room.stride :][: self.count * (stop - start)].view(self.count, stop - start)
            for start, stop in pieces
        ]

    def statistics(self, target: Tensor | None = None, **wanted: bool) -> Statistics:
        """Of these edges, empty; without targets none is chosen."""
        if target is None:
            target = torch.zeros(self.count, dtype=torch.int64, device=self.factors.device)
        return Statistics(self._room.flat, target, lowest=self.head.lowest, **wanted)

    def project(self, statistics: Statistics, *, fold: bool = False) -> None:
        """Make the logits, and find the highest and the targets'; with `fold` the sums as well, at the price of one more exponential a logit."""
        for z, tile in zip(self.tiles, self.head.tiles(self.pieces), strict=True):
            self.head.project(self.factors, tile, z, self.work)
            if fold:
                final = torch.mul(z, self.head.outer, out=self.work("final", *z.shape))
                statistics.fold(final, self.rows, tile.start, self.work)
            else:
                final = z
                if self.head.outer != 1.0:
                    final = torch.mul(z, self.head.outer, out=self.work("final", *z.shape))
                statistics.highest = statistics.raise_highest(final, self.rows, tile.start)[1]

    def exponentiate(self, statistics: Statistics) -> None:
        """Replace each logit by exp(z - highest), times the soft cap's derivative, and sum."""
        for z in self.tiles:
            bend = self.head.take_bend(z, self.work)
            probability = statistics.add_exponentials(z.sub_(statistics.highest.unsqueeze(1)), self.rows, self.work)
            if bend is not None:
                torch.mul(probability, bend, out=z)
            elif probability is not z:
                z.copy_(probability)

    def smooth(self, statistics: Statistics, label_smoothing: float) -> None:
        """Replace each logit by exp(z - highest) - `label_smoothing` / V · total, times the soft cap's derivative; the sums are known."""
        share = (statistics.total * (label_smoothing / statistics.vocabulary)).unsqueeze(1)
        for z in self.tiles:
            bend = self.head.take_bend(z, self.work)
            z.sub_(statistics.highest.unsqueeze(1)).exp_().sub_(share)
            if bend is not None:
                z.mul_(bend)

    def subtract_at_targets(self, statistics: Statistics, share: float = 1.0) -> None:
        """Subtract `share` of the total, times the soft cap's derivative, at each target: what is left is `total` times the gradient of the loss."""
        amount = statistics.total * -share
        if self.head.softcap is not None:
            amount = amount * (1.0 - (statistics.chosen / self.head.outer).square())
        bounds = statistics.target.new_tensor(self.pieces)
        vocabulary = self.pieces[-1][1]
        here = (statistics.target >= 0) & (statistics.target < vocabulary)
        token = statistics.target.clamp(0, vocabulary - 1)
        start, stop = bounds[torch.searchsorted(bounds[:, 1].contiguous(), token, right=True)].unbind(1)
        row = torch.arange(self.count, device=token.device)
        place = self._room.stride * start + row * (stop - start) + token - start
        self._room.flat.scatter_add_(0, place, torch.where(here, amount, 0.0))

    def multiply(self, scale: Tensor, total: Tensor, gradients: BlockGradients) -> Tensor | None:
        """Add the products to the gradients; the block's gradient of hidden. `scale`: `[rows]`, that of what the tiles hold divided by `total`."""
        exact = self.head.products == self.head.statistics
        # Probabilities that will be rounded are normalized before, so that they stay within the range of any dtype.
        of_rows = scale / total if exact else scale
        scaled = (self.factors * of_rows.unsqueeze(1)).to(self.head.products)
        found = None
        if gradients.hidden is not None:
            found = torch.zeros_like(self.factors, dtype=self.head.statistics)
        weights = self.head.tiles(self.pieces) if found is not None else iter([None] * len(self.pieces))
        for grad, (start, stop), tile in zip(self.tiles, self.pieces, weights, strict=True):
            factor = self._factor(grad if exact else grad.div_(total.unsqueeze(1)))
            if found is not None and tile is not None:
                head_products.add_product(found, factor, tile.weight)
            if gradients.bias is not None:
                gradients.bias[start:stop].addmv_(grad.t(), of_rows)
            if gradients.weight is not None:
                gradients.add_weight(slice(start, stop), factor, scaled)
        gradients.close_block()
        return None if found is None else found.mul_(of_rows.unsqueeze(1))

    def _factor(self, grad: Tensor) -> Tensor:
        """A tile in the products' dtype, and not in the room that their product will fill."""
        factor = self.head.as_factor(grad, self.work)
        if self._room.lent and factor is grad:
            return self.work("factor", *grad.shape).copy_(grad)
        return factor


def row_blocks(
    heads: Sequence[Head], plan: RowPlan, gradients: BlockGradients
) -> Iterator[tuple[slice, list[RowBlock]]]:
    """The edges block by block: which, and room for the logits of each head. `gradients`: of the first head."""
    first = heads[0]
    vocabulary, width = first.weight.shape
    own_heads = {True: len(heads) - 1, False: len(heads)}  # that the weight's gradient has no room for
    groups = [(pieces, lent) for pieces, lent in ((plan.lent, True), (plan.own, False)) if pieces]
    sizes = [widest(pieces) * vocabulary * own_heads[lent] for pieces, lent in groups]
    flat = first.hidden.new_empty(0, dtype=first.statistics)
    work = Workspace(first.hidden, 0, first.statistics)
    for (pieces, lent), size in zip(groups, sizes, strict=True):
        count = widest(pieces)
        if size > flat.numel():
            flat = first.hidden.new_empty(max(sizes), dtype=first.statistics)
        work.resize(count * widest(plan.tokens))
        rooms = [Room(part, count) for part in flat[:size].split(count * vocabulary)] if size else []
        if lent:
            assert gradients.weight is not None
            rooms.insert(0, Room(gradients.weight.view(-1), width, lent=True))
        for start, stop in pieces:
            rows = slice(start, stop)
            yield rows, [RowBlock(head, rows, room, plan.tokens, work) for head, room in zip(heads, rooms, strict=True)]
