"""Files of rows: read with their lines, and what is wrong with one is said with file, line, rule and way out."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from datasets import Dataset, DatasetDict

from tests.tiny_tokenizer import CHATML, tiny_tokenizer
from trellium.data.files import available_splits, load_dataset_from
from trellium.data.prepare import PrepareOptions, prepare_dataset
from trellium.data.rows import SOURCE_COLUMN
from trellium.errors import DatasetError

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}


def write(path, *lines):
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), encoding="utf-8"
    )
    return path


def message_of(path, **options):
    with pytest.raises(DatasetError) as error:
        load_dataset_from(path, **options)
    return str(error.value)


def test_every_row_of_a_file_of_lines_knows_its_line(tmp_path):
    path = write(tmp_path / "a.jsonl", {"text": "one"}, "", {"text": "three"})
    rows = load_dataset_from(path)
    assert rows[:] == {"text": ["one", "three"], SOURCE_COLUMN: [f"{path}:1", f"{path}:3"]}
    path = write(tmp_path / "a.txt", "one", "", "three")
    assert load_dataset_from(str(path))[:] == {"text": ["one", "three"], SOURCE_COLUMN: [f"{path}:1", f"{path}:3"]}
    path = write(tmp_path / "a.csv", "prompt,completion", '"a', 'b",c', "d,e")
    assert load_dataset_from(path)[:] == {
        "prompt": ["a\nb", "d"],
        "completion": ["c", "e"],
        SOURCE_COLUMN: [f"{path}:2", f"{path}:4"],
    }


@pytest.mark.parametrize(
    "content",
    ['[{"text": "a"},\n {"text": "b"}]', '{"text": "a"}\n{"text": "b"}\n', '{"data": [{"text": "a"}, {"text": "b"}]}'],
)
def test_a_json_file_is_a_list_or_lines(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_text(content)
    assert load_dataset_from(path)["text"][:] == ["a", "b"]


def test_a_parquet_file_is_read(tmp_path):
    Dataset.from_dict({"text": ["a", "b"]}).to_parquet(tmp_path / "a.parquet")
    assert load_dataset_from(tmp_path / "a.parquet")["text"][:] == ["a", "b"]
    (tmp_path / "b.parquet").write_bytes(b"text\na\n")
    assert (
        message_of(tmp_path / "b.parquet")
        == f"{tmp_path}/b.parquet: not a Parquet file: it begins with b'text', not b'PAR1'. Rename it to what it holds, or write it again."
    )


def test_rows_may_differ_inside_without_being_filled_in(tmp_path):
    tools = [[{"name": "f", "parameters": {"a": 1}}], [{"name": "g", "parameters": {"b": [2]}}]]
    rows = [
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [{"arguments": tool[0]["parameters"]}]},
            ],
            "tools": tool,
        }
        for tool in tools
    ]
    rows.append({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]})
    loaded = load_dataset_from(write(tmp_path / "a.jsonl", *rows))
    assert loaded["tools"][:] == [*tools, None]
    assert loaded["messages"][:] == [row["messages"] for row in rows]


def test_a_file_is_read_again_only_when_it_changed(tmp_path):
    path = write(tmp_path / "a.jsonl", {"text": "one"})
    first, again = load_dataset_from(path), load_dataset_from(path)
    assert first.cache_files == again.cache_files
    assert first._fingerprint == again._fingerprint
    write(path, {"text": "one"}, {"text": "two"})
    assert load_dataset_from(path)["text"][:] == ["one", "two"]


def test_a_missing_file_is_named_with_its_neighbours(tmp_path):
    write(tmp_path / "train.jsonl", {"text": "a"})
    text = message_of(tmp_path / "tran.jsonl")
    assert text.startswith(f"{tmp_path}/tran.jsonl: no such file. In that folder there is train.jsonl.")
    assert "Check the path" in text
    assert "no such folder" in message_of(tmp_path / "nowhere" / "a.jsonl")


def test_an_empty_file_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").touch()
    assert (
        message_of(tmp_path / "a.jsonl") == f"{tmp_path}/a.jsonl: the file is empty. Training needs at least one row."
    )
    assert "the file has no row, only blank lines" in message_of(write(tmp_path / "b.jsonl", "", ""))
    assert "the file has no row, only a header" in message_of(write(tmp_path / "b.csv", "a,b"))
    assert "the file has no row" in message_of(write(tmp_path / "b.json", "[]"))


def test_a_bad_line_is_shown_where_it_breaks(tmp_path):
    path = write(tmp_path / "a.jsonl", {"text": "one"}, '{"text": "' + "x" * 100 + '" "label": 1, ' + "y" * 100)
    text = message_of(path)
    assert text.startswith(f"{path}:2: not valid JSON, Expecting ',' delimiter at column 113: …xxx")
    assert '" "label": 1' in text
    assert len(text) < 300 + len(str(path))
    assert text.endswith("A .jsonl file holds one JSON object a line: mend or remove the line.")


def test_a_document_over_many_lines_called_jsonl_is_recognised(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('[\n  {"text": "a"}\n]\n')
    assert message_of(path).startswith(f"{path}:1: not valid JSON")
    assert message_of(path).endswith("name it .json.")


@pytest.mark.parametrize(
    ("line", "got"), [("[1, 2]", "list [1, 2]"), ('"hello"', "str 'hello'"), ("3", "int 3"), ("{}", "an empty object")]
)
def test_a_line_that_is_no_object_is_named(tmp_path, line, got):
    path = write(tmp_path / "a.jsonl", {"text": "one"}, line)
    assert message_of(path).startswith(f"{path}:2: a row must be a JSON object, got {got}. Write it as ")


def test_a_row_of_another_type_than_the_first_is_named_with_both_lines(tmp_path):
    path = write(tmp_path / "a.jsonl", {"messages": [USER]}, {"messages": [USER]}, {"messages": "hello"})
    assert message_of(path) == (
        f"{path}:3: 'messages' is a string here, 'hello', but a list at {path}:1. "
        "A column must be of one type in all rows of a file: change this row to the form of the others."
    )


def test_whole_and_broken_numbers_and_missing_values_go_together(tmp_path):
    path = write(
        tmp_path / "a.jsonl",
        {"text": "a", "score": 1, "tags": []},
        {"text": "b", "score": 1.5, "tags": ["x"]},
        {"text": "c"},
    )
    assert load_dataset_from(path)["score"][:] == [1.0, 1.5, None]
    assert load_dataset_from(path)["tags"][:] == [[], ["x"], None]


def test_other_files_that_cannot_be_read_are_named_with_the_line(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    assert (
        message_of(tmp_path / "a.jsonl")
        == f"{tmp_path}/a.jsonl:2: not UTF-8: byte 0xff at column 11. Save the file as UTF-8."
    )
    path = write(tmp_path / "b.csv", "prompt,completion", "a,b", "a,b,c")
    assert message_of(path).startswith(f"{path}:3: 3 fields where the header names 2 columns (prompt, completion): ")
    path = write(tmp_path / "c.csv", "prompt,prompt", "a,b")
    assert message_of(path).startswith(f"{path}:1: the first line must name the columns, each once")
    path = write(tmp_path / "d.json", '[{"text": "a"},', '{"text": }]')
    assert message_of(path).startswith(f"{path}:2: not valid JSON, Expecting value at column 10: ")
    path = write(tmp_path / "e.json", '["a"]')
    assert message_of(path).startswith(f"{path}: row 1 (from 1): a row must be a JSON object, got str 'a'")
    path = write(tmp_path / "f.yaml", "a")
    assert message_of(path).startswith(
        f"{path}: a dataset file ends in .jsonl, .json, .csv, .parquet, .txt, this one in '.yaml'"
    )


def test_the_line_survives_to_errors_of_tokenization(tmp_path):
    rows = [{"messages": [USER, ANSWER]} for _ in range(30)]
    rows[16] = {"messages": [{"role": "usr", "content": "hi"}, ANSWER]}
    path = write(tmp_path / "a.jsonl", *rows)
    dataset = load_dataset_from(path).shuffle(seed=1)
    with pytest.raises(DatasetError) as error:
        prepare_dataset(dataset, tiny_tokenizer(CHATML), PrepareOptions(max_length=64))
    assert str(error.value) == (
        f"{path}:17: message 0 of 'messages' has the role 'usr'. Accepted roles are system, developer, user, assistant, tool, function, ipython. Did you mean 'user'?"
    )


def test_a_folder_has_the_splits_its_files_are_named_for(tmp_path):
    write(tmp_path / "train-1.jsonl", {"text": "a"})
    write(tmp_path / "train-2.jsonl", {"text": "b"})
    write(tmp_path / "test.jsonl", {"text": "c"})
    assert available_splits(tmp_path) == ("train", "test")
    assert load_dataset_from(tmp_path)["text"][:] == ["a", "b"]
    assert load_dataset_from(tmp_path, "test")["text"][:] == ["c"]
    assert (
        message_of(tmp_path, split="validation")
        == f"{tmp_path}: there is no split 'validation'. It has 'train', 'test': choose one of these."
    )
    assert "a single file has only the split 'train'" in message_of(tmp_path / "test.jsonl", split="test")
    write(tmp_path / "train-2.jsonl", {"body": "b"})
    assert "have different columns: train-1.jsonl text; train-2.jsonl body" in message_of(tmp_path)
    (tmp_path / "empty").mkdir()
    assert "there is no dataset file in this folder" in message_of(tmp_path / "empty")


def test_a_folder_written_by_datasets_is_read(tmp_path):
    dataset = Dataset.from_dict({"text": ["a"]})
    dataset.save_to_disk(tmp_path / "one")
    DatasetDict(train=dataset, test=dataset).save_to_disk(tmp_path / "two")
    assert load_dataset_from(tmp_path / "one")["text"][:] == ["a"]
    assert load_dataset_from(tmp_path / "two", "test")["text"][:] == ["a"]
    assert available_splits(tmp_path / "one") == ("train",)
    assert available_splits(tmp_path / "two") == ("train", "test")
    assert "there is no split 'dev'" in message_of(tmp_path / "two", split="dev")


def test_a_hub_name_is_not_asked_for_offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = message_of("some-org/some-data")
    assert text.startswith(
        "some-org/some-data: there is no such file or folder here, and the Hugging Face Hub may not be asked (offline)."
    )
    assert "'python-docs', which is bundled" in text
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert "may not be asked" in message_of("some-org/some-data", online=False)


def test_a_hub_name_is_asked_for_where_that_is_wished(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "trellium.data.files.load_dataset", lambda *a, **k: asked.append((a, k)) or Dataset.from_dict({"text": ["a"]})
    )
    load_dataset_from("org/data", "test", config="en", online=True)
    assert asked == [(("org/data", "en"), {"split": "test", "streaming": False})]

    def refuse(*a, **k):
        raise ConnectionError("no route")

    monkeypatch.setattr("trellium.data.files.load_dataset", refuse)
    assert "did not give it as a dataset with the split 'train': ConnectionError: no route" in message_of(
        "org/data", online=True
    )


def test_a_split_of_the_bundled_dataset_that_is_not_there_is_refused():
    assert (
        message_of("python-docs", split="dev")
        == "python-docs: there is no split 'dev'. It has 'train', 'test': choose one of these."
    )
    assert available_splits("python-docs") == ("train", "test")


def test_odd_characters_and_indentation_survive(tmp_path):
    odd = "a\u2028b\u0085c"
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": odd}], ensure_ascii=False), encoding="utf-8")
    assert load_dataset_from(path)["text"][:] == [odd]
    path = tmp_path / "a.jsonl"
    path.write_text("\ufeff" + json.dumps({"text": odd}, ensure_ascii=False) + "\r\n", encoding="utf-8")
    assert load_dataset_from(path)["text"][:] == [odd]
    path = tmp_path / "a.txt"
    path.write_bytes(b"def f():\r\n    return 1\r\n")
    assert load_dataset_from(path)["text"][:] == ["def f():", "    return 1"]
    path = write(tmp_path / "a.csv", "text", "x" * 200_000)
    assert load_dataset_from(path)["text"][:] == ["x" * 200_000]


def test_reading_data_imports_neither_torch_nor_transformers():
    names = ", ".join(
        f"trellium.data.{name}"
        for name in ("cache", "files", "prepare", "python_docs", "rows", "templates", "tokenization")
    )
    code = f"import sys, {names}; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
