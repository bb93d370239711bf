"""Rows to tokens and labels: where completions begin, where sequences end, what is trained."""

from __future__ import annotations

import logging

import pytest
from datasets import Dataset

from tests.tiny_tokenizer import CHATML, CHATML_MARKED, LLAMA3, QWEN3, tiny_tokenizer
from trellium.data.prepare import PrepareOptions, prepare_dataset, prepare_with_report
from trellium.errors import ConfigError, DatasetError

USER, ANSWER = {"role": "user", "content": "hi there"}, {"role": "assistant", "content": "hello"}


def prepared(rows, tokenizer, **options):
    return prepare_dataset(Dataset.from_list(rows), tokenizer, PrepareOptions(**{"max_length": None, **options}))


def trained_text(tokenizer, row):
    return tokenizer.decode([label for label in row["labels"] if label != -100])


def test_a_text_ends_with_one_end_of_sequence_token_whoever_wrote_it():
    for tokenizer in (tiny_tokenizer(), tiny_tokenizer(adds_eos=True), tiny_tokenizer(adds_bos=True, adds_eos=True)):
        for text in ("hello", "hello" + tokenizer.eos_token):
            row = prepared([{"text": text}], tokenizer)[0]
            assert row["input_ids"].count(tokenizer.eos_token_id) == 1
            assert row["input_ids"][-1] == tokenizer.eos_token_id
            assert row["labels"] == [-100, *row["input_ids"][1:]]


def test_a_beginning_that_the_text_brings_is_not_doubled():
    tokenizer = tiny_tokenizer(adds_bos=True)
    plain, brought = (prepared([{"text": text}], tokenizer)[0]["input_ids"] for text in ("hello", "<s>hello"))
    assert plain == brought
    assert plain[0] == tokenizer.bos_token_id


def test_a_named_end_takes_the_place_of_the_tokenizers_own():
    tokenizer = tiny_tokenizer()
    row = prepared([{"text": "hello"}], tokenizer, eos_token="<|im_end|>")[0]
    assert tokenizer.decode(row["input_ids"]) == "hello<|im_end|>"
    with pytest.raises(ConfigError, match="eos_token='<nope>' is not in the tokenizer's vocabulary"):
        prepared([{"text": "hello"}], tokenizer, eos_token="<nope>")
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match=r"no end-of-sequence token.*Name one with eos_token"):
        prepared([{"text": "hello"}], tokenizer)


@pytest.mark.parametrize("special", [{}, {"adds_bos": True}, {"adds_bos": True, "adds_eos": True}])
def test_of_prompt_and_completion_the_completion_with_its_end_is_trained(special):
    tokenizer = tiny_tokenizer(**special)
    row = {"prompt": "def function(self):", "completion": " return name"}
    [trained] = prepared([row], tokenizer)
    assert trained_text(tokenizer, trained) == " return name" + tokenizer.eos_token
    assert tokenizer.decode(trained["input_ids"], skip_special_tokens=True) == row["prompt"] + row["completion"]
    [everything] = prepared([row], tokenizer, completion_only_loss=False)
    assert everything["labels"] == [-100, *everything["input_ids"][1:]]


def test_a_token_merged_across_the_prompts_end_is_trained_and_counted_in_one_warning(caplog):
    tokenizer = tiny_tokenizer()
    rows = [
        {"prompt": "return the val", "completion": "ue of it"},
        {"prompt": "value ", "completion": "name"},
        {"prompt": "a:", "completion": " b"},
    ]
    assert (
        tokenizer("value name")["input_ids"][: len(tokenizer("value ")["input_ids"])]
        != tokenizer("value ")["input_ids"]
    )
    with caplog.at_level(logging.WARNING):
        dataset, report = prepare_with_report(
            Dataset.from_list(rows), tokenizer, PrepareOptions(max_length=None, name="mine")
        )
    assert report.merged_prompts == 2
    warnings = [record.getMessage() for record in caplog.records if "prefix" in record.getMessage()]
    assert len(warnings) == 1
    assert warnings[0].startswith("mine: in 2 of 3 rows the tokens of the prompt are not a prefix")
    assert trained_text(tokenizer, dataset[1]).strip() == "name" + tokenizer.eos_token


def test_a_conversation_is_what_its_template_writes_and_every_token_is_trained():
    tokenizer = tiny_tokenizer(CHATML)
    [row] = prepared([{"messages": [USER, ANSWER]}], tokenizer)
    assert (
        row["input_ids"] == tokenizer.apply_chat_template([USER, ANSWER], tokenize=True, return_dict=True)["input_ids"]
    )
    assert row["labels"] == [-100, *row["input_ids"][1:]]


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_assistant_only_loss_trains_the_answers_with_their_end_of_turn(template):
    tokenizer = tiny_tokenizer(template)
    [row] = prepared([{"messages": [USER, ANSWER, USER, ANSWER]}], tokenizer, assistant_only_loss=True)
    assert trained_text(tokenizer, row) == "hello<|im_end|>hello<|im_end|>"


