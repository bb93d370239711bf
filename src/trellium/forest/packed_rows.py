"""A prepared dataset whose rows hold several sequences each, filled to a capacity.

What lies in which row is decided over the whole set from lengths alone (`packing.pack_lengths`); the tokens are then brought together a hundred rows at a
time, and cached like every other step of preparation. Rows that are streamed are packed a thousand at a time, because nobody knows the rest.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset, Features, IterableDataset, List, Value
from datasets.fingerprint import Hasher

from trellium.data.samples import list_lengths
from trellium.data.sequence import IGNORE_INDEX
from trellium.errors import ConfigError
from trellium.forest.packing import Packing, Strategy, pack_lengths

logger = logging.getLogger(__name__)

_TOKENS = ("input_ids", "labels")
_FEATURES = Features(
    {"input_ids": List(Value("int32")), "labels": List(Value("int32")), "seq_lengths": List(Value("int32"))}
)
_STREAMED = 1000
_FULL = 0.95
"""Rows that are less full than this are worth a word about longer ones."""
_REVISION = 1


def pack_rows(
    dataset: Dataset | IterableDataset,
    capacity: int | None,
    strategy: Strategy,
    *,
    name: str,
    longest: int | None = None,
) -> Dataset | IterableDataset:
    """Rows of `input_ids` and `labels` to fewer, fuller ones, with `seq_lengths`: the tokens of each sequence in a row.

    Args:
        dataset: prepared rows.
        capacity: tokens of a row.
        strategy: see `packing.pack_lengths`. `wrapped` rows are one sequence each.
        name: what to call the dataset in the log and on the progress bar.
        longest: tokens of a sequence, at most; None for those of a row.

    Returns:
        The packed rows. How full they are, and how many tokens were cut or sequences split, is logged; and where rows that may be longer than
        the longest sequence are not full, how full longer ones would be.

    Raises:
        ConfigError: no capacity.
    """
    if capacity is None:
        raise ConfigError("packing=True fills rows up to max_length, which is unset. Set max_length.")
    if isinstance(dataset, IterableDataset):
        pack = _PackStream(capacity, strategy, longest)
        return dataset.map(pack, batched=True, batch_size=_STREAMED, remove_columns=list(_TOKENS), features=_FEATURES)
    tables = dataset.select_columns(["input_ids"]).with_format("arrow").iter(batch_size=10_000)
    lengths = np.concatenate([list_lengths(table, "input_ids") for table in tables])
    packing = pack_lengths(lengths, capacity, strategy, longest=longest)
    cut = packing.cut_tokens or packing.split_sequences or packing.dropped_sequences
    logger.log(logging.WARNING if cut else logging.INFO, "%s packed (%s): %s.", name, strategy, packing)
    if longest == capacity and strategy != "wrapped" and packing.fill < _FULL and packing.rows > 1:
        longer = pack_lengths(lengths, 2 * capacity, strategy, longest=longest)
        if longer.fill > _FULL:
            logger.warning(
                "%s: rows of %d would be %.1f %% full. packed_row_length=%d and half as many rows a batch train the same with less padding.",
                *(name, 2 * capacity, 100 * longer.fill, 2 * capacity),
            )
    bounds = Dataset.from_dict({"row": np.arange(packing.rows)})
    return bounds.map(
        _Gather(dataset.select_columns(list(_TOKENS)).with_format("arrow"), packing),
        batched=True,
        batch_size=100,
        remove_columns=["row"],
        features=_FEATURES,
        new_fingerprint=Hasher.hash((dataset._fingerprint, capacity, strategy, longest, _REVISION)),
        desc=f"Packing {name}",
    )


@dataclass(frozen=True)
class _Gather:
    """The pieces of some rows, out of a dataset."""

    dataset: Dataset
    packing: Packing

    def __call__(self, batch: dict[str, list[int]]) -> dict[str, list]:
        packing = self.packing
        begin, end = packing.row_start[batch["row"][0]], packing.row_start[batch["row"][-1] + 1]
        needed, where = np.unique(packing.sequence[begin:end], return_inverse=True)
        table = self.dataset[needed.tolist()]
        starts = np.append(0, np.cumsum(list_lengths(table, "input_ids")))
        flat = {name: np.asarray(table[name].combine_chunks().flatten()) for name in _TOKENS}
        return _rows(flat, starts[where], packing, batch["row"], int(begin))


@dataclass(frozen=True)
class _PackStream:
    """A thousand rows that came, packed."""

    capacity: int
    strategy: Strategy
    longest: int | None

    def __call__(self, batch: dict[str, list]) -> dict[str, list]:
        lengths = [len(ids) for ids in batch["input_ids"]]
        packing = pack_lengths(lengths, self.capacity, self.strategy, longest=self.longest)
        flat = {name: np.concatenate([np.asarray(row, dtype=np.int32) for row in batch[name]]) for name in _TOKENS}
        starts = np.append(0, np.cumsum(lengths))[packing.sequence]
        return _rows(flat, starts, packing, range(packing.rows), 0)


def _rows(flat: dict[str, np.ndarray], starts: np.ndarray, packing: Packing, rows: Any, first: int) -> dict[str, list]:
    """Packed rows.

    Args:
        flat: the tokens and labels of sequences, one behind the other.
        starts: where the sequence of each piece begins in them.
        packing: whose pieces lie in which row.
        rows: the rows to make.
        first: the first of their pieces.
    """
    made: dict[str, list] = {"input_ids": [], "labels": [], "seq_lengths": []}
    for row in rows:
        pieces = range(int(packing.row_start[row]), int(packing.row_start[row + 1]))
        parts = [
            slice(int(starts[piece - first] + packing.begin[piece]), int(starts[piece - first] + packing.end[piece]))
            for piece in pieces
        ]
        lengths = [part.stop - part.start for part in parts]
        labels = np.concatenate([flat["labels"][part] for part in parts])
        # Nothing before a piece predicts its first token; the pieces of a wrapped row see each other.
        labels[[0] if packing.joined else np.cumsum([0, *lengths[:-1]])] = IGNORE_INDEX
        made["input_ids"].append(np.concatenate([flat["input_ids"][part] for part in parts]))
        made["labels"].append(labels)
        made["seq_lengths"].append([sum(lengths)] if packing.joined else lengths)
    return made
