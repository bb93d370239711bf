"""Rows that a JSON parser or the table behind a dataset chokes on, and tokens that a model does not have: each a message, no traceback."""

from __future__ import annotations

import pytest
from datasets import Dataset

from trellium.data.files import load_dataset_from
from trellium.data.prepare import check_vocabulary
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


@pytest.mark.parametrize("token", [-1, 64])
def test_a_token_the_model_does_not_have_is_named_with_its_row(token):
    rows = Dataset.from_dict({"input_ids": [[1, 2], [3], [4, token, 5]]})
    with pytest.raises(
        DatasetError, match=rf"row 2 \(from 0\) holds the token {token}, but the model's vocabulary has 64"
    ):
        check_vocabulary(rows, 64, "train")
    check_vocabulary(rows.select([0, 1]), 64, "train")
