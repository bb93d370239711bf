"""What a row may be, and what is said of one that is not."""

from __future__ import annotations

import pytest

from trellium.data.formats import check_options, detect_format
from trellium.data.rows import (
    read_contents,
    read_messages,
    read_template_options,
    read_text,
    read_tokens,
    read_tools,
)
from trellium.errors import ConfigError, DatasetError

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("row", "kind", "conversational", "field"),
    [
        ({"text": "a"}, "text", False, "text"),
        ({"messages": [USER]}, "messages", True, "messages"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "messages", True, "conversations"),
        ({"prompt": "a", "completion": "b", "id": 1}, "prompt-completion", False, ""),
        ({"prompt": [USER], "completion": [USER], "tools": "[]"}, "prompt-completion", True, ""),
        ({"input_ids": [1], "labels": [1], "text": "a"}, "tokens", False, ""),
        ({"prompt": "a", "prompt_id": "b", "messages": [USER]}, "messages", True, "messages"),
    ],
)
def test_the_kind_is_known_from_columns_and_first_row(row, kind, conversational, field):
    found = detect_format(row, row)
    assert (found.kind, found.conversational, found.field) == (kind, conversational, field)
    assert set(found.columns) <= set(row)


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ({"a": 1, "b": 2}, ["'a', 'b'", "Accepted are", "rename_columns"]),
        ({"body": "a", "n": 1}, ["'body', 'n'", "dataset_text_field='body'"]),
        ({"chosen": "a", "rejected": "b"}, ["preference training"]),
        ({"prompt": "a"}, ["'completion' is missing", "dataset_text_field='prompt'"]),
        ({"text": "a", "messages": [USER]}, ["2 ways", "'messages' or 'text'", "remove_columns"]),
        ({"messages": [USER], "conversations": [USER]}, ["2 ways"]),
        ({"text": "a", "prompt": "a", "completion": "b"}, ["'prompt' with 'completion' or 'text'"]),
    ],
)
def test_columns_of_no_kind_or_of_two_are_refused_with_the_way_out(row, parts):
    with pytest.raises(DatasetError) as error:
        detect_format(row, row, name="train.jsonl")
    assert str(error.value).startswith("train.jsonl: ")
    for part in parts:
        assert part in str(error.value)


def test_from_value_messages_become_role_content_messages():
    value = [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    assert read_messages(value, "x:1", "conversations") == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]


def test_what_arrow_filled_in_is_left_out_of_messages_and_tools():
    calls = [{"function": {"name": "f", "arguments": {"a": 1, "b": None}}, "id": None}]
    messages = [{**USER, "tool_calls": None, "name": None}, {"role": "assistant", "content": None, "tool_calls": calls}]
    assert read_messages(messages, "x:1", "messages") == [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
    ]
    assert read_tools([{"name": "f", "x": None}], "x:1") == [{"name": "f"}]
    assert read_tools('[{"name": "f"}]', "x:1") == [{"name": "f"}]
    assert read_tools(None, "x:1") is None
    assert read_tools("", "x:1") is None
    assert read_template_options('{"enable_thinking": false}', "x:1") == {"enable_thinking": False}


def test_a_struct_of_lists_is_a_list_of_structs():
    assert read_messages({"role": ["user"], "content": ["hi"]}, "x:1", "messages") == [USER]


def test_blocks_of_text_are_joined():
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "image": None}]
    assert read_messages([{"role": "user", "content": blocks}], "x:1", "messages")[0]["content"] == "ab"


