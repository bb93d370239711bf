"""How sequences lie in rows.

`trees` puts sequences that share a prefix into trees, each token once; `chains` puts one sequence a row. Both fill every field at once from the arrays of
a trie: no Python per token. What is left of a row is a chain of its own that nobody trains.

Padding repeats the first token of its row, not a token made for padding: nothing attends to it or learns from it, so its own gradient is exactly zero, but only
if the slopes along its way are finite. The embedding of a padding token is often all zeros, and there a model that takes a root of a magnitude (Gemma 3n) has
an infinite one: zero times it is no number, in all weights. No token is needed that the embedding may not even hold.

An edge is named by the token it leads to: that has one parent, so it is the target of one prediction, however many sequences pass through it. A token
with several children starts several edges, and `E <= R * L` whatever the trees. Cost: the trie's, and a few passes over the tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Ordered

import numpy as np
import torch

from trellium.data.sequence import Sequence
from trellium.errors import ConfigError, DatasetError
from trellium.forest.batch import ForestBatch, Shape, Terms
from trellium.forest.trie import Trie, build_trie, group_codes

TermFields = Mapping[str, Ordered[np.ndarray | float]]
"""Per name one entry a sequence: `[n]`, a value for each of its tokens, or one number for all of them."""


def chains(
    sequences: Ordered[Sequence],
    *,
    multiple: int = 1,
    shape: Shape | None = None,
    term_fields: TermFields | None = None,
) -> ForestBatch:
    """One sequence a row, in order, padded on the right.

    Args:
        sequences: the rows, each of at least one token. A sequence may train nothing.
        multiple, shape, term_fields: as for `trees`.

    Returns:
        The batch; edges in the order of rows, then of positions.

    Raises:
        DatasetError: no sequence, or one without a token; names the row.
        ConfigError: the shape does not hold them; names what is too large.
    """
    rows = np.arange(len(sequences), dtype=np.int64)
    _refuse_empty(sequences, "row")
    trie = build_trie([sequence.input_ids for sequence in sequences], rows, share=False)
    return _lay(sequences, trie, rows, multiple, shape, term_fields)


def trees(
    sequences: Ordered[Sequence],
    rows: Ordered[int] | np.ndarray,
    *,
    groups: Ordered[Hashable] | None = None,
    multiple: int = 1,
    shape: Shape | None = None,
    term_fields: TermFields | None = None,
) -> ForestBatch:
    """Sequences of a row share the tokens of their common prefixes.

    Args:
        sequences: those of the batch, each of at least one token. A sequence may train nothing, and may be inside another or equal to it.
        rows: `[n]`, in which row each lies, from 0; see `packing.pack_sequences`. Sequences of different rows share nothing.
        groups: one key a sequence: only those with equal keys share. None where tokens are all there is to a sequence.
        multiple: `L` is rounded up to a multiple of this. Above 1, shapes are meant to be few, so `E` follows from them: all `R * L` places, or half of
            them, or a quarter … as many as are needed, and a multiple still: a graph or two for each `L`, for at most twice the edges. At 1, `E` is
            what there is. It is at least 1, filled up by edges of weight 0. `T` likewise, from twice `R * L` upwards where samples share edges.
        shape: the sizes to have, instead of a multiple; rows that are missing are padding that nobody trains.
        term_fields: asks for terms, with these fields; `{}` for terms with none.

    Returns:
        The batch: in a row trees follow each other, and the children of a token, in the order of groups, then of tokens; edges in the order of the tokens
        they lead to.

    Raises:
        DatasetError: no sequence, or one without a token; names the sequence.
        ConfigError: the shape does not hold them; names what is too large.
    """
    _refuse_empty(sequences, "sequence")
    row_of = np.asarray(rows, dtype=np.int64)
    codes = np.zeros(len(sequences), dtype=np.int64) if groups is None else group_codes(groups)
    if not row_of.shape == codes.shape == (len(sequences),) or row_of.min() < 0:
        raise ValueError(f"rows and groups must be one a sequence, rows from 0; got {row_of.shape} and {codes.shape}")
    trie = build_trie([sequence.input_ids for sequence in sequences], row_of * (int(codes.max()) + 1) + codes)
    return _lay(sequences, trie, row_of, multiple, shape, term_fields)


def _refuse_empty(sequences: Ordered[Sequence], what: str) -> None:
    if not sequences:
        raise DatasetError("a batch needs at least one sequence, got none")
    for index, sequence in enumerate(sequences):
        if not len(sequence):
            raise DatasetError(f"{what} {index} of the batch has no tokens: drop empty rows before training")


def _lay(
    sequences: Ordered[Sequence],
    trie: Trie,
    row_of: np.ndarray,
    multiple: int,
    shape: Shape | None,
    term_fields: TermFields | None,
) -> ForestBatch:
    own = trie.prefixes.lengths - trie.prefixes.shared
    row = np.repeat(row_of[trie.prefixes.order], own)  # of every token of the trees, ascending
    used = np.bincount(row)
    place = np.arange(len(trie), dtype=np.int64) - np.repeat(np.cumsum(used) - used, used)

    arrow_to, arrow_from, of_sequence, of_path = _trained(sequences, trie)
    leads = np.zeros(len(trie), dtype=bool)
    leads[arrow_to] = True
    weights = np.asarray([sequence.weight for sequence in sequences], dtype=np.float32)
    needed = Shape(len(used), int(used.max()), int(leads.sum()), 0 if term_fields is None else max(len(of_path), 1))
    sizes = _sizes(needed, multiple) if shape is None else _planned(needed, shape, used)

    real = np.arange(sizes.length) < np.pad(used, (0, sizes.rows - len(used)))[:, None]
    places = np.arange(sizes.length, dtype=np.int64)
    # Padding is a chain that starts where the trees end.
    position_ids = places - np.pad(used, (0, sizes.rows - len(used)))[:, None]
    subtree_end = np.full(real.shape, sizes.length, dtype=np.int64)
    begins = np.pad(np.cumsum(used) - used, (0, sizes.rows - len(used)), mode="edge")
    input_ids = np.repeat(trie.token[begins][:, None], sizes.length, axis=1)
    input_ids[real], position_ids[real], subtree_end[real] = (
        trie.token,
        trie.depth,
        trie.subtree_end - (np.arange(len(trie)) - place),
    )

    parent = np.zeros(len(trie), dtype=np.int64)
    parent[arrow_to] = arrow_from
    before = parent[leads]
    last = trie.path[trie.start[1:] - 1]
    total = np.bincount(arrow_to, weights[of_sequence], minlength=len(trie))[leads]
    return ForestBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        subtree_end=torch.from_numpy(subtree_end),
        edge_position=_filled(row[before] * sizes.length + place[before], sizes.edges),
        edge_target=_filled(trie.token[leads], sizes.edges),
        edge_weight=_filled(total.astype(np.float32), sizes.edges),
        real_tokens=_filled(used, sizes.rows),
        sequence_tokens=torch.tensor(len(trie.path)),
        terms=None
        if term_fields is None
        else Terms(
            edge=_filled((np.cumsum(leads) - 1)[arrow_to], sizes.terms),
            sample=_filled(of_sequence, sizes.terms),
            weight=_filled(weights[of_sequence], sizes.terms),
            last_position=torch.from_numpy(row[last] * sizes.length + place[last]),
            fields={
                name: _filled(_field(name, values, trie.start)[of_path], sizes.terms)
                for name, values in term_fields.items()
            },
        ),
    )


def _trained(sequences: Ordered[Sequence], trie: Trie) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of every trained token of every sequence: its place in the trees, its parent's, its sequence, and its place in `trie.path`."""
    trained = np.concatenate([sequence.trained for sequence in sequences])
    trained[trie.start[:-1]] = False  # nothing stands before it to predict it
    of_path = np.flatnonzero(trained)
    of_sequence = np.searchsorted(trie.start, of_path, side="right") - 1
    return trie.path[of_path], trie.path[of_path - 1], of_sequence, of_path


