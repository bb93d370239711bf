"""The one batch form: rows of trees in depth-first order, and the edges that are trained.

A padded row, a row of packed documents and a row of prefix trees are the same thing. Three integers a token say everything that
attention needs: token `q` may attend to token `k` iff `k <= q < subtree_end[k]`.

Scores belong to edges, which sequences may share; a loss that needs each sample's own fields reads them through terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from torch import Tensor


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """The static sizes of a batch: one shape, one graph.

    Attributes:
        rows: `R`.
        length: `L`, tokens of a row.
        edges: `E`.
        terms: `T`; 0 for batches without terms.
    """

    rows: int
    length: int
    edges: int
    terms: int = 0

    def __str__(self) -> str:
        terms = f", {self.terms} terms" if self.terms else ""
        return f"{self.rows}x{self.length} with {self.edges} edges{terms}"

    def holds(self, other: Shape) -> bool:
        """Whether a batch of the other shape can be filled up to this one."""
        return (
            self.rows >= other.rows
            and self.length >= other.length
            and self.edges >= other.edges
            and self.terms >= other.terms
        )


@dataclass(frozen=True, slots=True)
class Terms:
    """What each sample says of its own trained tokens: `T` terms, in the order of samples, then of positions.

    Attributes:
        edge: `[T]` int64, the edge whose score it reads; several terms may read one edge.
        sample: `[T]` int64, whose term it is: the sequence's place in the batch as it was given.
        weight: `[T]` float32, the weight of its sample; 0 for terms that fill up `T`.
        last_position: `[S]` int64, for each sample, trained or not, the place of its last token in the flattened `[R * L]` batch.
        fields: per name `[T]` float32 or int64, what the sample brought for this token: advantages, old log-probabilities …; 0 where it fills up.
    """

    edge: Tensor
    sample: Tensor
    weight: Tensor
    last_position: Tensor
    fields: Mapping[str, Tensor]

    def tensors(self) -> dict[str, Tensor]:
        """`term_edge`, `term_sample`, `term_weight`, `sample_position`, and `term_<name>` for each field."""
        fixed = {
            "term_edge": self.edge,
            "term_sample": self.sample,
            "term_weight": self.weight,
            "sample_position": self.last_position,
        }
        return fixed | {f"term_{name}": field for name, field in self.fields.items()}


@dataclass(frozen=True, slots=True)
class ForestBatch:
    """`R` rows of `L` tokens with `E` trained edges.

    Attributes:
        input_ids: `[R, L]` int64, the token.
        position_ids: `[R, L]` int64, its depth in its own sequence.
        subtree_end: `[R, L]` int64, one past the last token of the row that descends from it. Padding is a chain nobody trains.
        edge_position: `[E]` int64, the place in the flattened `[R * L]` batch whose hidden state predicts.
        edge_target: `[E]` int64, the token it must predict.
        edge_weight: `[E]` float32, its weight in a loss that is linear in the log-probability: the sum of the weights of the sequences that
            train it; 0 for edges that fill up `E`.
        real_tokens: `[R]` int64, tokens of each row that are not padding, which stand in front; a shared one counts once.
        sequence_tokens: `[]` int64, tokens of the sequences it holds; a shared one counts for each of them.
        terms: for losses that need each sample's own fields; None where nobody asked for them.
    """

    input_ids: Tensor
    position_ids: Tensor
    subtree_end: Tensor
    edge_position: Tensor
    edge_target: Tensor
    edge_weight: Tensor
    real_tokens: Tensor
    sequence_tokens: Tensor
    terms: Terms | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The fields as the mapping that `transformers.Trainer` moves to a device and passes to the model, those of the terms behind."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "terms"}
        return own | (self.terms.tensors() if self.terms is not None else {})

    @property
    def shape(self) -> Shape:
        """The static sizes."""
        rows, length = self.input_ids.shape
        terms = 0 if self.terms is None else len(self.terms.edge)
        return Shape(rows, length, len(self.edge_position), terms)
