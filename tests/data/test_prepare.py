"""Whole datasets: what is cut, what is left out, what is refused, and that work done once is not done again."""

from __future__ import annotations

import logging

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from tests.tiny_tokenizer import CHATML, tiny_tokenizer
from trellium.data import prepare
from trellium.data.pipeline import EncodeRows
from trellium.data.prepare import PrepareOptions, prepare_dataset, prepare_with_report
from trellium.data.report import Fate
from trellium.data.rows import SOURCE_COLUMN
from trellium.errors import ConfigError, DatasetError

USER, ANSWER = {"role": "user", "content": "hi there"}, {"role": "assistant", "content": "hello"}


def test_longer_rows_are_cut_at_the_asked_end_and_counted(caplog):
    tokenizer = tiny_tokenizer()
    rows = [{"input_ids": list(range(20, 30))}, {"input_ids": [20, 21]}, {"input_ids": list(range(30, 37))}]
    with caplog.at_level(logging.INFO):
        kept, report = prepare_with_report(Dataset.from_list(rows), tokenizer, PrepareOptions(max_length=4))
    assert kept["input_ids"][:] == [[20, 21, 22, 23], [20, 21], [30, 31, 32, 33]]
    assert (report.rows, report.kept, report.truncated, report.tokens_cut) == (3, 3, 2, 9)
    assert (report.tokens, report.trained_tokens, report.longest, report.dropped) == (10, 7, 4, {})
    assert "train: 3 of 3 rows, 10 tokens, 7 of them trained; 2 rows truncated by 9 tokens in all." in caplog.messages

    ends, _ = prepare_with_report(
        Dataset.from_list(rows), tokenizer, PrepareOptions(max_length=4, truncation_mode="keep_end")
    )
    assert ends["input_ids"][:] == [[26, 27, 28, 29], [20, 21], [33, 34, 35, 36]]
    assert ends["labels"][0] == [-100, 27, 28, 29]
    whole, _ = prepare_with_report(Dataset.from_list(rows), tokenizer, PrepareOptions(max_length=None))
    assert len(whole["input_ids"][0]) == 10


def test_rows_with_nothing_to_train_are_dropped_and_counted_by_reason(caplog):
    rows = [
        {"input_ids": [20, 21, 22], "labels": [20, 21, 22]},
        {"input_ids": [20, 21], "labels": [-100, -100]},
        {"input_ids": [20, 21, 22, 23, 24], "labels": [-100, -100, -100, -100, 24]},
        {"input_ids": [20], "labels": [20]},
        {"input_ids": [20, 21], "labels": [20, -100]},
    ]
    kept, report = prepare_with_report(Dataset.from_list(rows), tiny_tokenizer(), PrepareOptions(max_length=4))
    assert len(kept) == report.kept == 1
    assert report.dropped == {Fate.ALL_MASKED: 2, Fate.TRUNCATED_AWAY: 1, Fate.TOO_SHORT: 1}
    assert report.examples[Fate.ALL_MASKED] == ("train: row 1 (from 0)", "train: row 4 (from 0)")
    assert "dropped 1 row with all trained tokens beyond max_length (e.g. train: row 2 (from 0))" in caplog.text


def test_empty_texts_are_dropped_as_too_short():
    kept, report = prepare_with_report(
        Dataset.from_list([{"text": ""}, {"text": "hello"}]), tiny_tokenizer(), PrepareOptions(max_length=8)
    )
    assert len(kept) == 1
    assert report.dropped == {Fate.TOO_SHORT: 1}


def test_a_dataset_with_every_label_masked_is_an_error_with_rows_and_the_way_out():
    rows = [{"input_ids": [20, 21], "labels": [-100, -100], SOURCE_COLUMN: f"a.jsonl:{i}"} for i in (3, 4, 7, 9)]
    with pytest.raises(DatasetError) as error:
        prepare_dataset(Dataset.from_list(rows), tiny_tokenizer(), PrepareOptions(max_length=8))
    assert str(error.value) == (
        "train: no row has a token to train: 4 rows with every token masked "
        "(e.g. a.jsonl:3, a.jsonl:4, a.jsonl:7): check the row's masks, or the options completion_only_loss and assistant_only_loss."
    )