@pytest.mark.parametrize(
    ("messages", "parts"),
    [
        ("hello", ["'messages' must be a list of {'role', 'content'}, got str 'hello'", "'text' column"]),
        ('[{"role": "user"}]', ["got str", "json.loads"]),
        (None, ["got nothing"]),
        (3, ["got int 3"]),
        ([], ["empty list", "filter"]),
        (["hi"], ["message 0 of 'messages' must be {'role', 'content'}, got str 'hi'"]),
        ([USER, {"role": "asistant", "content": "a"}], ["message 1", "role 'asistant'", "system, developer, user, assistant", "Did you mean 'assistant'?"]),
        ([{"role": "martian", "content": "a"}], ["role 'martian'", "Rename it"]),
        ([{"role": 3, "content": "a"}], ["the role 3"]),
        ([{"content": "a"}], ["no 'role', only 'content'", "{'from', 'value'}"]),
        ([{"role": "user"}], ["message 0", "no 'content', only 'role'"]),
        ([{"role": "user", "content": {"a": 1}}], ["'content' that is dict", "json.dumps"]),
        ([{"role": "user", "content": [{"type": "image"}]}], ["content block {'type': 'image'}", "images"]),
    ],
)  # fmt: skip
def test_a_wrong_message_is_named_with_its_place_the_rule_and_the_way_out(messages, parts):
    with pytest.raises(DatasetError) as error:
        read_messages(messages, "rows.jsonl:17", "messages")
    assert str(error.value).startswith("rows.jsonl:17: ")
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("row", "conversational", "part"),
    [
        ({"prompt": "", "completion": "a"}, False, "'prompt' is an empty string"),
        ({"prompt": "a", "completion": None}, False, "'completion' is missing"),
        ({"prompt": [USER], "completion": []}, True, "'completion' is an empty list"),
        ({"prompt": [USER], "completion": "a"}, True, "All must be strings, or all lists"),
        ({"prompt": "a", "completion": "b"}, True, "in every row the same"),
        ({"prompt": 3, "completion": 4}, True, "'prompt' must be a list of {'role', 'content'}, got int 3"),
    ],
)
def test_a_wrong_prompt_or_completion_is_named(row, conversational, part):
    with pytest.raises(DatasetError, match=r"^r:2: ") as error:
        read_contents(row, "r:2", ("prompt", "completion"), conversational=conversational)
    assert part in str(error.value)


def test_a_wrong_text_is_named():
    with pytest.raises(DatasetError, match=r"^r:2: 'text' must be a string, got int 3\. .*'messages'"):
        read_text(3, "r:2", "text")
    with pytest.raises(DatasetError, match=r"^r:2: 'text' is missing"):
        read_text(None, "r:2", "text")


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ({"input_ids": "abc"}, "'input_ids' must be a list of integers, got str 'abc'"),
        ({"input_ids": [1, 2], "labels": [1]}, "'labels' has 1 entries and 'input_ids' 2"),
        ({"input_ids": [1, 2], "completion_mask": [0, 7]}, "must hold 0 and 1 only, got [0, 7]"),
        ({"input_ids": [1, 2], "labels": None}, "'labels' must be a list of integers, got nothing"),
    ],
)
def test_wrong_tokens_are_named(row, part):
    with pytest.raises(DatasetError, match=r"^r:2: ") as error:
        read_tokens(row, "r:2", row)
    assert part in str(error.value)


def test_wrong_tools_and_template_options_are_named():
    with pytest.raises(DatasetError, match=r"^r:2: 'tools' is a string that is not JSON"):
        read_tools("[{", "r:2")
    with pytest.raises(DatasetError, match=r"^r:2: 'tools' must be a list of JSON schemas"):
        read_tools({"a": 1}, "r:2")
    with pytest.raises(DatasetError, match=r"^r:2: 'chat_template_kwargs' must map names"):
        read_template_options([1], "r:2")
    with pytest.raises(DatasetError, match=r"'add_generation_prompt': these are set by the trainer"):
        read_template_options({"add_generation_prompt": True}, "r:2")


def test_completion_only_loss_is_automatic_where_completions_are_marked():
    def decided(row, **options):
        options = {"completion_only_loss": None, "assistant_only_loss": False, **options}
        return check_options(detect_format(row, row), name="train", **options)

    assert decided({"prompt": "a", "completion": "b"}) is True
    assert decided({"prompt": "a", "completion": "b"}, completion_only_loss=False) is False
    assert decided({"text": "a"}) is False
    assert decided({"input_ids": [1], "completion_mask": [1]}) is True
    with pytest.raises(ConfigError, match="'text' dataset, in which nothing marks the completion"):
        decided({"text": "a"}, completion_only_loss=True)
    with pytest.raises(ConfigError, match="without conversations"):
        decided({"prompt": "a", "completion": "b"}, assistant_only_loss=True)
