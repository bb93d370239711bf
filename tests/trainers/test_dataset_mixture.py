"""Mixtures under TRL's names, made in a script or read from a config file and flags."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from trellium import DatasetMixtureConfig, ScriptArguments, TrlParser, get_dataset
from trellium.data import files
from trellium.errors import ConfigError, DatasetError
from trellium.trainers.dataset_mixture import DatasetConfig


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A folder with `a.jsonl` and `b.jsonl` of 8 and 20 rows, and the same twice as the splits of a folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "splits").mkdir()
    for name, count in (("a", 8), ("b", 20), ("splits/train", 5), ("splits/test", 3)):
        rows = [{"text": f"{name} the quick brown fox {at}", "at": at} for at in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def mixed(*parts, **options) -> DatasetDict:
    return get_dataset(DatasetMixtureConfig(datasets=list(parts), **options))


def test_a_mixture_is_all_rows_of_each_in_order(here):
    rows = mixed("a.jsonl", {"path": "b.jsonl"}, DatasetConfig("splits", split="test"))
    assert list(rows) == ["train"]
    assert [text.split()[0] for text in rows["train"]["text"]] == ["a"] * 8 + ["b"] * 20 + ["splits/test"] * 3


def test_fractions_are_shares_of_the_largest_mixture_without_a_row_twice(here):
    rows = mixed({"path": "a.jsonl", "fraction": 2}, {"path": "b.jsonl", "fraction": 1})["train"]
    assert [text.split()[0] for text in rows["text"]] == ["a"] * 8 + ["b"] * 4


def test_the_rows_held_out_are_the_same_in_every_run_and_not_trained(here):
    first, second = mixed("a.jsonl", "b.jsonl", test_split_size=0.25), mixed("a.jsonl", "b.jsonl", test_split_size=0.25)
    assert first["test"]["text"] == second["test"]["text"]
    assert (len(first["train"]), len(first["test"])) == (21, 7)
    assert not set(first["train"]["text"]) & set(first["test"]["text"])
    assert len(mixed("a.jsonl", test_split_size=3)["test"]) == 3


@pytest.mark.parametrize(
    ("part", "count"),
    [
        ({"path": "json", "data_files": "a.jsonl"}, 8),
        ({"path": "json", "data_files": ["a.jsonl", "b.jsonl"]}, 28),
        ({"path": "json", "data_files": "*.jsonl"}, 28),
        ({"path": "json", "data_files": {"held": "b.jsonl"}, "split": "held"}, 20),
        ({"path": "json", "data_dir": "splits", "split": "test"}, 3),
        ({"path": "splits", "data_files": "tr*.jsonl"}, 5),
        ({"path": ".", "data_dir": "splits"}, 5),
        ({"path": "a.jsonl", "split": "train[:50%]"}, 4),
        ({"path": "splits", "split": "train[1:3]+test"}, 5),
        ({"path": "json", "data_files": {"held": "b.jsonl"}, "split": "held[-5:]"}, 5),
    ],
)
def test_files_are_chosen_as_load_dataset_chooses_them(here, part, count):
    assert len(mixed(part)["train"]) == count


def test_files_of_a_hub_dataset_are_asked_for_by_name(here, monkeypatch):
    asked = []

    def load_dataset(*names, **options):
        asked.append((names, options))
        return Dataset.from_list([{"text": "a"}])

    monkeypatch.setattr(files, "load_dataset", load_dataset)
    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    mixed({"path": "owner/name", "name": "en", "data_files": "x/*.jsonl", "data_dir": "d", "split": "train[:9]"})
    expected = {"split": "train[:9]", "streaming": False, "data_files": "x/*.jsonl", "data_dir": "d"}
    assert asked == [(("owner/name", "en"), expected)]


def test_a_file_can_be_read_as_a_stream(here):
    rows = files.load_dataset_from("a.jsonl", "train[:3]", streaming=True)
    assert isinstance(rows, IterableDataset)
    assert [row["at"] for row in rows] == [0, 1, 2]


def test_columns_are_chosen_and_rows_still_know_their_line(here):
    rows = mixed({"path": "a.jsonl", "columns": ["text"]}, {"path": "b.jsonl", "columns": ["text"]})["train"]
    assert set(rows.column_names) == {"text", "_source"}
    assert rows[9]["_source"].endswith("b.jsonl:2")


def test_a_mixture_can_be_read_as_a_stream(here):
    rows = mixed("a.jsonl", "b.jsonl", streaming=True)["train"]
    assert [row["text"].split()[0] for row in rows] == ["a"] * 8 + ["b"] * 20


BAD = {
    "no path": ([{"name": "x"}], {}, "needs a path"),
    "unknown key": ([{"pth": "a.jsonl"}], {}, "Did you mean 'path'"),
    "no mapping": ([3], {}, "a path or a mapping"),
    "format alone": (["json"], {}, "data_files or data_dir"),
    "one fraction": (["b.jsonl", {"path": "a.jsonl", "fraction": 0.5}], {}, "b.jsonl: has no fraction"),
    "fraction": ([{"path": "a.jsonl", "fraction": "half"}], {}, "fraction must be a number"),
    "columns": ([{"path": "a.jsonl", "columns": "text"}], {}, "columns must be a list"),
    "other columns": ([{"path": "a.jsonl", "columns": ["txt"]}], {}, "no column 'txt'"),
    "missing file": (["c.jsonl"], {}, "c.jsonl: no such file"),
    "no file fits": ([{"path": "json", "data_files": "c*.jsonl"}], {}, "no file fits"),
    "split of files": ([{"path": "json", "data_files": "a.jsonl", "split": "test"}], {}, "are 'train'"),
    "hub files offline": ([{"path": "owner/name", "data_files": "a.jsonl"}], {}, "may not be asked"),
    "files of a file": ([{"path": "a.jsonl", "data_files": "a.jsonl"}], {}, "this is a file"),
    "no part": ([{"path": "a.jsonl", "split": "train[:x]"}], {}, "is no part of its rows"),
    "held-out share": (["a.jsonl"], {"test_split_size": 1.5}, "test_split_size must be"),
    "all held out": (["a.jsonl"], {"test_split_size": 8}, "leaves none to train on"),
    "held out of a stream": (["a.jsonl"], {"test_split_size": 0.5, "streaming": True}, "exclude each other"),
    "nothing": ([], {}, "at least one dataset"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_mixture_that_cannot_be_is_told(here, case):
    parts, options, says = BAD[case]
    with pytest.raises((ConfigError, DatasetError), match=says):
        mixed(*parts, **options)


def test_a_script_reads_a_mixture_from_a_file_and_from_flags(here):
    (here / "c.yaml").write_text(
        "datasets:\n  - path: a.jsonl\n    fraction: 0.5\n    columns: [text]\n  - b.jsonl\ntest_split_size: 0.1\nstreaming: false\n"
    )
    parser = TrlParser((ScriptArguments, DatasetMixtureConfig))
    _, mixture = parser.parse_args_and_config(["--config", "c.yaml"])
    assert mixture.datasets == [DatasetConfig("a.jsonl", columns=["text"], fraction=0.5), DatasetConfig("b.jsonl")]
    assert mixture.test_split_size == 0.1
    _, mixture = parser.parse_args_and_config(["--datasets", "b.jsonl", '{"path": "a.jsonl", "fraction": 1}'])
    assert mixture.datasets == [DatasetConfig("b.jsonl"), DatasetConfig("a.jsonl", fraction=1)]
    with pytest.raises(ConfigError, match="Did you mean 'fraction'"):
        parser.parse_args_and_config(["--datasets", '{"path": "a.jsonl", "fractoin": 1}'])
