from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trellium.data.sequence import Sequence
from trellium.errors import ConfigError, DatasetError
from trellium.forest.batch import ForestBatch
from trellium.forest.collate import ForestCollator
from trellium.forest.layout import chains, check
from trellium.forest.shapes import Feed, plan_shapes
from trellium.forest.step_cost import StepCost
from trellium.ops.attention import rows_are_chains

ROW = st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=12)


def forest(tensors: dict[str, torch.Tensor]) -> ForestBatch:
    assert tensors.pop("data_tokens") == tensors["sequence_tokens"]
    return ForestBatch(**tensors)


def prepared(tokens: list[tuple[int, bool]]) -> dict:
    return {"input_ids": [token for token, _ in tokens], "labels": [token if on else -100 for token, on in tokens]}


@settings(max_examples=80, deadline=None)
@given(rows=st.lists(ROW, min_size=1, max_size=5), multiple=st.sampled_from([None, 1, 3, 8]))
def test_every_batch_keeps_the_laws_and_says_what_the_rows_say(rows, multiple):
    batch = forest(ForestCollator(0, multiple)([prepared(row) for row in rows]))
    check(batch)
    assert rows_are_chains(batch.subtree_end)
    length, edges = batch.input_ids.shape[1], len(batch.edge_position)
    assert length % (multiple or 1) == 0
    assert length < max(map(len, rows)) + (multiple or 1)
    assert edges % (multiple or 1) == 0
    assert batch.real_tokens.tolist() == [len(row) for row in rows]
    assert batch.sequence_tokens == sum(map(len, rows))
    # Read the edges back, plainly.
    expected = [
        (row * length + place - 1, token)
        for row, tokens in enumerate(rows)
        for place, (token, on) in enumerate(tokens)
        if on and place > 0
    ]
    count = len(expected)
    if multiple in (None, 1):
        assert edges == max(count, 1)
    else:  # all places, or a half, a quarter … of them: the smallest that holds the edges and is a multiple
        assert edges >= count
        assert len(rows) * length in {edges << halvings for halvings in range(12)}
        assert edges // 2 < count or edges % (2 * multiple)
    assert list(zip(batch.edge_position[:count].tolist(), batch.edge_target[:count].tolist(), strict=True)) == expected
    assert (batch.edge_weight[:count] == 1).all()
    assert not batch.edge_weight[count:].any()
    for row, tokens in enumerate(rows):
        assert batch.input_ids[row, : len(tokens)].tolist() == [token for token, _ in tokens]
        assert (batch.input_ids[row, len(tokens) :] == tokens[0][0]).all()


def test_padding_is_a_chain_of_its_own():
    batch = chains([sequence([5, 6, 7]), sequence([8])])
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 8, 8]]
    assert batch.position_ids.tolist() == [[0, 1, 2], [0, 0, 1]]
    assert batch.subtree_end.tolist() == [[3, 3, 3], [1, 3, 3]]


def test_rows_without_a_trained_token_make_one_edge_of_weight_zero():
    batch = forest(ForestCollator(0)([{"input_ids": [3, 4], "labels": [-100, -100]}]))
    check(batch)
    assert batch.edge_weight.tolist() == [0.0]


def test_a_sequence_s_weight_is_that_of_its_edges():
    batch = chains([sequence([1, 2, 3], weight=0.5), sequence([4, 5])])
    assert batch.edge_weight.tolist() == [0.5, 0.5, 1.0]


def test_an_empty_row_and_an_empty_batch_are_refused_by_name():
    with pytest.raises(DatasetError, match="row 1 of the batch has no tokens"):
        ForestCollator(0)([{"input_ids": [1], "labels": [1]}, {"input_ids": [], "labels": []}])
    with pytest.raises(DatasetError, match="at least one sequence"):
        ForestCollator(0)([])


@pytest.mark.parametrize(("pad", "multiple", "message"), [(None, None, "pad_token_id"), (0, 0, "pad_to_multiple_of")])
def test_a_collator_that_cannot_pad_is_refused(pad, multiple, message):
    with pytest.raises(ConfigError, match=message):
        ForestCollator(pad, multiple)


