from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.forest.random_trees import prefixes, token_lists
from trellium.data.sequence import Sequence
from trellium.errors import ConfigError, DatasetError
from trellium.forest.layout import check, trees
from trellium.forest.packing import (
    _cut_tree,
    _packed_pieces,
    best_fit_decreasing,
    pack_lengths,
    pack_prefixes,
    pack_sequences,
    pieces_of,
)
from trellium.forest.trie import PrefixOrder

LENGTHS = st.lists(st.integers(0, 30), max_size=40)


def loads_one_by_one(lengths: list[int], capacity: int) -> list[int]:
    """Best fit decreasing as it is told: one item after the other."""
    spaces: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [space for space in spaces if space >= length]
        if fitting:
            spaces.remove(min(fitting))
        spaces.append((min(fitting) if fitting else capacity) - length)
    return sorted(capacity - space for space in spaces)


@settings(max_examples=300, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), max_size=60), capacity=st.integers(20, 60))
def test_packing_in_bulk_fills_rows_as_packing_one_by_one(lengths, capacity):
    row = best_fit_decreasing(np.asarray(lengths, dtype=np.int64), capacity)
    loads = np.bincount(row, lengths).astype(int) if lengths else np.zeros(0, dtype=int)
    assert sorted(loads.tolist()) == loads_one_by_one(lengths, capacity)


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS, capacity=st.integers(1, 25), strategy=st.sampled_from(["bfd", "bfd_split", "wrapped"]))
def test_every_token_lies_in_one_row_or_is_counted_as_cut(lengths, capacity, strategy):
    packing = pack_lengths(lengths, capacity, strategy)
    assert packing.dropped_sequences == lengths.count(0)
    held = [set() for _ in lengths]
    for sequence, begin, end in zip(packing.sequence, packing.begin, packing.end, strict=True):
        assert not held[sequence] & set(range(begin, end))
        held[sequence] |= set(range(begin, end))
    kept = [min(length, capacity) if strategy == "bfd" else length for length in lengths]
    assert held == [set(range(length)) for length in kept]
    assert packing.cut_tokens == sum(lengths) - sum(kept)
    assert packing.cut_sequences == sum(length > keep for length, keep in zip(lengths, kept, strict=True))
    pieces = np.bincount(packing.sequence, minlength=len(lengths))
    assert packing.split_sequences == (pieces > 1).sum()
    sums = np.bincount(packing.row_of_piece, packing.end - packing.begin, minlength=packing.rows)
    assert sums.tolist() == packing.tokens.tolist()
    assert (packing.tokens <= capacity).all()
    assert (packing.tokens > 0).all()
    if strategy == "wrapped":
        assert (packing.tokens[:-1] == capacity).all()


@settings(max_examples=150, deadline=None)
@given(lists=token_lists(smallest=1, most=10), capacity=st.integers(8, 24), data=st.data())
def test_sequences_that_share_a_prefix_share_rows_that_hold_their_trees(lists, capacity, data):
    lists = [tokens[:capacity] for tokens in lists]
    groups = data.draw(st.lists(st.integers(0, 1), min_size=len(lists), max_size=len(lists)))
    arrays = [np.asarray(tokens, dtype=np.int64) for tokens in lists]
    packing = pack_sequences(arrays, capacity, groups=groups)
    assert sorted(packing.sequence.tolist()) == list(range(len(lists)))
    row_of = {int(s): int(row) for s, row in zip(packing.sequence, packing.row_of_piece, strict=True)}
    for row in range(packing.rows):
        inside = [s for s in row_of if row_of[s] == row]
        assert packing.tokens[row] == len(prefixes([lists[s] for s in inside], [groups[s] for s in inside]))
        assert packing.tokens[row] <= capacity
    for key in {(tokens[0], group) for tokens, group in zip(lists, groups, strict=True)}:
        tree = [s for s in row_of if (lists[s][0], groups[s]) == key]
        if len(prefixes([lists[s] for s in tree], [0] * len(tree))) <= capacity:
            assert len({row_of[s] for s in tree}) == 1
    sequences = [Sequence(tokens, np.arange(len(tokens)) > 0) for tokens in arrays]
    if sequences:
        batch = trees(sequences, [row_of[s] for s in range(len(lists))], groups=groups)
        check(batch)
        assert int(batch.real_tokens.sum()) == packing.tokens.sum()


@st.composite
def large_trees(draw):
    """The lengths of a tree's sequences, what each shares with the one before it, and a row that holds each of them."""
    count = draw(st.integers(1, 8))
    lengths = draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    shared = [0]
    for before, here in itertools.pairwise(lengths):
        shared.append(draw(st.integers(1, min(before, here))))
    return lengths, shared, draw(st.integers(max(lengths), 14))


def ways_to_cut(lengths, shared, capacity):
    """The tokens of each piece, for every cut whose pieces fit."""
    count = len(lengths)
    for size in range(count):
        for cuts in itertools.combinations(range(1, count), size):
            bounds = itertools.pairwise([0, *cuts, count])
            way = [lengths[low] + sum(lengths[i] - shared[i] for i in range(low + 1, high)) for low, high in bounds]
            if max(way) <= capacity:
                yield way


