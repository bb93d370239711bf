"""Judged answers to tokens, with a completion to each that answers another prompt."""

from __future__ import annotations

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny_tokenizer import CHATML, tiny_tokenizer
from trellium.data.report import Fate
from trellium.data.unpaired import PairWithOther, UnpairedOptions, prepare_unpaired, prepare_unpaired_with_report
from trellium.errors import DatasetError

USER = {"role": "user", "content": "hi there"}
GOOD, BAD = {"role": "assistant", "content": "hello"}, {"role": "assistant", "content": "what"}


def prepared(rows, tokenizer=None, **options):
    options = UnpairedOptions(**{"max_length": None, **options})
    return list(prepare_unpaired(Dataset.from_list(rows), tokenizer or tiny_tokenizer(), options))


def judged(prompt, completion, label=True):
    return {"prompt_ids": prompt, "completion_ids": completion, "label": label}


def test_each_answer_has_the_completion_of_the_next_and_the_last_that_of_the_first():
    tokenizer = tiny_tokenizer()
    rows = [{"prompt": f"{word} ", "completion": word * 2, "label": word != "b"} for word in "abc"]
    made = prepared(rows, tokenizer)
    assert [row["kl_completion_ids"] for row in made] == [made[i]["completion_ids"] for i in (1, 2, 0)]
    assert [row["label"] for row in made] == [True, False, True]
    assert tokenizer.decode(made[1]["completion_ids"]).strip() == "bb" + tokenizer.eos_token
    [alone] = prepared(rows[:1], tokenizer)
    assert alone["kl_completion_ids"] == alone["completion_ids"]


def test_a_mismatched_completion_is_cut_to_the_room_of_the_prompt_it_goes_with():
    rows = [judged([1], [2, 3, 4, 5, 6]), judged([1, 2, 3], [4, 5, 6, 7, 8, 9], False)]
    short, long = prepared(rows, max_length=5)
    assert (short["completion_ids"], short["kl_completion_ids"]) == ([2, 3, 4, 5], [4, 5, 6, 7])
    assert (long["completion_ids"], long["kl_completion_ids"]) == ([4, 5], [2, 3])


def test_answers_left_out_are_counted_and_are_no_ones_mismatch():
    rows = [judged([1], [2]), judged([1, 2, 3, 4], [5]), judged([6], []), judged([7], [8, 9])]
    kept, report = prepare_unpaired_with_report(
        Dataset.from_list(rows), tiny_tokenizer(), UnpairedOptions(max_length=4)
    )
    assert [row["kl_completion_ids"] for row in kept] == [[8, 9], [2]]
    assert report.dropped == {Fate.TRUNCATED_AWAY: 1, Fate.NO_COMPLETION: 1}
    assert (report.tokens, report.trained_tokens, report.longest) == (5, 3, 3)


def test_pairs_are_two_answers_and_keep_their_numbers():
    rows = [
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "score": 1.0},
        {"prompt": [USER, GOOD, USER], "chosen": [GOOD], "rejected": [BAD], "score": 2.0},
    ]
    tokenizer = tiny_tokenizer(CHATML)
    made = prepared(rows, tokenizer, keep_columns=("score",))
    assert [(row["label"], row["score"]) for row in made] == [(True, 1.0), (True, 2.0), (False, 1.0), (False, 2.0)]
    assert list(made[0]) == ["prompt_ids", "completion_ids", "label", "score", "kl_completion_ids"]
    alone = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for side in ("chosen", "rejected")
        for row in rows
    ]
    assert [{key: row[key] for key in row if key != "score"} for row in made] == prepared(alone, tokenizer)


