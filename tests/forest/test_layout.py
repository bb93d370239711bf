from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.forest.random_trees import prefixes, sequences
from trellium.data.sequence import Sequence
from trellium.errors import ConfigError, DatasetError
from trellium.forest.batch import ForestBatch, Shape
from trellium.forest.layout import chains, check, trees


def sequence(tokens: list[int], weight: float = 1.0) -> Sequence:
    return Sequence(np.asarray(tokens, dtype=np.int64), np.arange(len(tokens)) > 0, weight)


def context_of(batch: ForestBatch, place: int) -> tuple[int, tuple[int, ...]]:
    """The row of a place of the flattened batch, and the tokens it may attend to, by the one comparison that is the mask."""
    row, query = divmod(place, batch.input_ids.shape[1])
    seen = [key for key in range(query + 1) if query < batch.subtree_end[row, key]]
    return row, tuple(batch.input_ids[row, seen].tolist())


@settings(max_examples=200, deadline=None)
@given(given=sequences(), data=st.data(), multiple=st.sampled_from([1, 4]))
def test_edges_say_what_the_sequences_train_each_with_the_sum_of_their_weights(given, data, multiple):
    count = len(given)
    rows = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    groups = data.draw(st.lists(st.sampled_from(["a", "b"]), min_size=count, max_size=count))
    batch = trees(given, rows, groups=groups, multiple=multiple, term_fields={})
    check(batch)
    keys = [f"{row} {group}" for row, group in zip(rows, groups, strict=True)]
    assert int(batch.real_tokens.sum()) == len(prefixes([s.input_ids.tolist() for s in given], keys))
    # Groups of a row look alike to a reader of the batch: their edges are told apart by their number only.
    expected: dict[tuple, dict[str, float]] = {}
    for one, row, group in zip(given, rows, groups, strict=True):
        for target in np.flatnonzero(one.trained):
            context = (row, tuple(one.input_ids[:target].tolist()), int(one.input_ids[target]))
            by_group = expected.setdefault(context, {})
            by_group[group] = by_group.get(group, 0.0) + one.weight
    read: dict[tuple, list[float]] = {}
    edges = sum(map(len, expected.values()))
    for edge in range(edges):
        row, context = context_of(batch, int(batch.edge_position[edge]))
        read.setdefault((row, context, int(batch.edge_target[edge])), []).append(float(batch.edge_weight[edge]))
    assert {key: sorted(weights) for key, weights in read.items()} == {
        key: sorted(weights.values()) for key, weights in expected.items()
    }
    assert not batch.edge_weight[edges:].any()


@settings(max_examples=150, deadline=None)
@given(given=sequences(), multiple=st.sampled_from([1, 4]))
def test_every_sample_finds_its_own_fields_and_its_scores_in_its_terms(given, multiple):
    """Scores that name their edge: a sample must read those of its own tokens, in order, whoever else reads them."""
    fields = {
        "advantage": [0.5 * index for index in range(len(given))],
        "old_logprob": [np.arange(len(one)) * 0.25 for one in given],
        "version": [np.arange(len(one)) for one in given],
    }
    batch = trees(given, [0] * len(given), multiple=multiple, term_fields=fields)
    check(batch)
    terms = batch.terms
    used = sum(int(one.trained.sum()) for one in given)
    assert not terms.weight[used:].any()
    assert terms.sample[:used].tolist() == [index for index, one in enumerate(given) for _ in range(one.trained.sum())]
    assert terms.fields["old_logprob"].dtype == torch.float32
    assert terms.fields["version"].dtype == torch.int64
    targets = [(index, place) for index, one in enumerate(given) for place in np.flatnonzero(one.trained)]
    for term, (index, place) in enumerate(targets):
        edge = int(terms.edge[term])
        one = given[index]
        assert context_of(batch, int(batch.edge_position[edge])) == (0, tuple(one.input_ids[:place].tolist()))
        assert int(batch.edge_target[edge]) == one.input_ids[place]
        assert float(terms.weight[term]) == one.weight
        assert float(terms.fields["advantage"][term]) == 0.5 * index
        assert float(terms.fields["old_logprob"][term]) == 0.25 * place
        assert int(terms.fields["version"][term]) == place


