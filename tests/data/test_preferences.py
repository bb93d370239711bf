"""Pairs to tokens: what is cut, what is left out, what is refused, and that their way is every dataset's."""

from __future__ import annotations

import logging

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny_tokenizer import CHATML, GEMMA, tiny_tokenizer
from trellium.data.branches import Branches
from trellium.data.files import load_dataset_from
from trellium.data.pipeline import EncodeRows
from trellium.data.preferences import PreferenceOptions, prepare_preferences, prepare_preferences_with_report
from trellium.data.report import Fate
from trellium.data.rows import common_prefix_length
from trellium.data.token_checks import TokenLimits
from trellium.errors import ConfigError, DatasetError

USER = {"role": "user", "content": "hi there"}
GOOD, BAD = {"role": "assistant", "content": "hello"}, {"role": "assistant", "content": "what"}


def prepared(rows, tokenizer=None, **options):
    options = PreferenceOptions(**{"max_length": None, **options})
    return list(prepare_preferences(Dataset.from_list(rows), tokenizer or tiny_tokenizer(), options))


def texts(tokenizer, row):
    return {column: tokenizer.decode(ids) for column, ids in row.items()}


@pytest.mark.parametrize("special", [{}, {"adds_bos": True}, {"adds_bos": True, "adds_eos": True}])
def test_each_completion_of_a_text_ends_with_one_end_of_sequence_token(special):
    tokenizer = tiny_tokenizer(**special)
    end, begin = tokenizer.eos_token, tokenizer.bos_token or ""
    rows = [
        {"prompt": "def f(self):", "chosen": " return", "rejected": " raise" + end},
        {"chosen": "the quick fox", "rejected": "the quick dog" + end},
    ]
    explicit, implicit = (
        texts(tokenizer, row) for row in [*prepared(rows[:1], tokenizer), *prepared(rows[1:], tokenizer)]
    )
    assert explicit == {
        "prompt_ids": begin + "def f(self):",
        "chosen_ids": " return" + end,
        "rejected_ids": " raise" + end,
    }
    assert implicit == {"prompt_ids": begin + "the quick", "chosen_ids": " fox" + end, "rejected_ids": " dog" + end}


def test_a_text_prompt_beside_whole_conversations_is_not_read_twice():
    tokenizer = tiny_tokenizer(CHATML)
    whole = {"chosen": [USER, GOOD], "rejected": [USER, BAD]}
    assert prepared([{"prompt": "hi there", **whole}], tokenizer) == prepared([whole], tokenizer)
    sides = [{"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}]
    assert prepared([whole], tokenizer) == prepared(sides, tokenizer)
    assert prepared([whole], tokenizer, whole_sequences=True) == prepared(sides, tokenizer, whole_sequences=True)


def test_from_value_pairs_are_the_same_as_messages():
    spoken = {
        side: [{"from": "human", "value": "hi there"}, {"from": "gpt", "value": answer["content"]}]
        for side, answer in (("chosen", GOOD), ("rejected", BAD))
    }
    tokenizer = tiny_tokenizer(CHATML)
    assert prepared([spoken], tokenizer) == prepared([{"chosen": [USER, GOOD], "rejected": [USER, BAD]}], tokenizer)


def test_longer_pairs_are_cut_at_the_asked_end_and_counted(caplog):
    rows = [
        {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5, 6], "rejected_ids": [7]},
        {"prompt_ids": [1, 2, 3, 4, 5], "chosen_ids": [6], "rejected_ids": [7]},
        {"prompt_ids": [1], "chosen_ids": [], "rejected_ids": [7]},
        {"prompt_ids": [], "chosen_ids": [3], "rejected_ids": [7, 8]},
        {"prompt_ids": [], "chosen_ids": [3, 4], "rejected_ids": [7, 8]},
    ]
    with caplog.at_level(logging.INFO):
        kept, report = prepare_preferences_with_report(
            Dataset.from_list(rows), tiny_tokenizer(), PreferenceOptions(max_length=5)
        )
    assert list(kept) == [{"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5], "rejected_ids": [7]}, rows[4]]
    assert report.dropped == {Fate.TRUNCATED_AWAY: 1, Fate.NO_COMPLETION: 1, Fate.TOO_SHORT: 1}
    assert (report.rows, report.kept, report.tokens, report.trained_tokens, report.longest) == (5, 2, 13, 5, 5)
    assert (report.truncated, report.tokens_cut) == (2, 1 + 2)
    assert "dropped 1 row with all trained tokens beyond max_length (e.g. train: row 1 (from 0))" in caplog.text

    ends = prepared(rows[:2], max_length=5, truncation_mode="keep_end")
    assert ends[0] == {"prompt_ids": [2, 3], "chosen_ids": [4, 5, 6], "rejected_ids": [7]}
    assert ends[1] == {"prompt_ids": [2, 3, 4, 5], "chosen_ids": [6], "rejected_ids": [7]}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 9), max_size=6),
    st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=3),
    st.integers(2, 8),
    st.sampled_from(["keep_start", "keep_end"]),
)
def test_what_is_cut_is_a_slice_of_each_sequence_with_one_prompt(prompt, completions, max_length, mode):
    whole = Branches(prompt, tuple(completions))
    left = whole.cut(max_length, mode)
    assert left.longest <= max_length
    assert left.longest == min(max_length, whole.longest)
    for before, after in zip(whole.sequences, left.sequences, strict=True):
        assert after == (before[:max_length] if mode == "keep_start" else before[len(before) - len(after) :])
    assert left.cut(max_length, mode) == left


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 1), max_size=9), st.lists(st.integers(0, 1), max_size=9))
def test_the_common_prefix_is_the_one_counted_item_by_item(a, b):
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_prefix_length(a, b) == common_prefix_length(tuple(a), tuple(b)) == expected