def _field(name: str, values: Ordered[np.ndarray | float], start: np.ndarray) -> np.ndarray:
    """A term field at every token of every sequence."""
    lengths = np.diff(start)
    if len(values) != len(lengths):
        raise ValueError(f"term field {name!r} must have one entry a sequence, {len(lengths)}, got {len(values)}")
    arrays = [np.asarray(value) for value in values]
    for index, (array, length) in enumerate(zip(arrays, lengths, strict=True)):
        if array.shape not in ((), (length,)):
            raise ValueError(
                f"term field {name!r} of sequence {index} must be one number or [{length}], got {list(array.shape)}"
            )
    whole = np.concatenate([np.broadcast_to(array, length) for array, length in zip(arrays, lengths, strict=True)])
    return whole.astype(np.float32 if whole.dtype.kind == "f" else np.int64)


def _filled(values: np.ndarray, size: int) -> torch.Tensor:
    return torch.from_numpy(np.pad(values, (0, size - len(values))))


def _sizes(needed: Shape, multiple: int) -> Shape:
    """The sizes that a batch gets where nothing is planned."""
    length = _round_up(needed.length, multiple)
    if multiple == 1:
        return Shape(needed.rows, length, max(needed.edges, 1), needed.terms)
    places = needed.rows * length
    terms = _few_sizes(needed.terms, places, multiple) if needed.terms else 0
    return Shape(needed.rows, length, _few_sizes(needed.edges, places, multiple), terms)