def test_a_pair_left_out_is_named_by_its_own_row():
    rows = [{"prompt": "a", "chosen": " b", "rejected": " c"}, {"prompt": "a " * 20, "chosen": " b", "rejected": " c"}]
    _, report = prepare_unpaired_with_report(Dataset.from_list(rows), tiny_tokenizer(), UnpairedOptions(max_length=8))
    assert report.examples[Fate.TRUNCATED_AWAY] == ("train: row 1 (from 0)", "train: row 1 (from 0)")
    assert (report.rows, report.kept) == (4, 2)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "a", "completion": "b"}, "Of the first 'label' is missing"),
        ({"prompt": "a", "completion": "b", "label": "good"}, "row 0 .*'label' must be true for a desirable completion .* got str 'good'"),
        ({"prompt": "a", "completion": "b", "label": 2}, "got int 2"),
        ({"prompt": "a", "completion": None, "label": True}, "'completion' is missing"),
        ({"prompt_ids": [1], "completion_ids": [2], "label": None}, "got nothing"),
    ],
)  # fmt: skip
def test_a_wrong_answer_is_named(row, says):
    with pytest.raises(DatasetError, match=rf"^train: .*{says}"):
        prepared([row])


def test_labels_of_0_and_1_are_truth_values():
    made = prepared([{**judged([1], [2]), "label": label} for label in (0, 1)])
    assert [row["label"] for row in made] == [False, True]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=7), st.integers(1, 4), st.sampled_from([None, 3]))
def test_in_batches_of_any_size_the_mismatch_is_the_next_of_all_rows(sizes, batch_size, max_length):
    rows = [judged([0] * (1 + at % 2), list(range(at, at + size))) for at, size in enumerate(sizes)]
    dataset = Dataset.from_list(rows)
    pair = PairWithOther(max_length, 1, dataset)
    made = []
    for start in range(0, len(rows), batch_size):
        made += pair(dataset[start : start + batch_size], list(range(len(rows)))[start : start + batch_size])[
            "kl_completion_ids"
        ]
    rooms = [None if max_length is None else max_length - len(row["prompt_ids"]) for row in rows]
    assert made == [rows[(at + 1) % len(rows)]["completion_ids"][:room] for at, room in enumerate(rooms)]


def test_rows_that_are_trained_together_have_each_others_completions():
    rows = [judged([0], [at]) for at in range(1, 1008)]
    for together in (2, 3, 5):
        expected = []
        for start in range(0, len(rows), together):
            group = [row["completion_ids"] for row in rows[start : start + together]]
            expected += [group[-1], *group[:-1]] if len(group) > 1 else [rows[0]["completion_ids"]]
        options = UnpairedOptions(max_length=None, together=together)
        assert [row["kl_completion_ids"] for row in prepared(rows, together=together)] == expected
        stream = list(prepare_unpaired(Dataset.from_list(rows).to_iterable_dataset(), tiny_tokenizer(), options))
        alone = len(rows) % together == 1  # in a stream what came before is not known any more
        assert [row["kl_completion_ids"] for row in stream][: len(rows) - alone] == expected[: len(rows) - alone]


def test_a_stream_and_processes_give_the_same_answers():
    rows = Dataset.from_list(
        [{"prompt": "a" if i % 3 else "a " * 20, "chosen": f" {i} and so on", "rejected": " c"} for i in range(7)]
    )
    options = UnpairedOptions(max_length=12)
    one = list(prepare_unpaired(rows, tiny_tokenizer(), options))
    assert len(one) == 8
    assert list(prepare_unpaired(rows.to_iterable_dataset(), tiny_tokenizer(), options)) == one
    parts = list(prepare_unpaired(rows, tiny_tokenizer(), UnpairedOptions(max_length=12, num_proc=2)))
    # Each process has batches of its own, so the chosen and the rejected ones alternate otherwise.
    strip = [sorted(str({**row, "kl_completion_ids": 0}) for row in made) for made in (one, parts)]
    assert strip[0] == strip[1]


def test_the_mismatches_are_found_again_and_differ_where_the_rows_do(tmp_path):
    rows = [judged([1], [2, 3]), judged([4], [5]), judged([6], [7, 8, 9], False)]
    Dataset.from_list(rows).save_to_disk(tmp_path / "rows")
    first, again = (
        prepare_unpaired(Dataset.load_from_disk(tmp_path / "rows"), tiny_tokenizer(), UnpairedOptions(max_length=8))
        for _ in range(2)
    )
    other = prepare_unpaired(
        Dataset.load_from_disk(tmp_path / "rows").select([2, 0]), tiny_tokenizer(), UnpairedOptions(max_length=8)
    )
    assert first.cache_files == again.cache_files != other.cache_files
    assert [row["kl_completion_ids"] for row in other] == [[2, 3], [7, 8, 9]]