def test_whole_sequences_that_are_longer_are_left_out_not_cut():
    rows = [
        {"chosen_ids": [1, 2, 3], "rejected_ids": [1, 4], "margin": 1},
        {"chosen_ids": [1, 2, 3, 4], "rejected_ids": [1], "margin": 2},
    ]
    options = PreferenceOptions(max_length=3, whole_sequences=True, keep_columns=("margin", "other"))
    kept, report = prepare_preferences_with_report(Dataset.from_list(rows), tiny_tokenizer(), options)
    assert list(kept) == [{"chosen_ids": [1, 2, 3], "rejected_ids": [1, 4], "margin": 1.0}]
    assert report.dropped == {Fate.TOO_LONG: 1}
    assert report.line() == (
        "train: 1 of 2 rows, 5 tokens; dropped 1 row with more tokens than max_length (e.g. train: row 1 (from 0))."
    )
    with pytest.raises(DatasetError, match=r"no row has a token to train: 1 row with more tokens.*: raise max_length"):
        prepared(rows[1:], max_length=3, whole_sequences=True)


def test_columns_of_numbers_stay_beside_their_rows():
    pair = {"prompt": "a", "chosen": " b", "rejected": " c"}
    rows = [{**pair, "prompt": "a " * 40}, {**pair, "ref_chosen_logps": -1.5}, {**pair, "ref_chosen_logps": -2.25}]
    rows[0]["ref_chosen_logps"] = 0.0
    kept = prepared(rows, max_length=8, keep_columns=("ref_chosen_logps", "margin"))
    assert [row["ref_chosen_logps"] for row in kept] == [-1.5, -2.25]
    assert set(kept[0]) == {"prompt_ids", "chosen_ids", "rejected_ids", "ref_chosen_logps"}
    rows[1]["ref_chosen_logps"] = None
    with pytest.raises(
        DatasetError, match=r"^train: row 1 \(from 0\): 'ref_chosen_logps' must be a finite number, got nothing"
    ):
        prepared(rows, keep_columns=("ref_chosen_logps",))


