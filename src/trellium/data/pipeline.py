"""The one way from a dataset's rows to what a trainer takes, whatever the rows are and whichever the trainer is.

A kind of row says how rows are read and encoded (`RowKind`). All else is here: one pass through `datasets.map`, cached by the content of dataset,
tokenizer and options, in as many processes as are asked for, under one progress bar; then one look at the counts that pass wrote beside the
tokens, so that a second run says the same without tokenizing again. Rows in which nothing would be trained are left out and counted; if that is
all of them, it is an error, because such a run would finish without having learned anything. A stream goes the same way as it is read, without
an account, because nobody can go back for it.

Cost: the encoding of the rows; 33 bytes a row for the counts, and one reading of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from datasets import Dataset, DatasetDict, Features, IterableDataset, IterableDatasetDict, List, Value

from trellium.data.formats import RowFormat
from trellium.data.images import undecoded
from trellium.data.report import FATE_REASONS, Fate, PreparationReport, log_report, why_none_is_left
from trellium.data.rows import place_of, read_number
from trellium.data.token_checks import NO_LIMITS, TokenLimits
from trellium.errors import ConfigError, DatasetError

Row = dict[str, Any]
Rows: TypeAlias = Dataset | IterableDataset
Prepared: TypeAlias = tuple[Rows, PreparationReport | None]

TOKENS = List(Value("int32"))
"""The type of a column of tokens or labels."""

_COUNTS = Features(
    {
        "origin": Value("int64"),
        "fate": Value("int8"),
        "tokens": Value("int32"),
        "trained": Value("int32"),
        "longest": Value("int32"),
        "cut": Value("int32"),
        "merged": Value("bool"),
        "unstopped": Value("bool"),
    }
)


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """How a dataset is prepared, of whatever kind its rows are.

    Attributes:
        max_length: tokens a sequence may have, at most; None for no limit.
        eos_token: ends texts and completions in place of the tokenizer's own.
        num_proc: processes that tokenize.
        keep_columns: columns of numbers that stay beside the tokens, e.g. `margin`; those that the dataset has.
        limits: of the model; a row beyond them is an error.
        source: what to call the rows' origin in errors, e.g. a file; `name` if None.
        name: what to call the dataset in the log and on the progress bar.

    Raises:
        ConfigError: options that cannot be, or cannot be together.
    """

    max_length: int | None
    eos_token: str | None = None
    num_proc: int | None = None
    keep_columns: tuple[str, ...] = ()
    limits: TokenLimits = NO_LIMITS
    source: str | None = None
    name: str = "train"

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 2:
            raise ConfigError(
                f"max_length={self.max_length}, but a row needs two tokens for one to be predicted. Set at least 2, or None for no limit."
            )

    @property
    def called(self) -> str:
        """What the dataset is called in errors."""
        return self.source or self.name


@dataclass(frozen=True)
class EncodedRow:
    """What is made of a row.

    Attributes:
        values: of the columns that its kind writes.
        fate: whether it is trained on.
        tokens: of its sequences.
        trained: of these, the targets.
        longest: tokens of its longest sequence.
        cut: tokens that were cut from them.
        merged: whether a token crosses the border between prompt and completion.
        unstopped: whether its last trained token does not end a turn.
        origin: the place in the batch of the row that it is of.
    """

    values: dict[str, Any]
    fate: Fate
    tokens: int
    trained: int
    longest: int
    cut: int
    origin: int
    merged: bool = False
    unstopped: bool = False


class RowKind(Protocol):
    """How rows of one kind are read and encoded; a value, so that what was made of the same rows once is found again."""

    @property
    def format(self) -> RowFormat:
        """Which columns are read."""

    @property
    def features(self) -> Features:
        """The columns that are written, and their types."""

    def encode(self, rows: list[Row], places: list[str]) -> list[EncodedRow]:
        """A batch of rows, encoded; of one row there may come several.

        Args:
            rows: the columns read, and those of numbers that are kept.
            places: of each row, for errors.
        """


@dataclass(frozen=True)
class EncodeRows:
    """A batch of rows (columns of lists, and their indices) to a batch of what is made of them: the function that `datasets` maps.

    Attributes:
        kind: of the rows.
        keep: columns of numbers that stay.
        name: of the dataset, for errors.
        streaming: leave rows that are not kept out, and the counts with them, because nobody can go back for them.
        revision: raised when the result for the same row changes, so that results of older versions are not found.
    """

    kind: RowKind
    keep: tuple[str, ...]
    name: str
    streaming: bool
    revision: int = 3

    @property
    def features(self) -> Features:
        """The columns that are written, and their types."""
        kept = {column: Value("float64") for column in self.keep}
        return Features({**self.kind.features, **kept, **({} if self.streaming else _COUNTS)})

    def __call__(self, batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        rows = [dict(zip(batch, fields, strict=True)) for fields in zip(*batch.values(), strict=True)]
        places = [place_of(row, index, self.name) for row, index in zip(rows, indices, strict=True)]
        encoded = self.kind.encode(rows, places)
        if self.streaming:
            encoded = self._kept(encoded, places, at_start=indices[:1] == [0])
        columns: dict[str, list] = {}
        for name in self.kind.features:
            columns[name] = [row.values[name] for row in encoded]
            if self.streaming:  # hands rows out as they are; a file of rows takes arrays, at less cost
                columns[name] = [value.tolist() if isinstance(value, np.ndarray) else value for value in columns[name]]
        for name in self.keep:
            columns[name] = [read_number(rows[row.origin], places[row.origin], name) for row in encoded]
        if not self.streaming:
            for name in _COUNTS:
                columns[name] = [getattr(row, name) for row in encoded]
            columns["origin"] = [indices[row.origin] for row in encoded]
        return columns

    def _kept(self, encoded: list[EncodedRow], places: list[str], *, at_start: bool) -> list[EncodedRow]:
        kept = [row for row in encoded if row.fate is Fate.KEPT]
        if not kept and at_start:
            raise DatasetError(
                f"{self.name}: not one of the first {len(places)} rows has a token to train. The first, {places[0]}, has "
                f"{FATE_REASONS[encoded[0].fate]}. Check the masks and the loss options, or raise max_length."
            )
        return kept


def open_rows(dataset: object, options: PipelineOptions) -> tuple[Rows, list[str], Row]:
    """A dataset that can be prepared, its columns and its first row.

    Raises:
        DatasetError: no dataset, several, or one without a row.
        ConfigError: a dataset with a transform, which would run after preparation.
    """
    called = options.called
    if isinstance(dataset, dict | DatasetDict | IterableDatasetDict):
        splits = ", ".join(map(repr, dataset)) or "none"
        raise DatasetError(
            f"{called}: expected one dataset, got a dict of them ({splits}). Choose one: dataset['train']."
        )
    if not isinstance(dataset, Dataset | IterableDataset):
        raise DatasetError(
            f"{called}: expected a datasets.Dataset or IterableDataset, got {type(dataset).__name__}. datasets.Dataset.from_list(rows) makes one from a list of dicts."
        )
    if isinstance(dataset, Dataset) and dataset.format["type"] == "custom":
        raise ConfigError(
            f"{called}: the dataset has a transform (with_transform or set_transform), which would run after tokenization. Apply it with dataset.map, or reset it with dataset.with_format(None)."
        )
    rows = dataset.with_format(None)
    first = next(iter(rows), None)
    if first is None:
        raise DatasetError(
            f"{called}: the dataset is empty. Training needs at least one row: check the file, the split, and any filter."
        )
    return rows, list(rows.column_names or first), first


def rows_at_once(format: RowFormat) -> int:
    """How many rows are in memory together while they are prepared."""
    return 64 if format.images else 1000


def encode_rows(rows: Rows, columns: Sequence[str], kind: RowKind, options: PipelineOptions) -> Prepared:
    """The rows that are trained on, encoded, and the account of what was done, which is logged; no account for an `IterableDataset`.

    Args:
        rows: as `open_rows` gives them.
        columns: theirs.
        kind: of the rows.
        options: how.

    Returns:
        A dataset with the columns that the kind writes and those of `keep_columns` that are there.

    Raises:
        DatasetError: a row that is wrong, or no row with anything to train.
    """
    keep = tuple(column for column in options.keep_columns if column in columns)
    encode = EncodeRows(kind, keep, options.called, streaming=isinstance(rows, IterableDataset))
    read = list(dict.fromkeys((*kind.format.columns, *keep)))
    chosen = rows.select_columns(read)
    if kind.format.images:
        chosen = undecoded(chosen, kind.format.images)
    shared: dict[str, Any] = {
        "with_indices": True,
        "batched": True,
        "batch_size": rows_at_once(kind.format),
        "remove_columns": read,
        "features": encode.features,
    }
    if isinstance(chosen, IterableDataset):
        return chosen.map(encode, **shared), None
    processes = options.num_proc or 1
    encoded = chosen.map(
        encode,
        num_proc=processes if processes > 1 and len(chosen) >= 2 * processes else None,
        desc=f"Tokenizing {options.name}",
        writer_batch_size=rows_at_once(kind.format),
        **shared,
    )
    return _keep_trainable(encoded, chosen, options)


def _keep_trainable(encoded: Dataset, rows: Dataset, options: PipelineOptions) -> tuple[Dataset, PreparationReport]:
    """The rows with something to train, and the account; `rows` are those that `encoded` was made of."""
    table = encoded.with_format("arrow").select_columns(list(_COUNTS))[:]
    counts = {name: np.asarray(table[name]) for name in _COUNTS}
    dropped, examples = {}, {}
    for fate in FATE_REASONS:
        origins = counts["origin"][counts["fate"] == fate]
        if origins.size:
            dropped[fate] = int(origins.size)
            examples[fate] = tuple(place_of(rows[int(index)], int(index), options.called) for index in origins[:3])
    kept = np.flatnonzero(counts["fate"] == Fate.KEPT)
    if not kept.size:
        raise DatasetError(f"{options.called}: no row has a token to train: {why_none_is_left(dropped, examples)}.")
    prepared = encoded.remove_columns(list(_COUNTS))
    if kept.size < len(encoded):
        prepared = prepared.select(kept)
    report = PreparationReport(
        name=options.name,
        rows=len(encoded),
        kept=int(kept.size),
        tokens=int(counts["tokens"][kept].sum()),
        trained_tokens=int(counts["trained"][kept].sum()),
        longest=int(counts["longest"][kept].max()),
        truncated=int((counts["cut"] > 0).sum()),
        tokens_cut=int(counts["cut"].sum()),
        dropped=dropped,
        examples=examples,
        merged_prompts=int(counts["merged"].sum()),
        unstopped=int(counts["unstopped"].sum()),
    )
    log_report(report, options.called)
    return prepared, report
