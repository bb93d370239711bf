"""Prepared dataset rows to the one batch form: what a trainer gives its data loader.

Linear in tokens; `pad_to_multiple_of` makes both the row length and the number of edges multiples, so that a device that compiles per shape
meets few of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trellium.data.sequence import Sequence
from trellium.errors import ConfigError
from trellium.forest.layout import chains


@dataclass(frozen=True, slots=True)
class ForestCollator:
    """Collate rows of `input_ids` and `labels` (-100: not a target) into the tensors of a `ForestBatch`: one sequence a row, padded on the right.

    Attributes:
        pad_token_id: the token of padding.
        pad_to_multiple_of: round row length and number of edges up to a multiple of this; None for no rounding.

    Raises:
        ConfigError: a multiple below 1, or no pad token.
    """

    pad_token_id: int
    pad_to_multiple_of: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.pad_token_id, int) or self.pad_token_id < 0:
            raise ConfigError(
                f"pad_token_id must be a token id, got {self.pad_token_id!r}. Give the tokenizer a pad token; its "
                "end-of-sequence token serves."
            )
        if self.pad_to_multiple_of is not None and self.pad_to_multiple_of < 1:
            raise ConfigError(f"pad_to_multiple_of must be at least 1, or none, got {self.pad_to_multiple_of}")

    def __call__(self, rows: Ordered[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Rows to the mapping `ForestBatch.tensors()`; raises DatasetError for an empty batch or an empty row."""
        sequences = [Sequence.from_row(dict(row)) for row in rows]
        return chains(sequences, pad_token_id=self.pad_token_id, multiple=self.pad_to_multiple_of or 1).tensors()
