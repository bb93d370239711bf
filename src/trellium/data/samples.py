"""How the rows of a prepared dataset become the sequences of a batch, for each method.

A reader says three things: which columns it reads, which sequences a batch of rows is made of (and of which row each is), and how large those of a row can
be, which the shapes of a run are planned from without making the sequences. Readers are values: they can be sent to the workers of a data loader.

Methods that compare samples get the same number of sequences from every row, in a fixed order: sample `k · i + j` is the `j`-th of row `i`.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import pyarrow as pa

from trellium.data.sequence import IGNORE_INDEX, Sequence

if TYPE_CHECKING:
    from torch import Tensor

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Samples:
    """The sequences of a batch of `B` rows.

    Attributes:
        sequences: `S` of them.
        row: `[S]` int64, the row that each is of.
        tokens: those of the rows; less than the sequences have where a method makes sequences that are not in the data.
    """

    sequences: list[Sequence]
    row: np.ndarray
    tokens: int

    @classmethod
    def of_rows(cls, sequences: list[Sequence], row: Ordered[int] | np.ndarray) -> Samples:
        """Sequences that are all in the data."""
        return cls(sequences, np.asarray(row, dtype=np.int64), sum(map(len, sequences)))


@dataclass(frozen=True, slots=True)
class RowSizes:
    """Per row of a prepared dataset, `[n]` int64 each.

    Attributes:
        longest: tokens of its longest sequence.
        tokens: tokens of its sequences together.
        forest_tokens: the same where a prefix that its sequences share by construction counts once; the trees may share more, never less.
        trained: trained tokens of its sequences together.
    """

    longest: np.ndarray
    tokens: np.ndarray
    forest_tokens: np.ndarray
    trained: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def together(cls, parts: Ordered[RowSizes]) -> RowSizes:
        """Of several datasets, one behind the other."""
        empty = np.zeros(0, dtype=np.int64)
        return cls(
            *(
                np.concatenate([empty, *(getattr(part, name) for part in parts)])
                for name in ("longest", "tokens", "forest_tokens", "trained")
            )
        )


class RowReader(Protocol):
    """From prepared rows to sequences."""

    samples_per_row: ClassVar[int | None]
    """How many sequences each row gives; None where rows differ."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns it reads."""

    def __call__(self, rows: Ordered[Row]) -> Samples:
        """The sequences of a batch."""

    def sizes(self, table: pa.Table) -> RowSizes:
        """Those of the rows of a table with `columns`."""


class BatchImages(Protocol):
    """From the images of rows to what a model is given of them."""

    @property
    def column(self) -> str:
        """The column in which a row's images stand."""

    def holds(self, ids: np.ndarray) -> bool:
        """Whether a sequence has tokens that stand for an image."""

    def __call__(self, images: Ordered[Ordered[Any]], input_ids: Tensor) -> dict[str, Tensor]:
        """The model's tensors of a batch: `images` in the order in which they lie in it, by row or tree; `input_ids` `[R, L]`."""


@dataclass(frozen=True, slots=True)
class ReadTokens:
    """One sequence a row, of `input_ids` and `labels`; or, where rows are packed, as many as `seq_lengths` says lie one behind the other in it."""

    samples_per_row: ClassVar[int | None] = None
    packed: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        return ("input_ids", "labels", "seq_lengths") if self.packed else ("input_ids", "labels")

    def __call__(self, rows: Ordered[Row]) -> Samples:
        sequences, of_row = [], []
        for index, row in enumerate(rows):
            for piece in _pieces(Sequence.from_row(dict(row)), row.get("seq_lengths")):
                sequences.append(piece)
                of_row.append(index)
        return Samples.of_rows(sequences, of_row)

    def sizes(self, table: pa.Table) -> RowSizes:
        labels = table["labels"].combine_chunks()
        lengths = list_lengths(table, "labels")
        ends = np.cumsum(lengths)
        counted = np.append(0, np.cumsum(np.asarray(labels.flatten()) != IGNORE_INDEX))
        return RowSizes(lengths, lengths, lengths, counted[ends] - counted[ends - lengths])


def _pieces(whole: Sequence, lengths: Ordered[int] | None) -> list[Sequence]:
    if lengths is None or len(lengths) < 2:
        return [whole]
    ends = np.cumsum(lengths)
    pieces = []
    for begin, end in zip(np.append(0, ends[:-1]), ends, strict=True):
        trained = whole.trained[begin:end].copy()
        trained[:1] = False
        pieces.append(Sequence(whole.input_ids[begin:end], trained, whole.weight))
    return pieces