def _few_sizes(needed: int, places: int, multiple: int) -> int:
    """`places`, doubled until `needed` fit, or halved as long as they do and it stays a multiple."""
    while places < needed:
        places *= 2
    while places % (2 * multiple) == 0 and places // 2 >= needed:
        places //= 2
    return places


def _planned(needed: Shape, shape: Shape, used: np.ndarray) -> Shape:
    if not shape.holds(needed):
        raise ConfigError(
            f"a batch that needs {needed} does not fit the shape {shape}: its longest row is row {int(used.argmax())}, with {needed.length} tokens. "
            "Plan a larger shape, or cut the rows."
        )
    return shape


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def check(batch: ForestBatch) -> None:
    """Hold a batch to the laws of the form; for tests and for whoever writes a new layout.

    The laws: subtrees nest (a token's subtree ends after it, within the row, and contains the whole subtree of every token in it); a position is 0
    where a tree starts and else one more than its parent's; the parent is the nearest earlier token whose subtree contains it; every edge starts at
    a token of the batch, leads to a child of it if its weight is not 0, and is there once; the weights of an edge's terms add up to its own; integers
    are int64, numbers float32.

    Raises:
        ValueError: names the first law that is broken, the row and the place.
    """
    input_ids, positions, ends = (field.numpy() for field in (batch.input_ids, batch.position_ids, batch.subtree_end))
    if not input_ids.shape == positions.shape == ends.shape or input_ids.ndim != 2:
        raise ValueError(f"fields must share one [R, L], got {input_ids.shape}, {positions.shape}, {ends.shape}")
    own_fields = batch.terms.fields if batch.terms is not None else {}
    for name, tensor in batch.tensors().items():
        if name.removeprefix("term_") in own_fields:
            continue
        expected = torch.float32 if name in ("edge_weight", "term_weight") else torch.int64
        if tensor.dtype != expected:
            raise ValueError(f"{name} must be {expected}, got {tensor.dtype}")
    children = _check_rows(input_ids, positions, ends)
    _check_edges(batch, children)
    if batch.terms is not None:
        _check_terms(batch.edge_weight, batch.terms)
    real = batch.real_tokens
    if real.shape != (len(input_ids),) or (real < 0).any() or (real > input_ids.shape[1]).any():
        raise ValueError(f"real_tokens must be [{len(input_ids)}] in [0, {input_ids.shape[1]}], got {real.tolist()}")
    if int(real.sum()) > int(batch.sequence_tokens):
        raise ValueError(
            f"{int(real.sum())} real tokens cannot be more than the {int(batch.sequence_tokens)} of the sequences"
        )


def _check_rows(input_ids: np.ndarray, positions: np.ndarray, ends: np.ndarray) -> set[tuple[int, int]]:
    """The laws of the tokens; returns every (place of a parent in the flattened batch, token of a child)."""
    length = input_ids.shape[1]
    children = set()
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
            if open_tokens:
                children.add((row * length + open_tokens[-1], int(input_ids[row, place])))
            open_tokens.append(place)
    return children


def _check_edges(batch: ForestBatch, children: set[tuple[int, int]]) -> None:
    edges = batch.edge_position.shape
    if not edges == batch.edge_target.shape == batch.edge_weight.shape or len(edges) != 1 or edges[0] == 0:
        raise ValueError("edges must be three [E] with E > 0")
    if not ((batch.edge_position >= 0) & (batch.edge_position < batch.input_ids.numel())).all():
        raise ValueError(f"edge_position must lie in [0, {batch.input_ids.numel()})")
    seen = set()
    for index, edge in enumerate(zip(batch.edge_position.tolist(), batch.edge_target.tolist(), strict=True)):
        if batch.edge_weight[index] == 0:
            continue
        if edge not in children:
            raise ValueError(f"edge {index} must lead to a child of place {edge[0]}, none of which is token {edge[1]}")
        if edge in seen:
            raise ValueError(f"edge {index} is there twice: from place {edge[0]} to token {edge[1]}")
        seen.add(edge)


def _check_terms(edge_weight: torch.Tensor, terms: Terms) -> None:
    size = terms.edge.shape
    if not all(field.shape == size for field in (terms.sample, terms.weight, *terms.fields.values())) or len(size) != 1:
        raise ValueError("terms and their fields must each be [T]")
    if not ((terms.edge >= 0) & (terms.edge < len(edge_weight))).all() or (terms.sample < 0).any():
        raise ValueError(f"term_edge must lie in [0, {len(edge_weight)}), term_sample from 0")
    total = torch.zeros_like(edge_weight, dtype=torch.float64).index_add(0, terms.edge, terms.weight.double())
    if not torch.allclose(total, edge_weight.double(), rtol=1e-5, atol=1e-6):
        edge = int((total - edge_weight).abs().argmax())
        raise ValueError(
            f"the weights of edge {edge}'s terms must add up to its own, {float(edge_weight[edge])}, got {float(total[edge])}"
        )
