"""Rows that a JSON parser or the table behind a dataset chokes on, and tokens that a model does not have: each a message, no traceback."""

from __future__ import annotations

import pytest
from datasets import Dataset

from tests.tiny_tokenizer import tiny_tokenizer
from trellium.data.files import load_dataset_from
from trellium.data.prepare import PrepareOptions, prepare_dataset
from trellium.data.rows import SOURCE_COLUMN, read_messages
from trellium.data.token_checks import TokenLimits
from trellium.errors import DatasetError


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "\\ud800 alone"}', "surrogate"),
        ('{"text": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        ('{"text": "a", "n": ' + "9" * 5000 + "}", "digits"),
        ('{"text": "a", "n": ' + "9" * 30 + "}", "64 bits"),
    ],
    ids=["half a surrogate pair", "depth", "digits", "more than 64 bits"],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path, monkeypatch, line, message):
    monkeypatch.setenv("TRELLIUM_HOME", str(tmp_path / "home"))
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "fine", "n": 1}\n' + line + "\n")
    with pytest.raises(DatasetError, match=rf"rows\.jsonl:2.*{message}"):
        load_dataset_from(str(file))


def test_a_damaged_parquet_file_is_named(tmp_path):
    file = tmp_path / "rows.parquet"
    file.write_bytes(b"PAR1 and nothing more!")
    with pytest.raises(DatasetError, match=r"rows\.parquet: cannot be read as Parquet"):
        load_dataset_from(str(file))


CSV = {
    "never closed": ('prompt,completion\na,b\n"c,d\ne,f\n', r"rows\.csv:3: .*a quote is opened there and never closed"),
    "closed rows later": ('prompt,completion\na,b\n"c,d\ne,"f"\n', r"rows\.csv:3: not valid CSV"),
    "in the header": ('"prompt,completion\na,b\n', r"rows\.csv:1: .*never closed"),
    "followed by a word": ('prompt,completion\n"a"b,c\n', r"rows\.csv:2: not valid CSV"),
}


@pytest.mark.parametrize("case", CSV)
def test_a_quote_out_of_place_swallows_no_rows(tmp_path, monkeypatch, case):
    monkeypatch.setenv("TRELLIUM_HOME", str(tmp_path / "home"))
    content, says = CSV[case]
    file = tmp_path / "rows.csv"
    file.write_text(content)
    with pytest.raises(DatasetError, match=says):
        load_dataset_from(str(file))


def test_quoted_line_breaks_and_doubled_quotes_are_read(tmp_path, monkeypatch):
    monkeypatch.setenv("TRELLIUM_HOME", str(tmp_path / "home"))
    file = tmp_path / "rows.csv"
    file.write_text('prompt,completion\n"two\nlines","say ""hi"""\n')
    assert load_dataset_from(str(file))[0]["completion"] == 'say "hi"'


@pytest.mark.parametrize("calls", ['[{"function": {"name": "f"}}]', "call f", 3, ["f"], {"name": "f"}])
def test_tool_calls_that_are_no_list_of_calls_are_named(calls):
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    with pytest.raises(
        DatasetError, match=r"here: message 0 of 'messages' has 'tool_calls' that are \w+ .*must be a list of"
    ):
        read_messages([message], "here", "messages")


WRONG_ROWS = {
    "a token too large": ({"input_ids": [4, 64, 5]}, "holds the token 64, but the model's vocabulary has 64"),
    "a token below zero": ({"input_ids": [4, -1, 5]}, "holds the token -1, but tokens are numbered from 0"),
    "too long": ({"input_ids": [4] * 9}, "has 9 tokens, but the model has a table of 8 positions"),
    "a label of its own": ({"input_ids": [4, 5], "labels": [-100, 6]}, "'labels' has 6 at position 1"),
    "a label beyond the vocabulary": ({"input_ids": [4, 5], "labels": [-100, 700]}, "'labels' has 700 at position 1"),
    "fewer labels": ({"input_ids": [4, 5], "labels": [5]}, "'labels' has 1 entries and 'input_ids' 2"),
    "tokens that are no numbers": ({"input_ids": ["4", "5"]}, "'input_ids' must be a list of integers"),
    "tokens with a fraction": ({"input_ids": [4.0, 5.0]}, "'input_ids' must be a list of integers"),
    "no tokens": ({"input_ids": None}, "'input_ids' must be a list of integers, got nothing"),
    "a token missing": ({"input_ids": [4, None]}, "'input_ids' must be a list of integers"),
}


@pytest.mark.parametrize("streamed", [False, True], ids=["dataset", "stream"])
@pytest.mark.parametrize("skip", [False, True], ids=["tokenized", "taken as they are"])
@pytest.mark.parametrize("case", WRONG_ROWS)
def test_a_row_that_cannot_be_trained_on_is_named_before_training(case, skip, streamed):
    wrong, says = WRONG_ROWS[case]
    of_its_type = next(type(value) for value in wrong["input_ids"] or [1])
    right = {"input_ids": [of_its_type(4), of_its_type(5)]}
    if "labels" in wrong:
        right["labels"] = [-100, 5]
    if of_its_type is not int:
        right = {key: values for key, values in wrong.items()}
    rows = Dataset.from_list(
        [{**row, SOURCE_COLUMN: f"rows.jsonl:{n}"} for n, row in enumerate([right, wrong, right], 1)]
    )
    limits = TokenLimits(vocabulary_size=64, positions=8)
    options = PrepareOptions(max_length=None, skip_prepare=skip, limits=limits)
    line = 2 if of_its_type is int else 1
    with pytest.raises(DatasetError, match=rf"rows\.jsonl:{line}: .*{says}"):
        list(prepare_dataset(rows.to_iterable_dataset() if streamed else rows, tiny_tokenizer(), options))


@pytest.mark.parametrize("streamed", [False, True], ids=["dataset", "stream"])
def test_a_row_of_no_tokens_taken_as_it_is_is_named(streamed):
    rows = Dataset.from_list([{"input_ids": [4, 5]}, {"input_ids": []}])
    with pytest.raises(DatasetError, match=r"row 1 \(from 0\): has no tokens"):
        list(
            prepare_dataset(
                rows.to_iterable_dataset() if streamed else rows,
                tiny_tokenizer(),
                PrepareOptions(max_length=None, skip_prepare=True),
            )
        )


def test_rows_taken_as_they_are_must_have_something_to_train():
    rows = Dataset.from_list([{"input_ids": [4, 5], "labels": [4, -100]}, {"input_ids": [7], "labels": [7]}])
    with pytest.raises(DatasetError, match="no row has a token to train"):
        prepare_dataset(rows, tiny_tokenizer(), PrepareOptions(max_length=None, skip_prepare=True))
