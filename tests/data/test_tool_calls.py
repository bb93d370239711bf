"""The arguments of tool calls: objects, with values of the types that the tool's schema names, in the form that the template writes."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset

from tests.tiny_tokenizer import CHATML, tiny_tokenizer
from trellium.data.preferences import PreferenceOptions, prepare_preferences
from trellium.data.prepare import PrepareOptions, prepare_dataset
from trellium.data.rows import read_contents, read_messages
from trellium.data.tool_calls import type_calls, typed
from trellium.errors import DatasetError

USER = {"role": "user", "content": "weather?"}
WITH_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL {{ c.function.name }} ARGUMENTS{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
AS_OBJECT = WITH_CALLS.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")
AS_TEXT = WITH_CALLS.replace("ARGUMENTS", "{{ '' + c.function.arguments }}")
AS_SHOWN = WITH_CALLS.replace("ARGUMENTS", "{{ c.function.arguments }}")


def tool(name="look", **properties):
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def calling(arguments, name="look"):
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def written(template, row):
    tokenizer = tiny_tokenizer(template)
    [made] = prepare_dataset(Dataset.from_list([row]), tokenizer, PrepareOptions(max_length=None))
    text = tokenizer.decode(made["input_ids"])
    return text[text.index("CALL look ") + len("CALL look ") :].split("<|im_end|>")[0]


@pytest.mark.parametrize("template", [AS_OBJECT, AS_TEXT, AS_SHOWN], ids=["object", "text", "shown"])
@pytest.mark.parametrize("encode", [lambda arguments: arguments, json.dumps], ids=["an object", "JSON"])
def test_arguments_in_either_form_are_written_once_as_json_by_any_template(template, encode):
    """Axolotl's pull request 3136 and oumi's 2599: a template that dumps an object writes a JSON string with its quotes escaped, silently; one that
    concatenates refuses an object. Datasets hold both."""
    row = {
        "messages": [USER, calling(encode({"city": "Paris", "days": "7"}))],
        "tools": [tool(days={"type": "integer"})],
    }
    assert json.loads(written(template, row)) == {"city": "Paris", "days": 7}


def test_a_template_that_does_not_write_calls_is_refused_where_a_message_calls():
    tokenizer = tiny_tokenizer(CHATML)
    options = PrepareOptions(max_length=None)
    silent = Dataset.from_list([{"messages": [USER, calling({"a": 1})]}])
    with pytest.raises(
        DatasetError, match=r"^train: row 0 \(from 0\): a message calls a tool, but .*chat_template_path"
    ):
        prepare_dataset(silent, tokenizer, options)
    for calls in ([], None):
        rows = Dataset.from_list([{"messages": [USER, {"role": "assistant", "content": "hello", "tool_calls": calls}]}])
        assert len(prepare_dataset(rows, tokenizer, options)) == 1


def test_arguments_are_typed_in_pairs_too():
    tokenizer = tiny_tokenizer(AS_OBJECT)
    row = {"prompt": [USER], "chosen": [calling({"days": "7"})], "rejected": [calling({"days": "x"})]}
    row["tools"] = json.dumps([tool(days={"type": "integer"})])
    [made] = prepare_preferences(Dataset.from_list([row]), tokenizer, PreferenceOptions(max_length=None))
    assert tokenizer.decode(made["chosen_ids"]) == 'CALL look {"days": 7}<|im_end|>\n'
    assert tokenizer.decode(made["rejected_ids"]) == 'CALL look {"days": "x"}<|im_end|>\n'


INTEGER, NUMBER, TRUTH, TEXT = ({"type": name} for name in ("integer", "number", "boolean", "string"))


@pytest.mark.parametrize(
    ("value", "schema", "expected"),
    [
        ("7", INTEGER, 7),
        ("-3", INTEGER, -3),
        ("7.0", INTEGER, 7),
        ("7.5", INTEGER, "7.5"),
        ("seven", INTEGER, "seven"),
        ("true", INTEGER, "true"),
        ("7.5", NUMBER, 7.5),
        ("7", NUMBER, 7),
        ("NaN", NUMBER, "NaN"),
        ("true", TRUTH, True),
        ("False", TRUTH, False),
        ("1", TRUTH, "1"),
        ("7", TEXT, "7"),
        (7, TEXT, 7),
        (7, INTEGER, 7),
        ("[1, 2]", {"type": "array"}, [1, 2]),
        ('["1", "2"]', {"type": "array", "items": INTEGER}, [1, 2]),
        ('{"a": "1"}', {"type": "object", "properties": {"a": INTEGER}}, {"a": 1}),
        ({"a": "1", "b": "1"}, {"type": "object", "properties": {"a": INTEGER}}, {"a": 1, "b": "1"}),
        ("7", {"type": ["integer", "null"]}, 7),
        ("null", {"type": ["integer", "null"]}, None),
        ("7", {"type": ["integer", "string"]}, "7"),
        ("7", {"anyOf": [{"type": "null"}, INTEGER]}, 7),
        ({"a": "7"}, {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Box"}]}, {"a": 7}),
        ("7", {"$ref": "#/$defs/Loop"}, "7"),
        ("7", {"$ref": "#/$defs/None"}, "7"),
        ("7", {"enum": ["7"]}, "7"),
        ("7", {"type": {"odd": 1}}, "7"),
        ("7", None, "7"),
    ],
)
def test_a_value_becomes_what_its_schema_says_if_it_is_that(value, schema, expected):
    root = {"$defs": {"Box": {"type": "object", "properties": {"a": INTEGER}}, "Loop": {"$ref": "#/$defs/Loop"}}}
    got = typed(value, schema, root)
    assert got == expected
    assert type(got) is type(expected)


def test_calls_of_unknown_tools_and_calls_without_a_schema_stay():
    messages = [USER, calling({"a": "7"}, "other")]
    assert type_calls(messages, [tool(a=INTEGER)]) == messages
    assert type_calls(messages, None) is messages
    assert type_calls(messages, [{"name": "other", "parameters": {"properties": {"a": INTEGER}}}]) == [
        USER,
        calling({"a": 7}, "other"),
    ]


def test_nulls_that_a_string_of_json_holds_are_kept_and_those_of_arrow_are_not():
    [message] = read_messages([calling('{"a": null}')], "x:1", "messages")
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": None}
    [message] = read_messages([calling({"a": None, "b": 1})], "x:1", "messages")
    assert message["tool_calls"][0]["function"]["arguments"] == {"b": 1}
    [message] = read_messages([calling("")], "x:1", "messages")
    assert message["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("arguments", ["city: Paris", "[1]", 3, [1]])
def test_arguments_that_are_no_object_are_named(arguments):
    with pytest.raises(
        DatasetError, match=r"^x:1: message 0 of 'messages' calls 'look' with 'arguments' that are \w+ .*JSON string"
    ):
        read_contents({"messages": [calling(arguments)]}, "x:1", ("messages",), conversational=True)