@settings(max_examples=60, deadline=None)
@given(given=sequences(most=5), multiple=st.sampled_from([1, 4]))
def test_a_row_for_each_sequence_is_the_padded_form(given, multiple):
    padded = chains(given, multiple=multiple, term_fields={})
    alone = trees(given, range(len(given)), multiple=multiple, term_fields={})
    assert padded.shape == alone.shape
    for name, tensor in padded.tensors().items():
        assert torch.equal(tensor, alone.tensors()[name]), name


@settings(max_examples=60, deadline=None)
@given(given=sequences(most=5), extra=st.tuples(*[st.integers(0, 3)] * 4))
def test_a_batch_filled_up_to_a_shape_says_the_same_and_trains_nothing_more(given, extra):
    exact = trees(given, [0] * len(given), term_fields={})
    sizes = [size + more for size, more in zip(dataclasses.astuple(exact.shape), extra, strict=True)]
    filled = trees(given, [0] * len(given), shape=Shape(*sizes), term_fields={})
    check(filled)
    assert dataclasses.astuple(filled.shape) == tuple(sizes)
    assert int(filled.real_tokens.sum()) == int(exact.real_tokens.sum())
    used = int(exact.real_tokens.sum())
    assert torch.equal(filled.input_ids[0, :used], exact.input_ids[0, :used])
    assert torch.equal(filled.subtree_end[0, :used], exact.subtree_end[0, :used])
    assert (filled.input_ids[0, used:] == exact.input_ids[0, 0]).all()
    assert (filled.input_ids[1:] == exact.input_ids[0, 0]).all()
    edges = exact.shape.edges
    assert torch.equal(filled.edge_target[:edges], exact.edge_target)
    assert not filled.edge_weight[edges:].any()
    assert not filled.terms.weight[exact.shape.terms :].any()


def test_a_position_at_a_branch_has_one_edge_for_each_child():
    batch = trees([sequence([5, 6, 7]), sequence([5, 8], 0.5), sequence([5, 6])], [0, 0, 0])
    assert batch.input_ids.tolist() == [[5, 6, 7, 8]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 1]]
    assert batch.subtree_end.tolist() == [[4, 3, 3, 4]]
    assert batch.edge_position.tolist() == [0, 1, 0]
    assert batch.edge_target.tolist() == [6, 7, 8]
    assert batch.edge_weight.tolist() == [2.0, 1.0, 0.5]


def test_a_shape_that_does_not_hold_the_batch_is_refused_by_row_and_length():
    with pytest.raises(ConfigError, match="row 1, with 3 tokens"):
        chains([sequence([1]), sequence([1, 2, 3])], shape=Shape(2, 2, 4))
    with pytest.raises(ConfigError, match="needs 1x3 with 2 edges does not fit the shape 1x3 with 1 edges"):
        chains([sequence([1, 2, 3])], shape=Shape(1, 3, 1))


def test_what_does_not_match_the_sequences_is_refused():
    one = sequence([1, 2])
    with pytest.raises(DatasetError, match="sequence 1 of the batch has no tokens"):
        trees([one, sequence([])], [0, 0])
    with pytest.raises(ValueError, match="rows and groups must be one a sequence"):
        trees([one], [0, 1])
    with pytest.raises(ValueError, match=r"'advantage' of sequence 0 must be one number or \[2\], got \[3\]"):
        trees([one], [0], term_fields={"advantage": [np.zeros(3)]})
    with pytest.raises(ValueError, match="'advantage' must have one entry a sequence, 1, got 2"):
        trees([one], [0], term_fields={"advantage": [0.0, 1.0]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"edge_target": torch.tensor([7, 7, 8])}, "edge 0 must lead to a child of place 0, none of which is token 7"),
        ({"edge_target": torch.tensor([6, 7, 6])}, "edge 2 is there twice"),
        (
            {"edge_weight": torch.tensor([1.0, 1.0, 0.5])},
            "the weights of edge 0's terms must add up to its own, 1.0, got 2.0",
        ),
    ],
)
def test_a_broken_law_of_edges_is_named(change, message):
    given = [sequence([5, 6, 7]), sequence([5, 8], 0.5), sequence([5, 6])]
    batch = trees(given, [0, 0, 0], term_fields={})
    with pytest.raises(ValueError, match=message):
        check(dataclasses.replace(batch, **change))
