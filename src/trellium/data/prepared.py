"""Rows that come with `input_ids` and `labels` and are taken as they are: they are looked at all the same.

A dataset on disk is checked at once, a column at a time (about 10 ns a token); a stream as it is read. The first row that is wrong is then read by the
same functions as any other row, so its message is theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset

from trellium.data.rows import place_of, read_tokens
from trellium.data.sequence import IGNORE_INDEX
from trellium.data.token_checks import TokenLimits, check_labels
from trellium.errors import DatasetError


@dataclass(frozen=True)
class CheckRows:
    """Checks prepared rows one at a time; what `datasets` maps over a stream.

    Attributes:
        columns: those that are read, `input_ids` first.
        limits: of the model.
        name: of the dataset, for errors.
    """

    columns: tuple[str, ...]
    limits: TokenLimits
    name: str

    def __call__(self, row: dict[str, Any], index: int) -> dict[str, Any]:
        self.check(row, index)
        return row

    def check(self, row: Mapping[str, Any], index: int) -> None:
        """Raise a `DatasetError` with the row's place for whatever is wrong with it."""
        where = place_of(row, index, self.name)
        read = read_tokens(row, where, self.columns)
        if not read["input_ids"]:
            raise DatasetError(
                f"{where}: has no tokens. Drop the row with dataset.filter(lambda row: row['input_ids'])."
            )
        self.limits.check(read["input_ids"], where)
        if "labels" in read:
            check_labels(read["input_ids"], read["labels"], where)


def check_prepared(
    dataset: Dataset | IterableDataset, columns: list[str], limits: TokenLimits, name: str
) -> Dataset | IterableDataset:
    """The dataset as it came, once every row of it is known to be one; a stream checks its rows as they are read.

    Args:
        dataset: rows with `input_ids` and perhaps `labels`.
        columns: the names of its columns.
        limits: of the model.
        name: what to call the dataset in errors.

    Raises:
        DatasetError: no `input_ids`; masks that would be ignored; a row that is wrong; no row with anything to train.
    """
    if "input_ids" not in columns:
        raise DatasetError(
            f"{name}: preparation is skipped, but there is no 'input_ids' among the columns {', '.join(map(repr, columns))}. "
            "Tokenize the rows first, or do not set skip_prepare_dataset."
        )
    masks = [column for column in ("assistant_masks", "completion_mask") if column in columns]
    if masks and "labels" not in columns:
        raise DatasetError(
            f"{name}: preparation is skipped, so {' and '.join(map(repr, masks))} would be ignored. Give 'labels' with -100 where a token is not trained, or do not set skip_prepare_dataset."
        )
    check = CheckRows(("input_ids", *(["labels"] if "labels" in columns else [])), limits, name)
    if isinstance(dataset, IterableDataset):
        return dataset.map(check, with_indices=True, features=dataset.features)
    _check_columns(dataset, check)
    return dataset


def _check_columns(dataset: Dataset, check: CheckRows) -> None:
    start, trained = 0, 0
    for batch in dataset.with_format("arrow").select_columns(list(check.columns)).iter(batch_size=10_000):
        columns = [batch[name].combine_chunks() for name in check.columns]
        if not _are_right(columns, check.limits):
            for index in range(start, start + batch.num_rows):
                check.check(dataset[index], index)
        start += batch.num_rows
        trained += _trained(columns)
    if not trained:
        raise DatasetError(
            f"{check.name}: no row has a token to train: every token is masked, or alone in its row. Check the labels."
        )


def _are_right(columns: list[pa.Array], limits: TokenLimits) -> bool:
    """Whether every row of a batch is as it must be; where this is False one of them may not be."""
    values = []
    for column in columns:
        if not pa.types.is_list(column.type) and not pa.types.is_large_list(column.type):
            return False
        value = pc.list_flatten(column)
        if not pa.types.is_integer(value.type) or column.null_count or value.null_count:
            return False
        values.append(value.to_numpy(zero_copy_only=False))
    lengths = [pc.list_value_length(column).to_numpy(zero_copy_only=False) for column in columns]
    ids, labels = values[0], values[-1]
    return bool(
        np.array_equal(lengths[0], lengths[-1])
        and (lengths[0] > 0).all()
        and (limits.positions is None or (lengths[0] <= limits.positions).all())
        and ((ids >= 0) & (ids < limits.tokens)).all()
        and (len(columns) == 1 or ((labels == IGNORE_INDEX) | (labels == ids)).all())
    )


def _trained(columns: list[pa.Array]) -> int:
    """Tokens of a batch that are targets: the first of a row never is one."""
    lengths = pc.list_value_length(columns[0]).to_numpy(zero_copy_only=False)
    target = np.ones(int(lengths.sum()), dtype=bool)
    if len(columns) > 1:
        target = pc.list_flatten(columns[-1]).to_numpy(zero_copy_only=False) != IGNORE_INDEX
    starts = np.cumsum(lengths) - lengths
    target[starts[lengths > 0]] = False
    return int(target.sum())
