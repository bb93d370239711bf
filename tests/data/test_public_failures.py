"""Failures that users of TRL and of other trainers reported of their data: each named by its issue, and what happens here."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset

from tests.tiny_tokenizer import CHATML, CHATML_MARKED, LLAMA3, tiny_tokenizer
from trellium.data.files import load_dataset_from
from trellium.data.preferences import PreferenceOptions, prepare_preferences, prepare_preferences_with_report
from trellium.data.prepare import PrepareOptions, prepare_dataset, prepare_with_report
from trellium.data.report import Fate
from trellium.data.unpaired import UnpairedOptions, prepare_unpaired
from trellium.errors import DatasetError

USER = {"role": "user", "content": "hi there"}
GOOD, BAD = {"role": "assistant", "content": "hello you"}, {"role": "assistant", "content": "what"}


def supervised(rows, tokenizer, **options):
    return list(prepare_dataset(Dataset.from_list(rows), tokenizer, PrepareOptions(**{"max_length": None, **options})))


def pairs(rows, tokenizer, **options):
    options = PreferenceOptions(**{"max_length": None, **options})
    return list(prepare_preferences(Dataset.from_list(rows), tokenizer, options))


def answers(rows, tokenizer, **options):
    options = UnpairedOptions(**{"max_length": None, **options})
    return list(prepare_unpaired(Dataset.from_list(rows), tokenizer, options))


def sequences_of_every_kind(row, tokenizer):
    """What is made of a prompt and a completion by each way there is."""
    pair = {"prompt": row["prompt"], "chosen": row["completion"], "rejected": row["completion"]}
    [sft] = supervised([row], tokenizer)
    [dpo] = pairs([pair], tokenizer)
    [reward] = pairs([pair], tokenizer, whole_sequences=True)
    [kto] = answers([{**row, "label": True}], tokenizer)
    return {
        "sft": sft["input_ids"],
        "dpo": dpo["prompt_ids"] + dpo["chosen_ids"],
        "reward": reward["rejected_ids"],
        "kto": kto["prompt_ids"] + kto["completion_ids"],
    }


def learned(tokenizer, row):
    return tokenizer.decode([label for label in row["labels"] if label != -100])


def test_all_labels_masked_is_an_error_not_a_run_that_learns_nothing():
    """TRL 4879 and 5471: with a stock template `assistant_only_loss` masked everything. Here its turns are found; where no token is left to train, it is said."""
    row = {"messages": [USER, GOOD]}
    for template in (CHATML, CHATML_MARKED):
        [made] = supervised([row], tiny_tokenizer(template), assistant_only_loss=True)
        assert learned(tiny_tokenizer(template), made) == "hello you<|im_end|>"
    with pytest.raises(DatasetError, match="no row has a token to train: 1 row with every token masked"):
        supervised([{"messages": [USER]}], tiny_tokenizer(CHATML), assistant_only_loss=True)


@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
def test_a_turn_that_is_cut_is_trained_as_far_as_it_survives(mode):
    """TRL 2538 and 1271: what a truncation leaves. Every target of the whole row that survives is a target, and nothing else is."""
    tokenizer = tiny_tokenizer(CHATML)
    long = {"role": "assistant", "content": "the quick brown fox jumps over the lazy dog"}
    for row, options in (
        ({"messages": [USER, long, USER, long]}, {"assistant_only_loss": True}),
        ({"prompt": [USER], "completion": [long]}, {}),
    ):
        [whole] = supervised([row], tokenizer, **options)
        total = len(whole["input_ids"])
        for max_length in range(2, total):
            kept = slice(0, max_length) if mode == "keep_start" else slice(total - max_length, total)
            expected = whole["labels"][kept]
            expected[0] = -100
            if set(expected) == {-100}:
                continue
            [made] = supervised([row], tokenizer, max_length=max_length, truncation_mode=mode, **options)
            assert made == {"input_ids": whole["input_ids"][kept], "labels": expected}


def test_a_completion_that_is_cut_away_is_left_out_and_counted():
    """TRL 5662, 3382 and 6548: a completion of no tokens made the loss NaN. In pairs one that loses either completion is left out as a whole."""
    tokenizer = tiny_tokenizer()
    long, short = "the quick brown fox jumps over the lazy dog", "hi"
    rows = [{"prompt": prompt, "chosen": " yes", "rejected": " no"} for prompt in (long, short)]
    for options in ({}, {"truncation_mode": "keep_end"}):
        made, report = prepare_preferences_with_report(
            Dataset.from_list(rows), tokenizer, PreferenceOptions(max_length=8, **options)
        )
        assert all(row["chosen_ids"] and row["rejected_ids"] for row in made)
        assert (len(made), report.dropped) == ((2, {}) if options else (1, {Fate.TRUNCATED_AWAY: 1}))
    assert len(answers(rows, tokenizer, max_length=8)) == 2
    assert (
        len(supervised([{"prompt": row["prompt"], "completion": " yes"} for row in rows], tokenizer, max_length=8)) == 1
    )


@pytest.mark.parametrize("special", [{}, {"adds_bos": True}, {"adds_bos": True, "adds_eos": True}])
@pytest.mark.parametrize("brought", [False, True])
def test_the_end_is_there_once_and_trained_though_padding_has_the_same_token(special, brought):
    """TRL 1623, 931, 2059 and 3083: the model never stopped, because the end was missing or masked as padding. Labels are made by place, before there
    is any padding; and a text that brings its own end, or a tokenizer that adds one, does not make two."""
    tokenizer = tiny_tokenizer(**special)
    tokenizer.pad_token = tokenizer.eos_token
    end = tokenizer.eos_token if brought else ""
    row = {"prompt": "def f(self):", "completion": " return name" + end}
    for kind, ids in sequences_of_every_kind(row, tokenizer).items():
        assert ids.count(tokenizer.eos_token_id) == 1, kind
        assert ids[-1] == tokenizer.eos_token_id, kind
    [text], [completion] = supervised([{"text": "hello" + end}], tokenizer), supervised([row], tokenizer)
    assert text["labels"][-1] == completion["labels"][-1] == tokenizer.eos_token_id


def test_a_template_that_writes_no_end_of_turn_is_warned_of(caplog):
    """TRL 3083, of conversations: with nothing that ends the answer the model cannot learn to stop."""
    silent = CHATML.replace("<|im_end|>", "")
    for row in ({"messages": [USER, GOOD]}, {"prompt": [USER], "completion": [GOOD]}):
        caplog.clear()
        supervised([row], tiny_tokenizer(CHATML))
        assert "end its turn" not in caplog.text
        supervised([row], tiny_tokenizer(silent))
        assert "in 1 of 1 rows the assistant's last trained token is not a special token" in caplog.text
    caplog.clear()
    supervised([{"messages": [USER]}], tiny_tokenizer(silent))
    assert "end its turn" not in caplog.text


def test_the_beginning_is_there_once_whoever_writes_it():
    """TRL 1400 and 3328: the template writes `<s>` and the tokenizer wrote it again."""
    tokenizer = tiny_tokenizer(adds_bos=True)
    tokenizer.chat_template = LLAMA3.replace("{{ bos_token }}", "<s>")
    spoken = {"prompt": [USER], "completion": [GOOD]}
    for row in (
        spoken,
        {"prompt": "def f(self):", "completion": " a"},
        {"prompt": "<s>def f(self):", "completion": " a"},
    ):
        for kind, ids in sequences_of_every_kind(row, tokenizer).items():
            assert ids[0] == tokenizer.bos_token_id, kind
            assert ids.count(tokenizer.bos_token_id) == 1, kind


def test_a_completion_begins_after_the_generation_prompt_in_every_kind():
    """TRL 4147: the header of the assistant's turn was taken for the completion."""
    tokenizer = tiny_tokenizer(CHATML)
    [sft] = supervised([{"prompt": [USER], "completion": [GOOD]}], tokenizer)
    [dpo] = pairs([{"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}], tokenizer)
    [kto] = answers([{"prompt": [USER], "completion": [GOOD], "label": True}], tokenizer)
    assert learned(tokenizer, sft) == "hello you<|im_end|>\n"
    assert tokenizer.decode(dpo["chosen_ids"]) == tokenizer.decode(kto["completion_ids"]) == "hello you<|im_end|>\n"
    assert tokenizer.decode(dpo["prompt_ids"]).endswith("<|im_start|>assistant\n")


def test_labels_are_made_in_one_place_so_all_masks_agree():
    """TRL 3927 and 6025: masks of several makers disagreed. What was prepared, or was given as masks, is prepared to the same labels again."""
    tokenizer = tiny_tokenizer(CHATML)
    for row, options in (
        ({"prompt": [USER], "completion": [GOOD]}, {}),
        ({"messages": [USER, GOOD, USER, BAD]}, {"assistant_only_loss": True}),
    ):
        [made] = supervised([row], tokenizer, **options)
        masks = [int(label != -100) for label in made["labels"]]
        assert supervised([made], tokenizer) == [made]
        for name in ("assistant_masks", "completion_mask"):
            assert supervised([{"input_ids": made["input_ids"], name: masks}], tokenizer) == [made]


def test_columns_that_a_trainer_computed_stay_with_their_rows():
    """TRL 2423: precomputed log-probabilities were dropped as unused columns."""
    rows = [{"prompt": "a", "chosen": " b", "rejected": " c", "ref_chosen_logps": -1.0, "ref_rejected_logps": -2.0}]
    [made] = pairs(rows, tiny_tokenizer(), keep_columns=("ref_chosen_logps", "ref_rejected_logps"))
    assert (made["ref_chosen_logps"], made["ref_rejected_logps"]) == (-1.0, -2.0)


MIXED = [
    {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "margin": None, "note": None},
    {"prompt": [USER], "chosen": [{**GOOD, "name": None}], "rejected": [BAD], "margin": 1, "tools": None},
    {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "margin": 0.5, "late": {"a": [1, "b"]}, "note": "x"},
    {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "tools": [{"name": "f"}], "chat_template_kwargs": {"a": 1}},
]


def test_a_file_of_mixed_rows_with_windows_line_ends_and_a_mark_is_read_as_it_is_meant(tmp_path):
    """datasets 7222, 7092 and 7169: late columns, columns that are null at first, rows that differ inside; with CRLF, blank lines and a byte order mark."""
    file = tmp_path / "pairs.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + b"\r\n\r\n".join(json.dumps(row).encode() for row in MIXED) + b"\r\n")
    tokenizer = tiny_tokenizer(CHATML)
    made = list(prepare_preferences(load_dataset_from(file), tokenizer, PreferenceOptions(max_length=None)))
    assert made == pairs([{"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}] * 4, tokenizer)
    with pytest.raises(DatasetError, match=r"pairs\.jsonl:1: 'margin' must be a finite number, got nothing"):
        prepare_preferences(
            load_dataset_from(file), tokenizer, PreferenceOptions(max_length=None, keep_columns=("margin",))
        )


def test_the_same_rows_in_a_dataset_whose_structs_arrow_filled_in_are_the_same():
    """TRL 5118: Arrow gives every struct the fields of all, so tools and messages came with `None` where nothing was said."""
    tokenizer = tiny_tokenizer("{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + CHATML)
    rows = [
        {"messages": [{**USER, "name": "a"}, GOOD], "tools": [{"name": "f", "x": 1}]},
        {"messages": [USER, GOOD], "tools": [{"name": "f", "y": {"z": 2}}]},
    ]
    together, alone = supervised(rows, tokenizer), [supervised([row], tokenizer)[0] for row in rows]
    assert together == alone
    assert "null" not in tokenizer.decode(together[0]["input_ids"])


def test_what_is_lost_is_told(caplog):
    """TRL 5697 and 2538: rows were cut and dropped in silence. One line says how many, of which the first is named, and by how much."""
    rows = [{"text": "the quick brown fox jumps over the lazy dog"}, {"text": "hi"}, {"text": ""}]
    _, report = prepare_with_report(Dataset.from_list(rows), tiny_tokenizer(), PrepareOptions(max_length=8))
    assert (
        f"1 row truncated by {report.tokens_cut} tokens in all; dropped 1 row with fewer than two tokens" in caplog.text
    )