TREE = ForestBatch(
    input_ids=torch.tensor([[1, 2, 3, 4, 5, 6]]),
    position_ids=torch.tensor([[0, 1, 2, 1, 0, 1]]),
    subtree_end=torch.tensor([[4, 3, 3, 4, 6, 6]]),
    edge_position=torch.tensor([0, 0, 1]),
    edge_target=torch.tensor([2, 4, 3]),
    edge_weight=torch.ones(3),
    real_tokens=torch.tensor([6]),
    sequence_tokens=torch.tensor(6),
)


def test_a_row_of_trees_keeps_the_laws():
    check(TREE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"subtree_end": torch.tensor([[4, 5, 3, 4, 6, 6]])}, "place 1: its subtree ends after its parent's"),
        ({"subtree_end": torch.tensor([[4, 3, 2, 4, 6, 6]])}, r"place 2: subtree_end must lie in \(2, 6\]"),
        ({"subtree_end": torch.tensor([[4, 3, 3, 4, 6, 7]])}, "place 5: subtree_end must lie in"),
        ({"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1]])}, "place 3: position must be 1, got 3"),
        ({"edge_position": torch.tensor([0, 0, 6])}, "edge_position must lie in"),
        ({"edge_weight": torch.ones(3, dtype=torch.float64)}, "edge_weight must be torch.float32"),
        ({"edge_target": torch.tensor([2])}, "edges must be three"),
    ],
)
def test_a_broken_law_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        check(dataclasses.replace(TREE, **change))


def sequence(tokens: list[int], weight: float = 1.0) -> Sequence:
    return Sequence(np.asarray(tokens, dtype=np.int64), np.ones(len(tokens), dtype=bool), weight)


def planned_collator(lengths: list[int], *, rows: int, **options) -> ForestCollator:
    feed = Feed(lengths, rows, 100, StepCost())
    return ForestCollator(0, plan=plan_shapes(feed, shapes="multiple", step=8), **options)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(ROW, min_size=1, max_size=3))
def test_a_planned_batch_says_the_same_in_the_smallest_shape_that_holds_it(rows):
    data = [prepared(row) for row in rows]
    plain = forest(ForestCollator(0)(data))
    batch = forest(planned_collator([len(row) for row in rows] + [12], rows=3)(data))
    check(batch)
    assert batch.input_ids.shape == (3, 8 if max(map(len, rows)) <= 8 else 16)
    assert batch.real_tokens.sum() == plain.real_tokens.sum()
    length, width = plain.input_ids.shape[1], batch.input_ids.shape[1]
    edges = int((plain.edge_weight > 0).sum())
    assert (batch.edge_position // width * length + batch.edge_position % width)[:edges].tolist() == (
        plain.edge_position[:edges].tolist()
    )
    assert batch.edge_target[:edges].tolist() == plain.edge_target[:edges].tolist()
    assert float(batch.edge_weight.sum()) == float(plain.edge_weight.sum())


def test_a_partial_batch_is_filled_up_with_rows_nobody_trains():
    batch = forest(planned_collator([4] * 7, rows=3)([prepared([(5, True)] * 4)]))
    check(batch)
    assert batch.input_ids.tolist() == [[5] * 8] * 3
    assert batch.real_tokens.tolist() == [4, 0, 0]
    assert batch.position_ids[1].tolist() == list(range(8))
    assert int((batch.edge_weight > 0).sum()) == 3


def test_a_batch_that_no_shape_holds_is_refused_by_row_and_length():
    collate = planned_collator([4, 4, 4], rows=2)
    with pytest.raises(
        ConfigError, match="2 rows with 21 trained tokens, whose longest sequence is of row 1 with 20 tokens"
    ):
        collate([prepared([(5, True)] * 3), prepared([(5, True)] * 20)])
    with pytest.raises(ConfigError, match="no planned shape holds a batch of 3 rows"):
        collate([prepared([(5, True)] * 3)] * 3)


def test_evaluation_takes_its_own_shapes():
    training, evaluation = Feed([4], 1, 10, StepCost()), Feed([4, 9], 2, 10, StepCost())
    plan = plan_shapes(training, evaluation, shapes="multiple", step=8)
    row = prepared([(5, True)] * 4)
    assert ForestCollator(0, plan=plan)([row])["input_ids"].shape == (1, 8)
    assert ForestCollator(0, plan=plan, evaluation=True)([row])["input_ids"].shape == (2, 8)
