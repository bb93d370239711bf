"""How sequences lie in rows.

One array per token field is filled at once from the concatenated sequences: no Python per token. `chains` puts one sequence a row, padded on the
right by a chain of its own that nobody trains. Cost: a few passes over the `R · L` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered

import numpy as np
import torch

from trellium.data.sequence import Sequence
from trellium.errors import DatasetError
from trellium.forest.batch import ForestBatch


def chains(sequences: Ordered[Sequence], *, pad_token_id: int, multiple: int = 1) -> ForestBatch:
    """One sequence a row.

    Args:
        sequences: the rows, in order; each of at least one token. A sequence may train nothing.
        pad_token_id: the token behind each sequence; any valid one serves, nothing attends to it or learns from it.
        multiple: `L` is rounded up to a multiple of this. Above 1, shapes are meant to be few, so `E` follows from them: all `R · L` places, or half of
            them, or a quarter … as many as are needed, and a multiple still: a graph or two for each `L`, for at most twice the edges. At 1, `E` is
            what there is. It is at least 1, filled up by edges of weight 0.

    Returns:
        The batch; edges in the order of rows, then of positions.

    Raises:
        DatasetError: no sequence, or one without a token; names the row.
    """
    if not sequences:
        raise DatasetError("a batch needs at least one sequence, got none")
    lengths = np.fromiter((len(sequence) for sequence in sequences), dtype=np.int64, count=len(sequences))
    if not lengths.all():
        raise DatasetError(f"row {int(lengths.argmin())} of the batch has no tokens: drop empty rows before training")
    rows, width = len(sequences), _round_up(int(lengths.max()), multiple)
    place = np.arange(width, dtype=np.int64)
    real = place < lengths[:, None]

    input_ids = np.full((rows, width), pad_token_id, dtype=np.int64)
    input_ids[real] = np.concatenate([sequence.input_ids for sequence in sequences])
    # Padding is a chain that starts where the sequence ends.
    position_ids = np.where(real, place, place - lengths[:, None])
    subtree_end = np.where(real, lengths[:, None], width)

    trained = np.zeros((rows, width), dtype=bool)
    trained[real] = np.concatenate([sequence.trained for sequence in sequences])
    trained[:, 0] = False  # nothing stands before it to predict it
    target_row, target_place = trained.nonzero()
    edges = len(target_row)
    size = max(edges, 1) if multiple == 1 else _few_sizes(edges, rows * width, multiple)
    edge_position = np.zeros(size, dtype=np.int64)
    edge_target = np.zeros(size, dtype=np.int64)
    edge_weight = np.zeros(size, dtype=np.float32)
    edge_position[:edges] = target_row * width + target_place - 1
    edge_target[:edges] = input_ids[target_row, target_place]
    edge_weight[:edges] = np.asarray([sequence.weight for sequence in sequences], dtype=np.float32)[target_row]
    return ForestBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        subtree_end=torch.from_numpy(subtree_end),
        edge_position=torch.from_numpy(edge_position),
        edge_target=torch.from_numpy(edge_target),
        edge_weight=torch.from_numpy(edge_weight),
        real_tokens=torch.tensor(int(lengths.sum())),
    )


def _few_sizes(needed: int, places: int, multiple: int) -> int:
    """`places`, halved as long as `needed` still fit and it stays a multiple."""
    while places % (2 * multiple) == 0 and places // 2 >= needed:
        places //= 2
    return places


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def check(batch: ForestBatch) -> None:
    """Hold a batch to the laws of the form; for tests and for whoever writes a new layout.

    The laws: subtrees nest (a token's subtree ends after it, within the row, and contains the whole subtree of every token in it); a position is 0
    where a tree starts and else one more than its parent's; the parent is the nearest earlier token whose subtree contains it; every edge starts at
    a token of the batch; integers are int64.

    Raises:
        ValueError: names the first law that is broken, the row and the place.
    """
    input_ids, positions, ends = (field.numpy() for field in (batch.input_ids, batch.position_ids, batch.subtree_end))
    if not input_ids.shape == positions.shape == ends.shape or input_ids.ndim != 2:
        raise ValueError(f"fields must share one [R, L], got {input_ids.shape}, {positions.shape}, {ends.shape}")
    for name, tensor in batch.tensors().items():
        expected = torch.float32 if name == "edge_weight" else torch.int64
        if tensor.dtype != expected:
            raise ValueError(f"{name} must be {expected}, got {tensor.dtype}")
    length = input_ids.shape[1]
    for row in range(input_ids.shape[0]):
        open_tokens: list[int] = []  # the ancestors of the present place
        for place in range(length):
            end = int(ends[row, place])
            if not place < end <= length:
                raise ValueError(f"row {row}, place {place}: subtree_end must lie in ({place}, {length}], got {end}")
            while open_tokens and ends[row, open_tokens[-1]] <= place:
                open_tokens.pop()
            if open_tokens and end > ends[row, open_tokens[-1]]:
                raise ValueError(f"row {row}, place {place}: its subtree ends after its parent's, at {end}")
            depth = int(positions[row, open_tokens[-1]]) + 1 if open_tokens else 0
            if positions[row, place] != depth:
                raise ValueError(f"row {row}, place {place}: position must be {depth}, got {positions[row, place]}")
            open_tokens.append(place)
    edges = batch.edge_position.shape
    if not edges == batch.edge_target.shape == batch.edge_weight.shape or len(edges) != 1 or edges[0] == 0:
        raise ValueError("edges must be three [E] with E > 0")
    if not ((batch.edge_position >= 0) & (batch.edge_position < input_ids.size)).all():
        raise ValueError(f"edge_position must lie in [0, {input_ids.size})")
    if not 0 <= int(batch.real_tokens) <= input_ids.size:
        raise ValueError(f"real_tokens must lie in [0, {input_ids.size}], got {int(batch.real_tokens)}")