def after_prompt(prompt: Ordered[int], completion: Ordered[int]) -> Sequence:
    """A sequence in which the completion is trained."""
    trained = np.ones(len(prompt) + len(completion), dtype=bool)
    trained[: max(len(prompt), 1)] = False
    return Sequence(np.concatenate([np.asarray(prompt, np.int64), np.asarray(completion, np.int64)]), trained)


def _two_of_each(rows: Ordered[Row], prompt: str, *completions: str) -> list[Sequence]:
    return [after_prompt(row[prompt], row[completion]) for row in rows for completion in completions]


def _sizes_of_two(prompt: np.ndarray, one: np.ndarray, other: np.ndarray) -> RowSizes:
    completions = one + other
    return RowSizes(prompt + np.maximum(one, other), 2 * prompt + completions, prompt + completions, completions)


@dataclass(frozen=True, slots=True)
class ReadPairs:
    """Two sequences a row: the prompt with the chosen completion, and with the rejected one, of `prompt_ids`, `chosen_ids` and `rejected_ids`."""

    samples_per_row: ClassVar[int | None] = 2

    @property
    def columns(self) -> tuple[str, ...]:
        return ("prompt_ids", "chosen_ids", "rejected_ids")

    def __call__(self, rows: Ordered[Row]) -> Samples:
        sequences = _two_of_each(rows, *self.columns)
        return Samples.of_rows(sequences, np.repeat(np.arange(len(rows)), 2))

    def sizes(self, table: pa.Table) -> RowSizes:
        return _sizes_of_two(*(list_lengths(table, name) for name in self.columns))


@dataclass(frozen=True, slots=True)
class ReadWholePairs:
    """Two sequences a row, of which no token is a target: `chosen_ids` and `rejected_ids`, each with its prompt."""

    samples_per_row: ClassVar[int | None] = 2

    @property
    def columns(self) -> tuple[str, ...]:
        return ("chosen_ids", "rejected_ids")

    def __call__(self, rows: Ordered[Row]) -> Samples:
        sequences = [_untrained(row[name]) for row in rows for name in self.columns]
        return Samples.of_rows(sequences, np.repeat(np.arange(len(rows)), 2))

    def sizes(self, table: pa.Table) -> RowSizes:
        chosen, rejected = (list_lengths(table, name) for name in self.columns)
        tokens = chosen + rejected
        return RowSizes(np.maximum(chosen, rejected), tokens, tokens, np.zeros_like(tokens))


def _untrained(tokens: Ordered[int]) -> Sequence:
    return Sequence(np.asarray(tokens, dtype=np.int64), np.zeros(len(tokens), dtype=bool))


@dataclass(frozen=True, slots=True)
class ReadCompletions:
    """One sequence a row, of `prompt_ids` and `completion_ids`, of which the completion is trained."""

    samples_per_row: ClassVar[int | None] = 1

    @property
    def columns(self) -> tuple[str, ...]:
        return ("prompt_ids", "completion_ids")

    def __call__(self, rows: Ordered[Row]) -> Samples:
        sequences = [after_prompt(row["prompt_ids"], row["completion_ids"]) for row in rows]
        return Samples.of_rows(sequences, np.arange(len(rows)))

    def sizes(self, table: pa.Table) -> RowSizes:
        prompt, completion = (list_lengths(table, name) for name in self.columns)
        return RowSizes(prompt + completion, prompt + completion, prompt + completion, completion)


@dataclass(frozen=True, slots=True)
class ReadMismatched:
    """Two sequences a row: the prompt with its own completion, and with that of another row, from which the divergence of a policy is estimated.

    The other row's completion came with the row (`kl_completion_ids`), so it is the same in any order and batch, and what a reference said of it before
    the run is of it.
    """

    samples_per_row: ClassVar[int | None] = 2

    @property
    def columns(self) -> tuple[str, ...]:
        return ("prompt_ids", "completion_ids", "kl_completion_ids")

    def __call__(self, rows: Ordered[Row]) -> Samples:
        sequences = _two_of_each(rows, *self.columns)
        return Samples(sequences, np.repeat(np.arange(len(rows)), 2), sum(map(len, sequences[::2])))

    def sizes(self, table: pa.Table) -> RowSizes:
        return _sizes_of_two(*(list_lengths(table, name) for name in self.columns))


def list_lengths(table: pa.Table, column: str) -> np.ndarray:
    """`[n]` int64, the lengths of the lists of a column."""
    return np.asarray(table[column].combine_chunks().value_lengths(), dtype=np.int64)
