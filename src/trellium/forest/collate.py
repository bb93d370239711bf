"""Prepared dataset rows to the one batch form: what a trainer gives its data loader.

Linear in tokens. Where the shapes of a run are planned, a batch is filled up to the smallest planned shape that holds it; else
`pad_to_multiple_of` makes both the row length and the number of edges multiples, so that a device that compiles per shape meets few of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trellium.data.sequence import Sequence
from trellium.errors import ConfigError
from trellium.forest.batch import Shape
from trellium.forest.layout import chains
from trellium.forest.shapes import ShapePlan


@dataclass(frozen=True, slots=True)
class ForestCollator:
    """Collate rows of `input_ids` and `labels` (-100: not a target) into the tensors of a `ForestBatch`: one sequence a row, padded on the right.

    Attributes:
        pad_token_id: the token of padding.
        pad_to_multiple_of: round row length and number of edges up to a multiple of this; None for no rounding. Read where nothing is planned.
        plan: the shapes a batch may have.
        evaluation: whether the batches are of evaluation, whose planned shapes are others.
        strict: whether a batch that no planned shape holds is an error; else it is rounded up to the multiple, as where nothing is planned.

    Raises:
        ConfigError: a multiple below 1, or no pad token.
    """

    pad_token_id: int
    pad_to_multiple_of: int | None = None
    plan: ShapePlan | None = None
    evaluation: bool = False
    strict: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.pad_token_id, int) or self.pad_token_id < 0:
            raise ConfigError(
                f"pad_token_id must be a token id, got {self.pad_token_id!r}. Give the tokenizer a pad token; its "
                "end-of-sequence token serves."
            )
        if self.pad_to_multiple_of is not None and self.pad_to_multiple_of < 1:
            raise ConfigError(f"pad_to_multiple_of must be at least 1, or none, got {self.pad_to_multiple_of}")

    def __call__(self, rows: Ordered[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Rows to the mapping `ForestBatch.tensors()`.

        Raises:
            DatasetError: an empty batch or an empty row.
            ConfigError: a batch that no planned shape holds, where that is strict; names its longest row.
        """
        sequences = [Sequence.from_row(dict(row)) for row in rows]
        shape = None if self.plan is None or not sequences else self._shape(sequences, self.plan)
        multiple = self.pad_to_multiple_of or 1
        return chains(sequences, pad_token_id=self.pad_token_id, multiple=multiple, shape=shape).tensors()

    def _shape(self, sequences: list[Sequence], plan: ShapePlan) -> Shape | None:
        lengths = [len(sequence) for sequence in sequences]
        edges = sum(int(sequence.trained.sum()) for sequence in sequences)
        shape = plan.shape_for(max(lengths), len(sequences), edges, evaluation=self.evaluation)
        if shape is None and self.strict:
            longest = lengths.index(max(lengths))
            raise ConfigError(
                f"no planned shape holds a batch of {len(sequences)} rows with {edges} trained tokens, whose longest is row {longest} with "
                f"{lengths[longest]} tokens. Plan a longer shape (shapes), or cut rows with max_length.\nPlanned:\n{plan}"
            )
        return shape