def test_prompts_longer_than_max_length_everywhere_are_an_error_that_says_so():
    rows = [{"prompt": "a long prompt with many words in it", "completion": " yes"}]
    with pytest.raises(
        DatasetError,
        match=r"no row has a token to train: 1 row with all trained tokens beyond max_length .*row 0.*: raise max_length, or shorten the prompts",
    ):
        prepare_dataset(Dataset.from_list(rows), tiny_tokenizer(), PrepareOptions(max_length=4))


def test_no_assistant_anywhere_is_an_error_under_assistant_only_loss():
    with pytest.raises(DatasetError, match=r"every token masked.*assistant_only_loss"):
        prepare_dataset(
            Dataset.from_list([{"messages": [USER]}]),
            tiny_tokenizer(CHATML),
            PrepareOptions(max_length=64, assistant_only_loss=True),
        )


def test_an_empty_dataset_is_an_error():
    with pytest.raises(
        DatasetError, match=r"^train: the dataset is empty\. Training needs at least one row: check the file, the split"
    ):
        prepare_dataset(Dataset.from_dict({"text": []}), tiny_tokenizer(), PrepareOptions(max_length=8))


def test_every_row_is_checked_and_the_wrong_one_named():
    rows = [{"messages": [USER, ANSWER]} for _ in range(2500)]
    rows[2345] = {"messages": [USER, {"role": "assitant", "content": "x"}]}
    with pytest.raises(
        DatasetError,
        match=r"^chat\.parquet: row 2345 \(from 0\): message 1 of 'messages' has the role 'assitant'.*'assistant'\?",
    ):
        prepare_dataset(
            Dataset.from_list(rows), tiny_tokenizer(CHATML), PrepareOptions(max_length=64, source="chat.parquet")
        )


def test_the_error_of_a_row_arrives_from_another_process():
    rows = [{"text": "hello"}] * 10 + [{"text": None}]
    with pytest.raises(DatasetError, match=r"^train: row 10 \(from 0\): 'text' is missing"):
        prepare_dataset(Dataset.from_list(rows), tiny_tokenizer(), PrepareOptions(max_length=64, num_proc=2))


@pytest.mark.parametrize(
    ("dataset", "part"),
    [
        (
            DatasetDict(train=Dataset.from_dict({"text": ["a"]})),
            "got a dict of them ('train'). Choose one: dataset['train']",
        ),
        ([{"text": "a"}], "got list. datasets.Dataset.from_list(rows)"),
    ],
)
def test_what_is_not_a_dataset_is_refused_with_the_way_out(dataset, part):
    with pytest.raises(DatasetError) as error:
        prepare_dataset(dataset, tiny_tokenizer(), PrepareOptions(max_length=8))
    assert part in str(error.value)


def test_options_that_cannot_be_are_refused():
    dataset = Dataset.from_dict({"text": ["hello there"]})
    with pytest.raises(ConfigError, match="truncation_mode='middle' is not one of 'keep_start', 'keep_end'"):
        prepare_dataset(dataset, tiny_tokenizer(), PrepareOptions(max_length=8, truncation_mode="middle"))
    with pytest.raises(ConfigError, match="max_length=1, but a row needs two tokens"):
        prepare_dataset(dataset, tiny_tokenizer(), PrepareOptions(max_length=1))
    with pytest.raises(ConfigError, match=r"with_transform.*Apply it with dataset\.map"):
        prepare_dataset(dataset.with_transform(lambda batch: batch), tiny_tokenizer(), PrepareOptions(max_length=8))


