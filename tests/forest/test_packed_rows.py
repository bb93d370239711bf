"""A dataset of packed rows against its sequences, one by one."""

from __future__ import annotations

import logging

import pytest
from datasets import Dataset

from tests.trainers.tiny_runs import token_rows
from trellium.data.samples import ReadTokens
from trellium.errors import ConfigError
from trellium.forest.packed_rows import pack_rows


def sequences_of(dataset: Dataset) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
    read = ReadTokens(packed=True)(list(dataset)).sequences
    return [(tuple(one.input_ids.tolist()), tuple(one.trained.tolist())) for one in read]


def test_packed_rows_hold_every_sequence_once_and_train_the_same_tokens():
    rows = token_rows(150, longest=30)
    packed = pack_rows(rows, 30, "bfd", name="train")
    assert max(map(sum, packed["seq_lengths"])) <= 30
    assert [sum(lengths) for lengths in packed["seq_lengths"]] == [len(ids) for ids in packed["input_ids"]]
    assert sorted(sequences_of(packed)) == sorted(sequences_of(rows))
    assert len(packed) < 90


def test_a_streamed_set_is_packed_as_it_comes():
    rows = token_rows(150, longest=30)
    packed = Dataset.from_list(list(pack_rows(rows.to_iterable_dataset(), 30, "bfd", name="train")))
    assert sequences_of(packed) == sequences_of(pack_rows(rows, 30, "bfd", name="train"))


@pytest.mark.parametrize(
    ("strategy", "pieces"),
    [
        ("bfd", {(1, 2, 3, 4): 1, (9, 8): 1}),
        ("bfd_split", {(1, 2, 3, 4): 1, (5, 6): 1, (9, 8): 1}),
        ("wrapped", {(1, 2, 3, 4): 1, (5, 6, 9, 8): 1}),
    ],
)
def test_what_is_longer_than_a_row_is_cut_split_or_wrapped(strategy, pieces):
    rows = Dataset.from_list([{"input_ids": ids, "labels": ids} for ids in ([1, 2, 3, 4, 5, 6], [9, 8])])
    packed = pack_rows(rows, 4, strategy, name="train")
    found = sequences_of(packed)
    assert {ids: len([one for one in found if one[0] == ids]) for ids, _ in found} == pieces
    assert all(trained == (False,) + (True,) * (len(ids) - 1) for ids, trained in found)


@pytest.mark.parametrize(("strategy", "pieces"), [("bfd", {4, 2}), ("bfd_split", {4, 2})])
def test_rows_longer_than_the_longest_sequence_hold_more_of_them(strategy, pieces):
    rows = Dataset.from_list([{"input_ids": ids, "labels": ids} for ids in ([1, 2, 3, 4, 5, 6], [9, 8])])
    packed = pack_rows(rows, 10, strategy, name="train", longest=4)
    assert len(packed) == 1
    assert {len(ids) for ids, _ in sequences_of(packed)} == pieces
    streamed = pack_rows(rows.to_iterable_dataset(), 10, strategy, name="train", longest=4)
    assert sequences_of(Dataset.from_list(list(streamed))) == sequences_of(packed)


def test_rows_that_longer_ones_would_fill_better_are_said(caplog):
    rows = Dataset.from_list([{"input_ids": [1] * 11, "labels": [1] * 11}] * 12)
    pack_rows(rows, 17, "bfd", name="train", longest=17)
    assert "train: rows of 34 would be 97.1 % full. packed_row_length=34 and half as many rows a batch" in caplog.text
    caplog.clear()
    pack_rows(rows, 34, "bfd", name="train", longest=17)
    pack_rows(rows, 17, "bfd", name="train")
    assert "packed_row_length" not in caplog.text


def test_how_full_rows_are_and_what_was_cut_is_logged(caplog):
    rows = Dataset.from_list([{"input_ids": [1] * 6, "labels": [1] * 6}])
    with caplog.at_level(logging.INFO):
        pack_rows(rows, 4, "bfd", name="train")
    assert "train packed (bfd): 4 tokens in 1 rows of 4, 100.00% full; 2 tokens of 1 sequences cut." in caplog.text
    with pytest.raises(ConfigError, match="Set max_length"):
        pack_rows(rows, None, "bfd", name="train")
