"""The rows of an optimizer step dealt to processes and micro-batches by what they cost, instead of by their order.

A step has the rows that the sampler drew for it, and its loss is one sum over them, so where each lies is free; `forest.balance` says where. Only the order
changes in which the sampler's rows are read, within each step: accelerate cuts it into batches and gives every process its own as ever, a resumed run
passes over as many, and nothing is exchanged, because all processes know the order of all rows. Cost: a sort a step, a pass over the lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from itertools import cycle, islice
from typing import cast

import numpy as np
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, DataLoader, Sampler

from trellium.forest.balance import deal


@dataclass(frozen=True, slots=True)
class Dealing:
    """What shares the rows of a step.

    Attributes:
        ranks: processes that read batches of their own.
        micro_batches: batches of each that are dealt out together.
        pair: what a pair of a token and one it attends to costs, in tokens.
    """

    ranks: int
    micro_batches: int
    pair: float


class DealtOrder(Sampler[int]):
    """A sampler's rows, those of each step dealt out.

    Args:
        order: the sampler.
        costs: `[n]`, by row of the dataset.
        dealing: what shares a step.
        batch: rows of a batch.
        fills: whether the last round is filled up with the first rows, as accelerate does where nothing is dealt; it would take them from the dealt order.
    """

    def __init__(self, order: Sampler[int], costs: np.ndarray, dealing: Dealing, batch: int, *, fills: bool) -> None:
        self.order = order
        self._costs = costs
        self._dealing = dealing
        self._batch = batch
        self._round = batch * dealing.ranks
        self._fills = fills

    def __len__(self) -> int:
        rows = len(cast(Sized, self.order))
        return rows + self._missing(rows)

    def __iter__(self) -> Iterator[int]:
        left = iter(self.order)
        first: list[int] = []
        while step := list(islice(left, self._round * self._dealing.micro_batches)):
            first = first or step[: self._round]
            step += islice(cycle(first), self._missing(len(step)))
            yield from deal(np.asarray(step), self._costs, batch=self._batch, ranks=self._dealing.ranks).tolist()

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.order, "set_epoch"):
            self.order.set_epoch(epoch)

    def _missing(self, rows: int) -> int:
        return -rows % self._round if self._fills else 0


def deal_out(loader: DataLoader, costs: np.ndarray, dealing: Dealing) -> None:
    """Let a prepared loader read its rows as dealt; one with batches that are not cut from a sampler's order stays as it is."""
    batches = loader.batch_sampler
    shard = batches if isinstance(batches, BatchSamplerShard) else None
    cut = batches if shard is None else shard.batch_sampler
    if type(cut) is not BatchSampler or (shard is not None and shard.split_batches):
        return
    fills = shard is not None and shard.even_batches and not cut.drop_last
    dealing = Dealing(1 if shard is None else shard.num_processes, dealing.micro_batches, dealing.pair)
    cut.sampler = DealtOrder(cast(Sampler[int], cut.sampler), costs, dealing, cut.batch_size, fills=fills)
    if shard is not None:
        shard.sampler = cut.sampler  # where accelerate looks for it to tell it the epoch, if batches are passed over
