"""Prepared dataset rows to the one batch form: what a trainer gives its data loader.

Which rows are in a batch is the sampler's decision. How their sequences lie is a layout, which never changes the mathematics:

- `padded`: one sequence a row, padded on the right;
- `packed`: the sequences of a batch one behind the other in one row, or, where the dataset's rows are packed, each of them a row;
- `shared`: the same, and sequences that begin alike share those tokens.

Linear in tokens. Where the shapes of a run are planned, a batch is filled up to the smallest planned shape that holds it; else
`pad_to_multiple_of` makes both the row length and the number of edges multiples, so that a device that compiles per shape meets few of them.

Rows with images share tokens only among their own sequences: with another row's they would have to share every image, which the tokens do not tell. What
the sequences of a row share, its images included, is forwarded once. The tensors of images are as many as there are; no shape is planned for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from trellium.data.samples import BatchImages, ReadTokens, RowReader, Samples
from trellium.data.sequence import Sequence
from trellium.errors import ConfigError
from trellium.forest.batch import ForestBatch, Shape
from trellium.forest.layout import TermFields, chains, trees
from trellium.forest.shapes import ShapePlan
from trellium.forest.trie import group_codes, prefix_order

Layout = Literal["padded", "packed", "shared"]


@dataclass(frozen=True, slots=True)
class ForestCollator:
    """Collate prepared rows into the tensors of a `ForestBatch`.

    Attributes:
        pad_token_id: the token of idle batches; padding itself repeats the first token of its row.
        pad_to_multiple_of: round row length and number of edges up to a multiple of this; None for no rounding. Read where nothing is planned.
        plan: the shapes a batch may have.
        evaluation: whether the batches are of evaluation, whose planned shapes are others.
        strict: whether a batch that no planned shape holds is an error; else it is rounded up to the multiple, as where nothing is planned.
        layout: how sequences lie in rows.
        read: how rows become sequences.
        terms: whether each sample reads its own scores. Then the batch also holds `row_weight` `[B]`, 1 for rows of the dataset, and the columns.
        columns: columns of numbers that rows bring: each becomes `row_<name>`, `[B]` float32.
        images: what the model is given of rows' images, as `model_inputs`; None where rows have none.
        batch_rows: `B` that a batch of terms is filled up to, where shapes are static; None for as many as come.

    Raises:
        ConfigError: a multiple below 1, or no pad token.
    """

    pad_token_id: int
    pad_to_multiple_of: int | None = None
    plan: ShapePlan | None = None
    evaluation: bool = False
    strict: bool = True
    layout: Layout = "padded"
    read: RowReader = field(default_factory=ReadTokens)
    terms: bool = False
    columns: tuple[str, ...] = ()
    batch_rows: int | None = None
    images: BatchImages | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.pad_token_id, int) or self.pad_token_id < 0:
            raise ConfigError(
                f"pad_token_id must be a token id, got {self.pad_token_id!r}. Give the tokenizer a pad token; its "
                "end-of-sequence token serves."
            )
        if self.pad_to_multiple_of is not None and self.pad_to_multiple_of < 1:
            raise ConfigError(f"pad_to_multiple_of must be at least 1, or none, got {self.pad_to_multiple_of}")

    def __call__(self, rows: Ordered[Mapping[str, Any]]) -> dict[str, Any]:
        """Rows to the mapping `ForestBatch.tensors()`, with `data_tokens` `[]` int64, the tokens of the rows, and what `terms` and `images` add.

        Raises:
            DatasetError: an empty batch or an empty row.
            ConfigError: a batch that no planned shape holds, where that is strict; names its longest row.
        """
        samples = self.read(rows)
        term_fields: TermFields | None = {} if self.terms else None
        shape = None if self.plan is None or not samples.sequences else self._shape(samples, self.plan)
        batch = self._lay(samples, shape, term_fields)
        tensors = batch.tensors() | {"data_tokens": torch.tensor(samples.tokens)}
        tensors |= self._of_rows(rows, batch) if self.terms else {}
        return tensors | self._of_images(rows, samples.row, batch)

    def _of_images(self, rows: Ordered[Mapping[str, Any]], row_of: np.ndarray, batch: ForestBatch) -> dict[str, Any]:
        """What the model is given of the rows' images; padding is made of a token that stands for none."""
        if self.images is None:
            return {}
        ids = batch.input_ids
        ids.masked_fill_(torch.arange(ids.shape[1]) >= batch.real_tokens[:, None], self.pad_token_id)
        order = list(dict.fromkeys(row_of.tolist())) if self.layout == "shared" else row_of.tolist()
        given = [rows[row].get(self.images.column) or [] for row in order]
        return {"model_inputs": self.images(given, ids)}

    def _lay(self, samples: Samples, shape: Shape | None, term_fields: TermFields | None) -> ForestBatch:
        sizes: dict[str, Any] = {"multiple": self.pad_to_multiple_of or 1, "shape": shape}
        options = {"term_fields": term_fields, **sizes}
        if self.layout == "padded" or not samples.sequences:
            return chains(samples.sequences, **options)
        return trees(samples.sequences, self._rows_of(samples), groups=self._groups(samples), **options)

    def _groups(self, samples: Samples) -> Ordered[int]:
        """Of each sequence a number: only those with equal ones share."""
        if self.layout != "shared":
            return range(len(samples.sequences))
        if self.images is None:
            return [0] * len(samples.sequences)
        holds = self.images.holds
        return [
            1 + int(row) if holds(sequence.input_ids) else 0
            for sequence, row in zip(samples.sequences, samples.row, strict=True)
        ]

    def _rows_of(self, samples: Samples) -> np.ndarray:
        """`[S]`, in which row of the batch each sequence lies."""
        if self.layout == "padded":
            return np.arange(len(samples.sequences), dtype=np.int64)
        return np.zeros_like(samples.row) if self.one_row else samples.row

    def _of_rows(self, rows: Ordered[Mapping[str, Any]], batch: ForestBatch) -> dict[str, Tensor]:
        """What is one number a row of the dataset; and the samples' places, filled up to as many rows."""
        fill = max(self.batch_rows or 0, len(rows)) - len(rows)
        values = {f"row_{name}": [float(row[name]) for row in rows] for name in self.columns}
        values["row_weight"] = [1.0] * len(rows)
        tensors = {name: torch.tensor([*numbers, *[0.0] * fill]) for name, numbers in values.items()}
        assert batch.terms is not None
        assert self.read.samples_per_row is not None
        last = batch.terms.last_position
        missing = (fill + len(rows)) * self.read.samples_per_row - len(last)
        tensors["sample_position"] = torch.nn.functional.pad(last, (0, missing))
        return tensors

    def idle(self, shape: Shape) -> dict[str, Any]:
        """A batch of a planned shape with one token, which is not trained."""
        sequence = Sequence(np.asarray([self.pad_token_id]), np.zeros(1, dtype=bool))
        batch = chains([sequence], shape=shape, term_fields={} if self.terms else None)
        tensors = batch.tensors() | {"data_tokens": torch.tensor(0)}
        tensors |= self._of_rows([], batch) if self.terms else {}
        return tensors | self._of_images([], np.zeros(0, dtype=np.int64), batch)

    @property
    def one_row(self) -> bool:
        """Whether all sequences of a batch lie in one row."""
        return self.layout != "padded" and "seq_lengths" not in self.read.columns

    def sizes_of(self, rows: Ordered[Mapping[str, Any]]) -> Shape:
        """The sizes that a batch of these rows needs at least."""
        return self._needed(self.read(rows))

    def _needed(self, samples: Samples) -> Shape:
        sequences = samples.sequences
        trained = sum(int(sequence.trained.sum()) for sequence in sequences)
        row_of = self._rows_of(samples)
        if self.layout == "shared":
            codes = group_codes(self._groups(samples))
            order = prefix_order([each.input_ids for each in sequences], row_of * (int(codes.max()) + 1) + codes)
            tokens = np.bincount(row_of[order.order], order.lengths - order.shared)
        else:
            tokens = np.bincount(row_of, [len(sequence) for sequence in sequences])
        longest = int(tokens.max())
        edges = min(trained, longest * len(tokens)) if self.layout == "shared" else trained
        return Shape(len(tokens), longest, edges, max(trained, 1) if self.terms else 0)

    def _shape(self, samples: Samples, plan: ShapePlan) -> Shape | None:
        needed = self._needed(samples)
        shape = plan.shape_for(needed.length, needed.rows, needed.edges, needed.terms, evaluation=self.evaluation)
        if shape is None and self.strict:
            lengths = [len(sequence) for sequence in samples.sequences]
            longest = lengths.index(max(lengths))
            raise ConfigError(
                f"no planned shape holds a batch of {needed.rows} rows with {needed.edges} trained tokens, whose longest sequence is of row "
                f"{int(samples.row[longest])} with {lengths[longest]} tokens. Plan a longer shape (shapes), or cut rows with max_length.\nPlanned:\n{plan}"
            )
        return shape