WRONG = {
    "no pair": ({"prompt": "a", "completion": "b", "label": True}, r"Accepted are: 'chosen' and 'rejected'.*rows of KTO"),
    "half a pair": ({"prompt": "a", "chosen": "b"}, "'rejected' is missing: add it"),
    "tokens without a prompt": ({"chosen_ids": [1], "rejected_ids": [2]}, "'prompt_ids' is missing"),
    "no answer": ({"prompt": "a", "chosen": "b", "rejected": None}, r"row 0 \(from 0\): 'rejected' is missing"),
    "two forms": ({"prompt": "a", "chosen": "b", "rejected": [GOOD]}, "All must be strings, or all lists"),
    "no common start": ({"chosen": [USER, GOOD], "rejected": [GOOD]}, "do not begin with the same message"),
    "an empty answer": ({"prompt": [USER], "chosen": [], "rejected": [BAD]}, "'chosen' is an empty list"),
    "tokens that are none": ({"prompt_ids": [1], "chosen_ids": "b", "rejected_ids": [2]}, "'chosen_ids' must be a list of integers"),
    "a token too large": ({"prompt_ids": [1], "chosen_ids": [500], "rejected_ids": [2]}, "holds the token 500"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_pair_is_named_with_its_line_and_the_way_out(case):
    row, says = WRONG[case]
    dataset = Dataset.from_list([row])
    options = PreferenceOptions(max_length=None, limits=TokenLimits(vocabulary_size=500))
    with pytest.raises(DatasetError, match=rf"^train: .*{says}"):
        prepare_preferences(dataset, tiny_tokenizer(CHATML), options)


def test_a_wrong_pair_of_a_file_is_named_with_its_line(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n\n{"prompt": "a", "chosen": "b"}\n')
    with pytest.raises(DatasetError, match=r"pairs\.jsonl:3: 'rejected' is missing"):
        prepare_preferences(load_dataset_from(file), tiny_tokenizer(), PreferenceOptions(max_length=8))


def test_options_that_cannot_be_together_are_refused():
    with pytest.raises(ConfigError, match="truncation_mode='middle' is not one of"):
        PreferenceOptions(max_length=4, truncation_mode="middle")
    with pytest.raises(ConfigError, match="cannot be with whole_sequences"):
        PreferenceOptions(max_length=4, truncation_mode="keep_end", whole_sequences=True)
    with pytest.raises(ConfigError, match="max_length=1"):
        PreferenceOptions(max_length=1)


def test_a_template_that_refuses_a_pair_is_quoted_with_the_row():
    rows = [{"prompt": [USER], "chosen": [GOOD], "rejected": [USER]}]
    with pytest.raises(
        DatasetError, match=r"^train: row 0 \(from 0\): .*refuses this conversation \(roles user, user\)"
    ):
        prepared(rows, tiny_tokenizer(GEMMA))


def test_pairs_are_encoded_once_and_found_again(tmp_path, monkeypatch):
    rows = [{"prompt": "a", "chosen": f" {i}", "rejected": " c"} for i in range(20)]
    Dataset.from_list(rows).save_to_disk(tmp_path / "rows")
    calls = []
    encode = EncodeRows.__call__
    monkeypatch.setattr(
        EncodeRows, "__call__", lambda self, batch, indices: (calls.append(1), encode(self, batch, indices))[1]
    )

    def once(**options):
        dataset = Dataset.load_from_disk(tmp_path / "rows")
        return prepare_preferences_with_report(dataset, tiny_tokenizer(), PreferenceOptions(max_length=8, **options))

    first, report = once()
    made = len(calls)
    again, same_report = once()
    assert (made, len(calls)) == (1, 1)
    assert (again._fingerprint, same_report) == (first._fingerprint, report)
    once(whole_sequences=True)
    assert len(calls) == 2


@pytest.mark.parametrize("whole", [False, True])
def test_processes_and_streams_give_the_pairs_of_one(whole):
    rows = [{"prompt": "a" if i % 3 else "a " * 20, "chosen": f" {i}", "rejected": " c", "margin": i} for i in range(7)]
    dataset = Dataset.from_list(rows)

    def made(dataset, **options):
        options = PreferenceOptions(max_length=12, whole_sequences=whole, keep_columns=("margin",), **options)
        return list(prepare_preferences(dataset, tiny_tokenizer(), options))

    one = made(dataset)
    assert len(one) == 4
    assert made(dataset, num_proc=2) == made(dataset.to_iterable_dataset()) == one


def test_what_is_prepared_is_prepared_no_further():
    options = PreferenceOptions(max_length=6)
    rows = Dataset.from_list([{"prompt": "a b", "chosen": " the quick fox", "rejected": " c"}])
    once = prepare_preferences(rows, tiny_tokenizer(), options)
    assert list(prepare_preferences(once, tiny_tokenizer(), options)) == list(once)
