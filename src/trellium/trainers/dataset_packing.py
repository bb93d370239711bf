"""Pack a tokenized dataset ahead of training, under TRL's name for it; `packing=True` does the same within a trainer."""

from __future__ import annotations

from typing import Any, get_args

from datasets import Dataset, DatasetDict, IterableDataset

from trellium.errors import ConfigError, DatasetError
from trellium.forest.packed_rows import pack_rows
from trellium.forest.packing import Strategy

_MADE_AGAIN = ("attention_mask", "position_ids", "token_type_ids")
"""Columns that a packed row needs no more: where its sequences lie says it."""


def pack_dataset(
    dataset: Any, seq_length: int, strategy: Strategy = "bfd", map_kwargs: dict[str, Any] | None = None
) -> Any:
    """Rows of `input_ids`, and `labels` if they have them, to fewer rows of up to `seq_length` tokens.

    Packed over the whole dataset at once, where TRL packs each thousand rows apart; the first token of a sequence is no target.

    Args:
        dataset: a `Dataset`, a `DatasetDict` or an `IterableDataset`.
        seq_length: tokens of a row.
        strategy: `bfd`, whole sequences, best fit decreasing, longer ones cut; `bfd_split`, longer ones become several; `wrapped`, one behind the
            other and cut where a row is full.
        map_kwargs: there is nothing for it to say here; None or empty.

    Returns:
        Rows of `input_ids`, `labels` and `seq_lengths`, the tokens of each sequence. `SFTTrainer` takes them as they are with `packing=True` and
        `dataset_kwargs={"skip_prepare_dataset": True}`.

    Raises:
        ConfigError: a strategy that is none, a length that cannot be, or `map_kwargs`.
        DatasetError: no `input_ids`, or columns that would be lost.
    """
    if strategy not in get_args(Strategy):
        raise ConfigError(f"strategy must be one of {', '.join(get_args(Strategy))}, got {strategy!r}")
    if seq_length < 2:
        raise ConfigError(
            f"seq_length must be at least 2, one token to predict from and one to predict; got {seq_length}"
        )
    if map_kwargs:
        raise ConfigError(
            f"map_kwargs={map_kwargs!r}: rows are packed over the whole dataset, in one way. Leave it out."
        )
    if isinstance(dataset, DatasetDict):
        return DatasetDict({name: pack_dataset(part, seq_length, strategy) for name, part in dataset.items()})
    if not isinstance(dataset, Dataset | IterableDataset):
        raise DatasetError(f"expected a datasets.Dataset, DatasetDict or IterableDataset, got {type(dataset).__name__}")
    columns = set(dataset.column_names or ())
    if "input_ids" not in columns:
        raise DatasetError(
            f"there is no column 'input_ids' to pack, but {', '.join(sorted(columns))}. Tokenize the rows first."
        )
    lost = sorted(columns - {"input_ids", "labels", *_MADE_AGAIN})
    if lost:
        raise DatasetError(
            f"packed rows have no {', '.join(lost)}: masks belong into 'labels', as -100 where a token is no target. Remove the columns."
        )
    rows = dataset.select_columns([name for name in ("input_ids", "labels") if name in columns])
    if "labels" not in columns:
        rows = rows.map(_all_targets)
    return pack_rows(rows, seq_length, strategy, name="dataset")


def _all_targets(row: dict[str, list[int]]) -> dict[str, list[int]]:
    return {"labels": row["input_ids"]}
