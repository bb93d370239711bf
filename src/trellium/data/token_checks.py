"""What the tokens of a row must be, whoever made them: numbers the model has embeddings and positions for, and labels that are their own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trellium.data.sequence import IGNORE_INDEX
from trellium.errors import DatasetError


@dataclass(frozen=True)
class TokenLimits:
    """How far a model's tables reach.

    Attributes:
        vocabulary_size: rows of its embedding; None where the model is not known.
        positions: the longest row that its table of positions has a place for; None where positions are computed.
    """

    vocabulary_size: int | None = None
    positions: int | None = None

    @property
    def tokens(self) -> int:
        """One more than the largest token that can be."""
        return 2**31 if self.vocabulary_size is None else self.vocabulary_size

    def check(self, ids: Sequence[int], where: str) -> None:
        """Hold the tokens of a row to the limits.

        Raises:
            DatasetError: a token without an embedding, or more tokens than positions; says `where`.
        """
        if len(ids) and not 0 <= min(ids) <= max(ids) < self.tokens:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            what = "tokens are numbered from 0" if wrong < 0 else f"the model's vocabulary has {self.tokens}"
            raise DatasetError(
                f"{where}: holds the token {wrong}, but {what}. Tokenize with the model's own tokenizer."
            )
        if self.positions is not None and len(ids) > self.positions:
            raise DatasetError(
                f"{where}: has {len(ids)} tokens, but the model has a table of {self.positions} positions. Set max_length to {self.positions} or less."
            )


NO_LIMITS = TokenLimits()
"""Of a model that is not known."""


def check_labels(ids: Sequence[int], labels: Sequence[int], where: str) -> None:
    """Hold labels to their tokens.

    Raises:
        DatasetError: a label that is neither -100 nor the token at its place; says `where`.
    """
    given, tokens = np.asarray(labels, dtype=np.int64), np.asarray(ids, dtype=np.int64)
    wrong = np.flatnonzero((given != IGNORE_INDEX) & (given != tokens))
    if wrong.size:
        at = int(wrong[0])
        raise DatasetError(
            f"{where}: 'labels' has {int(given[at])} at position {at}, where 'input_ids' has {ids[at]}. A label is its own token or -100; "
            "the shift by one is done in training, not in the data."
        )
