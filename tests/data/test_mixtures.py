"""Several datasets as one: how many rows each gives, which, and what cannot be mixed."""

from __future__ import annotations

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from trellium.data.mixtures import MixturePart, mix_datasets, rows_by_fraction
from trellium.data.rows import SOURCE_COLUMN
from trellium.errors import ConfigError, DatasetError


def part(letter, rows, fraction=None):
    return MixturePart(Dataset.from_dict({"text": [f"{letter}{i}" for i in range(rows)]}), fraction, f"{letter}.jsonl")


def test_without_fractions_every_row_is_taken_in_order():
    assert mix_datasets([part("a", 2), part("b", 1)])["text"][:] == ["a0", "a1", "b0"]


def test_the_shortest_for_its_share_gives_all_and_the_others_what_goes_with_it():
    mixed = mix_datasets([part("a", 10, 3), part("b", 2, 1), part("c", 5, 0)])
    assert mixed["text"][:] == ["a0", "a1", "a2", "a3", "a4", "a5", "b0", "b1"]


def test_a_seed_takes_any_rows_and_shuffles_them_the_same_way_each_time():
    parts = [part("a", 50, 0.5), part("b", 10, 0.5)]
    mixed = mix_datasets(parts, seed=3)["text"][:]
    assert mixed == mix_datasets(parts, seed=3)["text"][:] != mix_datasets(parts, seed=4)["text"][:]
    assert len(mixed) == len(set(mixed)) == 20
    assert sum(text.startswith("a") for text in mixed) == 10
    assert set(mixed) != set(mix_datasets(parts)["text"][:])
    assert mixed != sorted(mixed)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0.01, 1)), min_size=1, max_size=5))
def test_no_row_is_taken_twice_every_share_is_met_and_no_more_would_fit(parts):
    sizes, fractions = [(str(i), size) for i, (size, _) in enumerate(parts)], [fraction for _, fraction in parts]
    counts = rows_by_fraction(sizes, fractions)
    total = min(size * sum(fractions) / fraction for size, fraction in parts)
    for (size, fraction), count in zip(parts, counts, strict=True):
        assert 0 <= count <= size
        assert abs(count - total * fraction / sum(fractions)) <= 0.5 + 1e-6
    assert any(count == size for (size, _), count in zip(parts, counts, strict=True))


@pytest.mark.peers
def test_the_shares_are_those_of_trls_get_dataset(tmp_path):
    from trl import DatasetMixtureConfig, get_dataset
    from trl.scripts.utils import DatasetConfig

    parts = [part("a", 10, 0.3), part("b", 7, 0.5), part("c", 9, 0.1)]
    entries = []
    for each in parts:
        file = tmp_path / each.name
        each.dataset.to_json(file)
        entries.append(DatasetConfig(path="json", data_files=str(file), fraction=each.fraction))
    theirs = get_dataset(DatasetMixtureConfig(datasets=entries))["train"]
    assert mix_datasets(parts)["text"][:] == theirs["text"][:]


def test_where_rows_were_read_may_be_missing_from_some_parts():
    read = part("a", 1)
    read = MixturePart(read.dataset.add_column(SOURCE_COLUMN, ["a.jsonl:1"]), name="a.jsonl")
    assert mix_datasets([read, part("b", 1)])[SOURCE_COLUMN][:] == ["a.jsonl:1", None]


def test_streams_are_read_one_after_the_other():
    streams = [MixturePart(part(letter, 2).dataset.to_iterable_dataset()) for letter in "ab"]
    assert [row["text"] for row in mix_datasets(streams)] == ["a0", "a1", "b0", "b1"]
    with pytest.raises(ConfigError, match="a stream's length is not known"):
        mix_datasets(streams, seed=1)
    with pytest.raises(ConfigError, match="a stream's length is not known"):
        mix_datasets([*streams, part("c", 1)])


@pytest.mark.parametrize(
    ("parts", "error", "says"),
    [
        ([], ConfigError, "needs at least one dataset"),
        ([part("a", 1, 0.5), part("b", 1)], ConfigError, r"^b\.jsonl: has no fraction, but others"),
        ([part("a", 1, -1.0), part("b", 1, 1.0)], ConfigError, r"must be shares.* got -1\.0, 1\.0"),
        ([part("a", 1, 0.0)], ConfigError, "not all 0"),
        ([part("a", 1, float("nan"))], ConfigError, "got nan"),
        ([part("a", 0, 0.5), part("b", 1, 0.5)], DatasetError, r"^a\.jsonl: has no rows, but the fraction 0\.5"),
        ([part("a", 1), MixturePart(Dataset.from_dict({"body": ["b"]}), name="b")], DatasetError, r"^b: has the columns body, but a\.jsonl has text"),
        ([part("a", 1), MixturePart(Dataset.from_dict({"text": [1]}), name="b")], DatasetError, r"^b: 'text' is Value\('int64'\), but Value\('string'\) in a\.jsonl"),
    ],
)  # fmt: skip
def test_what_cannot_be_mixed_is_named_with_the_way_out(parts, error, says):
    with pytest.raises(error, match=says):
        mix_datasets(parts)