def test_skipped_preparation_returns_the_dataset_unless_its_masks_would_be_lost():
    dataset = Dataset.from_dict({"input_ids": [[1, 2]], "labels": [[1, 2]], "completion_mask": [[0, 1]]})
    same = prepare_dataset(dataset, tiny_tokenizer(), PrepareOptions(max_length=1024, skip_prepare=True))
    assert same[0] == dataset[0]
    with pytest.raises(DatasetError, match="'completion_mask' would be ignored"):
        prepare_dataset(
            dataset.remove_columns("labels"), tiny_tokenizer(), PrepareOptions(max_length=8, skip_prepare=True)
        )
    with pytest.raises(DatasetError, match="there is no 'input_ids' among the columns 'text'"):
        prepare_dataset(
            Dataset.from_dict({"text": ["a"]}), tiny_tokenizer(), PrepareOptions(max_length=8, skip_prepare=True)
        )


def test_a_dataset_is_tokenized_once_and_found_again(tmp_path, monkeypatch):
    Dataset.from_list([{"text": f"hello {i}"} for i in range(20)]).save_to_disk(tmp_path / "rows")
    calls = []
    tokenize = EncodeRows.__call__
    monkeypatch.setattr(
        EncodeRows,
        "__call__",
        lambda self, batch, indices: (calls.append(len(indices)), tokenize(self, batch, indices))[1],
    )

    def once(**options):
        return prepare_with_report(
            Dataset.load_from_disk(tmp_path / "rows"), tiny_tokenizer(), PrepareOptions(**{"max_length": 8, **options})
        )

    first, report = once()
    made = len(calls)
    again, same_report = once()
    assert made
    assert len(calls) == made
    assert again._fingerprint == first._fingerprint
    assert same_report == report
    once(max_length=3)
    assert len(calls) > made


def test_processes_give_the_rows_of_one():
    dataset = Dataset.from_list(
        [{"messages": [USER, {"role": "assistant", "content": f"hello {i}"}]} for i in range(7)]
    )
    one, two = (
        prepare_dataset(
            dataset, tiny_tokenizer(CHATML), PrepareOptions(max_length=64, assistant_only_loss=True, num_proc=n)
        )
        for n in (None, 2)
    )
    assert one[:] == two[:]


def test_a_stream_is_prepared_as_it_is_read():
    def rows():
        for i in range(5):
            yield {"text": "" if i == 3 else f"hello number {i}"}

    read = prepare_dataset(IterableDataset.from_generator(rows), tiny_tokenizer(), PrepareOptions(max_length=6))
    whole = prepare_dataset(Dataset.from_list(list(rows())), tiny_tokenizer(), PrepareOptions(max_length=6))
    assert isinstance(read, IterableDataset)
    assert list(read) == list(whole)
    assert len(list(whole)) == 4


def test_a_stream_that_trains_nothing_is_an_error_when_it_is_read():
    rows = [{"input_ids": [1, 2], "labels": [-100, -100]}] * 5
    stream = prepare_dataset(
        Dataset.from_list(rows).to_iterable_dataset(), tiny_tokenizer(), PrepareOptions(max_length=6)
    )
    with pytest.raises(
        DatasetError, match=r"not one of the first 5 rows has a token to train\. The first, train: row 0"
    ):
        next(iter(stream))
    with pytest.raises(DatasetError, match="the dataset is empty"):
        prepare_dataset(
            IterableDataset.from_generator(lambda: iter(())), tiny_tokenizer(), PrepareOptions(max_length=6)
        )


def test_prepared_rows_hold_nothing_but_tokens_and_labels():
    rows = Dataset.from_list([{"prompt": "a", "completion": " b", "id": 3, SOURCE_COLUMN: "x:1"}])
    kept = prepare.prepare_dataset(rows, tiny_tokenizer(), PrepareOptions(max_length=8))
    assert kept.column_names == ["input_ids", "labels"]


@pytest.mark.parametrize("processes", [None, 2])
def test_a_row_left_out_is_named_by_its_place_in_the_whole_set(processes):
    rows = [{"input_ids": [20, 21]} for _ in range(1200)]
    rows[1100] = {"input_ids": [20]}
    _, report = prepare_with_report(
        Dataset.from_list(rows), tiny_tokenizer(), PrepareOptions(max_length=8, num_proc=processes)
    )
    assert report.examples == {Fate.TOO_SHORT: ("train: row 1100 (from 0)",)}
