"""The unit that flows from the data to the forest: one tokenized sequence and which of its tokens are trained."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

IGNORE_INDEX = -100
"""The label of a token that is not a target, as in every trainer of the field."""


@dataclass(frozen=True, slots=True)
class Sequence:
    """One sequence of `n` tokens, before any padding.

    Attributes:
        input_ids: `[n]` int64, the tokens.
        trained: `[n]` bool; True where the token is a target, i.e. must be predicted from those before it. The first is never one.
        weight: the weight of each of its trained tokens in the loss.
    """

    input_ids: np.ndarray
    trained: np.ndarray
    weight: float = 1.0

    def __len__(self) -> int:
        return len(self.input_ids)

    @classmethod
    def from_row(cls, row: dict) -> Sequence:
        """From a prepared dataset row: `input_ids`, and `labels` of the same length with -100 where a token is not a target."""
        input_ids = np.asarray(row["input_ids"], dtype=np.int64)
        labels = row.get("labels")
        trained = np.ones(len(input_ids), dtype=bool) if labels is None else np.asarray(labels) != IGNORE_INDEX
        trained[:1] = False
        return cls(input_ids, trained)
