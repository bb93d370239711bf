"""Which sequences share a row.

Best fit decreasing over the whole set: the longest first, each into the fullest row that still holds it. Rows with equal space are alike, and so are
sequences of equal length, so both move in bulk: as many of a length as the fullest fitting kind of row takes, at once. One step empties a kind of row or
finishes a length; a million sequences take a second or two, for any capacity. The bound is that of Johnson 1974, at most 11/9 of the best plus one;
in practice, with short sequences among the long ones, rows are full to a few tokens.

Sequences that share a prefix belong together: `pack_sequences` first cuts trees that no row holds into pieces, exactly, by dynamic programming over
the depth-first order, then packs trees and pieces as they are. The cut that repeats the fewest tokens may leave pieces that fit no row well, and the one
with the fewest pieces may repeat more than it must: both are tried, and the one that takes fewer rows is kept. `bfd`, `bfd_split` and `wrapped` are TRL's
meanings, except that rows span the whole set, not a thousand sequences each, and that what is cut or dropped is told.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable, Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from trellium.data.sequence import Sequence
from trellium.errors import ConfigError, DatasetError
from trellium.forest.trie import PrefixOrder, group_codes, prefix_order

Strategy = Literal["bfd", "bfd_split", "wrapped"]
Fewest = Literal["tokens", "pieces"]


@dataclass(frozen=True, slots=True)
class Packing:
    """`P` pieces of sequences in `rows` rows of at most `capacity` tokens; pieces of a row stand together, in their order.

    Attributes:
        sequence: `[P]` int64, which sequence the piece is of; each once, but where sequences are split.
        begin, end: `[P]` int64, its tokens, half open.
        row_start: `[rows + 1]` int64, where the pieces of each row begin.
        tokens: `[rows]` int64, how full each row is; a shared token counts once.
        capacity: tokens that a row holds.
        joined: True where a row is one sequence of pieces that see each other (`wrapped`).
        cut_tokens: tokens behind the capacity that were cut off (`bfd`).
        cut_sequences: how many sequences lost some of their tokens to that.
        split_sequences: how many lie in more than one piece, so that the later ones no longer see the earlier ones.
        dropped_sequences: how many had no tokens.
        cut_trees: how many trees of shared prefixes lie in more than one piece, because no row holds them.
    """

    sequence: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    row_start: np.ndarray
    tokens: np.ndarray
    capacity: int
    joined: bool = False
    cut_tokens: int = 0
    cut_sequences: int = 0
    split_sequences: int = 0
    dropped_sequences: int = 0
    cut_trees: int = 0

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def fill(self) -> float:
        """Tokens ÷ (rows · capacity)."""
        return float(self.tokens.sum()) / max(self.rows * self.capacity, 1)

    @property
    def row_of_piece(self) -> np.ndarray:
        """`[P]` int64."""
        return np.repeat(np.arange(self.rows, dtype=np.int64), np.diff(self.row_start))

    @property
    def areas(self) -> np.ndarray:
        """`[rows]` int64, attention area where nothing is shared: pairs of a token and one it may attend to."""
        lengths = self.tokens if self.joined else self.end - self.begin
        pairs = lengths * (lengths + 1) // 2
        return pairs if self.joined else np.add.reduceat(pairs, self.row_start[:-1]) if self.rows else pairs

    def __str__(self) -> str:
        lost = [
            f"{self.cut_tokens:,} tokens of {self.cut_sequences:,} sequences cut" if self.cut_tokens else "",
            f"{self.split_sequences:,} sequences split" if self.split_sequences else "",
            f"{self.dropped_sequences:,} empty sequences dropped" if self.dropped_sequences else "",
            f"{self.cut_trees:,} trees cut" if self.cut_trees else "",
        ]
        return "; ".join(
            [
                f"{int(self.tokens.sum()):,} tokens in {self.rows:,} rows of {self.capacity:,}, {self.fill:.2%} full",
                *filter(None, lost),
            ]
        )


def pack_lengths(
    lengths: Ordered[int] | np.ndarray, capacity: int, strategy: Strategy = "bfd", *, longest: int | None = None
) -> Packing:
    """Pack sequences that share nothing, by their lengths alone.

    Args:
        lengths: `[n]`, tokens of each sequence. Those without any are dropped.
        capacity: tokens of a row, at least 1.
        strategy: `bfd`: whole sequences, what is longer than `longest` is cut off behind it. `bfd_split`: what is longer becomes several
            sequences, none of which sees another. `wrapped`: the sequences one behind the other, in order, cut where a row is full; pieces of a row see
            each other.
        longest: tokens of a sequence, at most; None for those of a row. Rows that are longer fill better where many sequences are a little longer
            than half of a row.

    Raises:
        ConfigError: a capacity below 1, another strategy, or a longest sequence that no row holds, or that `wrapped` has none of.
    """
    if capacity < 1:
        raise ConfigError(f"a row must hold at least 1 token, got {capacity}")
    if strategy not in get_args(Strategy):
        raise ConfigError(f"packing strategy must be one of {', '.join(get_args(Strategy))}, got {strategy!r}")
    longest = capacity if longest is None else longest
    if not 1 <= longest <= capacity or (strategy == "wrapped" and longest < capacity):
        raise ConfigError(
            f"sequences of up to {longest} tokens in rows of {capacity}: a row must hold the longest, and a wrapped row is one sequence"
        )
    given = np.asarray(lengths, dtype=np.int64)
    sequence = np.flatnonzero(given)
    given = given[sequence]
    dropped = len(lengths) - len(sequence)
    if strategy == "wrapped":
        return replace(_wrapped(sequence, given, capacity), dropped_sequences=dropped)
    if strategy == "bfd":
        whole = np.minimum(given, longest)
        packing = _gathered(best_fit_decreasing(whole, capacity), sequence, np.zeros_like(given), whole, capacity)
        over = given - whole
        return replace(
            packing, cut_tokens=int(over.sum()), cut_sequences=int((over > 0).sum()), dropped_sequences=dropped
        )
    pieces = -(-given // longest)
    which = np.repeat(np.arange(len(given)), pieces)
    begin = (np.arange(len(which)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * longest
    end = np.minimum(begin + longest, given[which])
    packing = _gathered(best_fit_decreasing(end - begin, capacity), sequence[which], begin, end, capacity)
    return replace(packing, split_sequences=int((pieces > 1).sum()), dropped_sequences=dropped)


def pack_sequences(
    sequences: Ordered[np.ndarray], capacity: int, *, groups: Ordered[Hashable] | None = None
) -> Packing:
    """Pack sequences so that those which share a prefix share a row.

    Args:
        sequences: `n` arrays of token ids, each of 1 to `capacity` tokens.
        capacity: tokens of a row.
        groups: one key a sequence; only those with equal keys share. None where tokens are all there is to a sequence.

    Returns:
        Every sequence in one piece; those of a tree in one row, or in as many as it takes. For `layout.trees`, `row_of_piece` belongs to
        `sequence`. `areas` is an upper bound.

    Raises:
        DatasetError: a sequence that is empty or that no row holds; names it.
    """
    return pack_prefixes(prefix_order(sequences, None if groups is None else group_codes(groups)), capacity)


def pack_prefixes(prefixes: PrefixOrder, capacity: int) -> Packing:
    """The same from sequences already in order: linear in sequences, without their tokens."""
    wrong = np.flatnonzero((prefixes.lengths < 1) | (prefixes.lengths > capacity))
    if len(wrong):
        raise DatasetError(
            f"sequence {int(prefixes.order[wrong[0]])} has {int(prefixes.lengths[wrong[0]])} tokens: a row takes 1 to {capacity}. "
            "Cut or drop it before, or plan longer rows."
        )
    packed = _packed_pieces(prefixes, capacity, "tokens")
    if not packed.cut_trees:
        return packed
    return min(
        packed,
        _packed_pieces(prefixes, capacity, "pieces"),
        key=lambda packing: (packing.rows, int(packing.tokens.sum())),
    )


def _packed_pieces(prefixes: PrefixOrder, capacity: int, fewest: Fewest) -> Packing:
    starts = _cut_trees(prefixes.lengths, prefixes.shared, capacity, fewest)
    shared = prefixes.shared.copy()
    shared[starts] = 0
    own = prefixes.lengths - shared
    sizes = np.add.reduceat(own, starts) if len(starts) else own
    of_piece = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(own))))
    row = best_fit_decreasing(sizes, capacity)[of_piece]
    packing = _gathered(row, prefixes.order, np.zeros_like(own), prefixes.lengths, capacity)
    tokens = np.bincount(row, own, minlength=packing.rows).astype(np.int64)
    for meeting, common in _meetings(prefixes.shared, starts, row):
        tokens[meeting] -= common
    cut = (prefixes.shared[starts] > 0).astype(np.int64)  # pieces that are not the first of their tree
    first_of_tree = np.flatnonzero(cut == 0)
    cut_trees = int((np.add.reduceat(cut, first_of_tree) > 0).sum()) if len(starts) else 0
    return replace(packing, tokens=tokens, cut_trees=cut_trees)


def _meetings(shared: np.ndarray, starts: np.ndarray, row: np.ndarray) -> Iterator[tuple[int, int]]:
    """Rows in which two pieces of one cut tree met, and how many tokens those share after all."""
    cut = shared[starts] > 0
    ends = np.append(starts, len(shared))[1:]
    ended: dict[int, int] = {}  # where the last piece of the present tree in a row ended
    for piece in np.flatnonzero(cut | np.append(cut, False)[1:]).tolist():
        start = int(starts[piece])
        here = int(row[start])
        if not cut[piece]:
            ended = {}
        elif here in ended:
            yield here, int(shared[ended[here] : start + 1].min())
        ended[here] = int(ends[piece])


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """`[n]` int64, the row of each item of 1 to `capacity` tokens; rows are numbered as they are opened.

    An item goes into the row with the least space that holds it. That row is then the one with the least space still, so it takes all of a length that it
    can before another is touched: what moves at once is (rows of one space) · (items of one length that each takes).
    """
    items = np.argsort(-lengths, kind="stable")
    distinct, first, counts = np.unique(-lengths[items], return_index=True, return_counts=True)
    row_of = np.empty(len(lengths), dtype=np.int64)
    spaces: list[int] = []  # in ascending order, those of which there is a row
    with_space: dict[int, deque[np.ndarray]] = {}  # blocks of rows
    opened = 0

    def put(rows: np.ndarray, space: int) -> None:
        if space and len(rows):
            if space not in with_space:
                with_space[space] = deque()
                insort(spaces, space)
            with_space[space].append(rows)

    for length, begin, count in zip((-distinct).tolist(), first.tolist(), counts.tolist(), strict=True):
        end = begin + count
        while begin < end:
            at = bisect_left(spaces, length)
            if at < len(spaces):
                space = spaces[at]
                rows = with_space[space].popleft()
                if not with_space[space]:
                    del with_space[space], spaces[at]
            else:
                space = capacity
                needed = -(-(end - begin) // (capacity // length))
                rows = np.arange(opened, opened + needed, dtype=np.int64)
                opened += needed
            each = space // length
            full, rest = divmod(min(end - begin, len(rows) * each), each)
            taken = full * each
            row_of[items[begin : begin + taken]] = np.repeat(rows[:full], each)
            put(rows[:full], space - each * length)
            begin += taken
            if rest:
                row_of[items[begin : begin + rest]] = rows[full]
                put(rows[full : full + 1], space - rest * length)
                begin += rest
                full += 1
            if space < capacity:
                put(rows[full:], space)
    return row_of


def pieces_of(sequences: Ordered[Sequence], packing: Packing, row: int) -> list[Sequence]:
    """What lies in a row, to be laid out by `layout.trees`: its pieces, or the one sequence that they are joined to.

    The first token of a piece is no target where pieces are apart: nothing it may attend to predicts it. Joined pieces keep it if it was one.

    Raises:
        ValueError: pieces of different weights to be joined.
    """
    here = range(int(packing.row_start[row]), int(packing.row_start[row + 1]))
    pieces = []
    for piece in here:
        whole = sequences[packing.sequence[piece]]
        part = slice(int(packing.begin[piece]), int(packing.end[piece]))
        trained = whole.trained[part].copy()
        if not packing.joined:
            trained[:1] = False
        pieces.append(Sequence(whole.input_ids[part], trained, whole.weight))
    if not packing.joined:
        return pieces
    if len({piece.weight for piece in pieces}) > 1:
        raise ValueError(f"row {row}: sequences of different weights cannot be wrapped into one")
    trained = np.concatenate([piece.trained for piece in pieces])
    trained[:1] = False
    return [Sequence(np.concatenate([piece.input_ids for piece in pieces]), trained, pieces[0].weight)]


def _wrapped(sequence: np.ndarray, lengths: np.ndarray, capacity: int) -> Packing:
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    row_bounds = np.append(np.arange(0, total, capacity, dtype=np.int64), total)
    cuts = np.union1d(row_bounds, ends)
    begin, end = cuts[:-1], cuts[1:]
    which = np.searchsorted(ends, begin, side="right")
    before = (ends - lengths)[which]
    pieces = np.bincount(which, minlength=len(lengths))
    return Packing(
        sequence=sequence[which],
        begin=begin - before,
        end=end - before,
        row_start=np.searchsorted(begin, row_bounds),
        tokens=np.diff(row_bounds),
        capacity=capacity,
        joined=True,
        split_sequences=int((pieces > 1).sum()),
    )


def _gathered(row: np.ndarray, sequence: np.ndarray, begin: np.ndarray, end: np.ndarray, capacity: int) -> Packing:
    """Pieces with the row of each, brought together by row."""
    rows = int(row.max()) + 1 if len(row) else 0
    by_row = np.argsort(row, kind="stable")
    tokens = np.bincount(row, end - begin, minlength=rows).astype(np.int64)
    row_start = np.append(0, np.cumsum(np.bincount(row, minlength=rows)))
    return Packing(sequence[by_row], begin[by_row], end[by_row], row_start, tokens, capacity)


def _cut_trees(lengths: np.ndarray, shared: np.ndarray, capacity: int, fewest: Fewest) -> np.ndarray:
    """Where pieces begin in the depth-first order, such that each fits a row and the fewest tokens are repeated, or the fewest pieces made; of those
    the one with the fewest of the other.

    A piece that begins at `i` repeats `shared[i]` tokens; up to `j` it holds `shared[i]` and the own tokens of `i … j`. What holds fewer sequences holds
    fewer tokens, so the beginnings that fit up to `j` are a window that only moves on, and its best is at the head of a queue: O(n) for a tree. A tree
    that fits is one piece and is not looked into.
    """
    trees = np.flatnonzero(shared == 0)
    own = lengths - shared
    sizes = np.add.reduceat(own, trees) if len(trees) else own
    starts = [trees]
    for tree in np.flatnonzero(sizes > capacity).tolist():
        low = int(trees[tree])
        high = int(trees[tree + 1]) if tree + 1 < len(trees) else len(own)
        starts.append(low + np.asarray(_cut_tree(own[low:high].tolist(), shared[low:high].tolist(), capacity, fewest)))
    return np.unique(np.concatenate(starts))


def _cut_tree(own: list[int], shared: list[int], capacity: int, fewest: Fewest) -> list[int]:
    """Where the pieces of one tree begin: the least (tokens repeated, pieces), or (pieces, tokens repeated)."""
    best = [(0, 0)]  # to have cut the first j sequences
    came_from = [0]
    queue: deque[tuple[tuple[int, int], int]] = deque()  # beginnings that fit, their costs ascending
    laid = [0]  # own tokens of the first j
    for j, tokens in enumerate(own):
        laid.append(laid[-1] + tokens)
        more = (shared[j], 1) if fewest == "tokens" else (1, shared[j])
        cost = (best[j][0] + more[0], best[j][1] + more[1])
        while queue and queue[-1][0] >= cost:
            queue.pop()
        queue.append((cost, j))
        while shared[queue[0][1]] + laid[j + 1] - laid[queue[0][1]] > capacity:
            queue.popleft()
        best.append(queue[0][0])
        came_from.append(queue[0][1])
    starts = []
    end = len(own)
    while end:
        end = came_from[end]
        starts.append(end)
    return starts[::-1]