def test_from_value_conversations_are_the_same_as_messages():
    tokenizer = tiny_tokenizer(CHATML)
    spoken = [{"from": "human", "value": "hi there"}, {"from": "gpt", "value": "hello"}]
    [row] = prepared([{"conversations": spoken}], tokenizer, assistant_only_loss=True)
    [same] = prepared([{"messages": [USER, ANSWER]}], tokenizer, assistant_only_loss=True)
    assert row == same


def test_a_conversational_completion_begins_after_the_generation_prompt():
    tokenizer = tiny_tokenizer(LLAMA3)
    [row] = prepared([{"prompt": [USER], "completion": [ANSWER]}], tokenizer)
    assert trained_text(tokenizer, row) == "hello<|eot_id|>"
    [row] = prepared([{"prompt": [USER, ANSWER, USER], "completion": [ANSWER, USER, ANSWER]}], tokenizer)
    assert trained_text(tokenizer, row).startswith("hello<|eot_id|><|start_header_id|>user")
    [row] = prepared(
        [{"prompt": [USER, ANSWER, USER], "completion": [ANSWER, USER, ANSWER]}], tokenizer, assistant_only_loss=True
    )
    assert trained_text(tokenizer, row) == "hello<|eot_id|>hello<|eot_id|>"


def test_a_rows_own_template_options_and_tools_are_used():
    tokenizer = tiny_tokenizer(QWEN3)
    rows = [
        {"prompt": [USER], "completion": [ANSWER], "chat_template_kwargs": {"enable_thinking": thinking}}
        for thinking in (True, False)
    ]
    thinks, answers = prepared(rows, tokenizer)
    assert trained_text(tokenizer, thinks) == "<think>\n\n</think>\n\nhello<|im_end|>\n"
    assert trained_text(tokenizer, answers) == "hello<|im_end|>\n"

    tokenizer = tiny_tokenizer("{% for tool in tools or [] %}{{ tool.name }};{% endfor %}" + CHATML)
    [row] = prepared([{"messages": [USER, ANSWER], "tools": '[{"name": "look"}]'}], tokenizer)
    assert tokenizer.decode(row["input_ids"]).startswith("look;<|im_start|>")


def test_a_row_of_tokens_is_trained_as_its_columns_say():
    tokenizer = tiny_tokenizer()
    ids = [20, 21, 22, 23]
    [row] = prepared([{"input_ids": ids}], tokenizer)
    assert row == {"input_ids": ids, "labels": [-100, 21, 22, 23]}
    [row] = prepared([{"input_ids": ids, "labels": [20, -100, 22, -100]}], tokenizer)
    assert row["labels"] == [-100, -100, 22, -100]
    masks = {"assistant_masks": [0, 1, 1, 0], "completion_mask": [0, 0, 1, 1]}
    [row] = prepared([{"input_ids": ids, **masks}], tokenizer)
    assert row["labels"] == [-100, -100, 22, -100]
    [row] = prepared([{"input_ids": ids, **masks}], tokenizer, completion_only_loss=False)
    assert row["labels"] == [-100, 21, 22, -100]
    with pytest.raises(
        DatasetError, match=r"train: row 0 \(from 0\): 'labels' has 99 at position 1, where 'input_ids' has 21"
    ):
        prepared([{"input_ids": ids, "labels": [20, 99, 22, 23]}], tokenizer)


def test_formatting_func_makes_the_text_of_a_row():
    tokenizer = tiny_tokenizer()
    rows = [{"question": "who", "answer": "me"}]
    [row] = prepared(rows, tokenizer, formatting_func=lambda row: f"Q {row['question']} A {row['answer']}")
    assert tokenizer.decode(row["input_ids"]) == "Q who A me<|endoftext|>"
    with pytest.raises(
        DatasetError, match=r"row 0 \(from 0\): formatting_func must return the row's text, a str, got list \['who'\]"
    ):
        prepared(rows, tokenizer, formatting_func=lambda row: [row["question"]])
    with pytest.raises(ConfigError, match="completion_only_loss=True cannot be with formatting_func"):
        prepared(rows, tokenizer, formatting_func=str, completion_only_loss=True)


def test_a_mask_that_leaves_the_end_of_turn_out_is_warned_of(caplog):
    marks = CHATML_MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    prepared([{"messages": [USER, ANSWER]}], tiny_tokenizer(marks), assistant_only_loss=True)
    assert "in 1 of 1 rows the assistant's last trained token is not a special token" in caplog.text
    assert "{% generation %}" in caplog.text
    caplog.clear()
    prepared([{"messages": [USER, ANSWER]}], tiny_tokenizer(CHATML), assistant_only_loss=True)
    assert "special token" not in caplog.text
