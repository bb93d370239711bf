"""The one batch form: rows of trees in depth-first order, and the edges that are trained.

A padded row, a row of packed documents and a row of prefix trees are the same thing. Three integers a token say everything that
attention needs: token `q` may attend to token `k` iff `k <= q < subtree_end[k]`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ForestBatch:
    """`R` rows of `L` tokens with `E` trained edges.

    Attributes:
        input_ids: `[R, L]` int64, the token.
        position_ids: `[R, L]` int64, its depth in its own sequence.
        subtree_end: `[R, L]` int64, one past the last token of the row that descends from it. Padding is a chain nobody trains.
        edge_position: `[E]` int64, the place in the flattened `[R * L]` batch whose hidden state predicts.
        edge_target: `[E]` int64, the token it must predict.
        edge_weight: `[E]` float32, its weight in a loss that is linear in the log-probability; 0 for edges that fill up `E`.
        real_tokens: `[]` int64, tokens of the batch that are not padding.
    """

    input_ids: Tensor
    position_ids: Tensor
    subtree_end: Tensor
    edge_position: Tensor
    edge_target: Tensor
    edge_weight: Tensor
    real_tokens: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """The fields as the mapping that `transformers.Trainer` moves to a device and passes to the model."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
