"""Held-out rows over several processes: each row is evaluated by one of them, once, and all run as many batches.

accelerate evens out the processes with rows from the beginning of the set, which would count twice in a mean. Here what lacks is a batch in which nothing
counts: processes stay in step, where one reduces or gathers weights in a batch. Cost: a forward of at most one such batch a process and evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from trellium.forest.batch import Shape
from trellium.forest.collate import ForestCollator


class EvenBatches:
    """The batches of one process, filled up with idle ones to as many as any process has.

    Args:
        loader: of this process, from accelerate with `even_batches` off.
        collator: what made its batches.
        processes: how many share the set.
    """

    def __init__(self, loader: DataLoader, collator: ForestCollator, processes: int) -> None:
        self._loader = loader
        self._collator = replace(collator, batch_rows=collator.batch_rows or 1)
        self._batches = math.ceil(loader.batch_sampler.total_length / processes)  # type: ignore[union-attr]

    @property
    def dataset(self) -> Any:
        return self._loader.dataset

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        missing, shape = self._batches, self._least()
        for batch in self._loader:
            missing -= 1
            shape = _shape_of(batch)
            yield batch
        for _ in range(missing):
            yield self._collator.idle(shape)

    def _least(self) -> Shape:
        """What a process that gets no row at all runs: the smallest planned shape."""
        plan, multiple = self._collator.plan, self._collator.pad_to_multiple_of or 1
        planned = [each.shape for each in plan.planned if each.evaluation] if plan is not None else []
        return min(planned, default=Shape(1, multiple, multiple, multiple if self._collator.terms else 0))


def _shape_of(batch: dict[str, Tensor]) -> Shape:
    rows, length = batch["input_ids"].shape
    terms = batch["term_edge"].numel() if "term_edge" in batch else 0
    return Shape(rows, length, batch["edge_position"].numel(), terms)