@settings(max_examples=150, deadline=None)
@given(tree=large_trees())
def test_a_tree_that_no_row_holds_is_cut_to_the_fewest_tokens_or_the_fewest_pieces(tree):
    """Against all ways to cut it."""
    lengths, shared, capacity = tree
    own = [length - common for length, common in zip(lengths, shared, strict=True)]
    ways = [(sum(way), len(way)) for way in ways_to_cut(*tree)]
    for fewest, order in (("tokens", (0, 1)), ("pieces", (1, 0))):
        starts = _cut_tree(own, shared, capacity, fewest)
        found = (sum(own) + sum(shared[start] for start in starts), len(starts))
        assert [found[i] for i in order] == min([way[i] for i in order] for way in ways)


@settings(max_examples=150, deadline=None)
@given(tree=large_trees())
def test_a_cut_tree_takes_no_more_rows_than_its_fewest_pieces_or_its_fewest_tokens(tree):
    lengths, shared, capacity = tree
    packing = pack_prefixes(PrefixOrder(np.arange(len(lengths)), np.asarray(lengths), np.asarray(shared)), capacity)
    ways = list(ways_to_cut(*tree))
    assert packing.rows <= min(map(len, ways))
    assert packing.rows <= max(len(loads_one_by_one(way, capacity)) for way in ways if sum(way) == min(map(sum, ways)))
    assert packing.cut_trees == (sum(lengths) - sum(shared) > capacity)


def test_groups_behind_one_system_prompt_take_fewer_rows_than_with_the_fewest_tokens():
    """A thousand groups of four behind a prompt of 200 tokens: cut between groups, pieces leave much of each row empty."""
    shared = np.tile([200, 700, 700, 700], 1000)
    shared[0] = 0
    lengths = 700 + np.random.default_rng(0).integers(50, 900, 4000)
    prefixes = PrefixOrder(np.arange(4000), lengths, shared)
    packing, by_tokens = pack_prefixes(prefixes, 8192), _packed_pieces(prefixes, 8192, "tokens")
    assert packing.rows < 0.95 * by_tokens.rows
    assert packing.tokens.sum() >= by_tokens.tokens.sum() >= prefixes.tokens
    assert packing.cut_trees == 1
    assert "1 trees cut" in str(packing)


def test_rows_are_full_where_short_sequences_are_among_the_long_ones():
    lengths = np.random.default_rng(0).geometric(1 / 300, 20_000)
    packing = pack_lengths(lengths, 2048)
    assert packing.fill > 0.999
    assert pack_lengths([5, 0, 2], 4).__str__() == (
        "6 tokens in 2 rows of 4, 75.00% full; 1 tokens of 1 sequences cut; 1 empty sequences dropped"
    )


def test_a_wrapped_row_is_one_sequence_and_packed_pieces_are_several():
    sequences = [Sequence(np.arange(n) + 10 * n, np.arange(n) > 0) for n in (3, 4, 2)]
    lengths = [3, 4, 2]
    (joined,) = pieces_of(sequences, pack_lengths(lengths, 5, "wrapped"), 0)
    assert joined.input_ids.tolist() == [30, 31, 32, 40, 41]
    assert joined.trained.tolist() == [False, True, True, False, True]
    split = pack_lengths(lengths, 3, "bfd_split")
    pieces = [piece for row in range(split.rows) for piece in pieces_of(sequences, split, row)]
    assert sorted(piece.input_ids.tolist() for piece in pieces) == [[20, 21], [30, 31, 32], [40, 41, 42], [43]]
    assert not any(piece.trained[0] for piece in pieces)
    assert split.split_sequences == 1


def test_attention_area_is_that_of_the_pieces():
    packing = pack_lengths([3, 2, 5], 5)
    assert sorted(packing.areas.tolist()) == [6 + 3, 15]
    assert pack_lengths([3, 2, 5], 5, "wrapped").areas.tolist() == [15, 15]
    assert pack_lengths([], 5).areas.tolist() == []


def test_what_cannot_be_packed_is_refused_by_name():
    for longest, strategy in ((6, "bfd"), (0, "bfd"), (4, "wrapped")):
        with pytest.raises(ConfigError, match=f"sequences of up to {longest} tokens in rows of 5"):
            pack_lengths([1], 5, strategy, longest=longest)
    with pytest.raises(ConfigError, match="at least 1 token, got 0"):
        pack_lengths([1], 0)
    with pytest.raises(ConfigError, match="must be one of bfd, bfd_split, wrapped, got 'ffd'"):
        pack_lengths([1], 4, "ffd")
    with pytest.raises(DatasetError, match="sequence 1 has 5 tokens: a row takes 1 to 4"):
        pack_sequences([np.arange(3), np.arange(5)], 4)
    with pytest.raises(DatasetError, match="sequence 0 has 0 tokens"):
        pack_sequences([np.arange(0), np.arange(3)], 4)
    mixed = [Sequence(np.arange(2), np.ones(2, dtype=bool), weight) for weight in (1.0, 2.0)]
    with pytest.raises(ValueError, match="row 0: sequences of different weights"):
        pieces_of(mixed, pack_lengths([2, 2], 4, "wrapped"), 0)
