"""What a chat template writes of a message is read back as the message."""

from __future__ import annotations

import json

import pytest

from tests.tiny_tokenizer import CHATML, GEMMA, LLAMA3, MISTRAL, QWEN3, tiny_tokenizer
from trellium import add_response_schema, parse_response
from trellium.errors import ConfigError

HERMES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    '{% for call in m.tool_calls or [] %}\n<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA31 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
CODER = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>\n{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "a"},
                "days": {"type": "integer", "description": "b"},
                "exact": {"type": "boolean", "description": "c"},
            },
        },
    },
}
ASKED = [{"role": "user", "content": "hi"}]


def calling(*arguments):
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": one}} for one in arguments],
    }


def read(template, message, **options):
    """A message written by a template, and read back."""
    tokenizer = add_response_schema(tiny_tokenizer(template))
    whole = tokenizer.apply_chat_template([*ASKED, message], tokenize=False)
    prompt = tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    assert whole.startswith(prompt)
    prefix, ids = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (prompt, whole[len(prompt) :]))
    return parse_response(tokenizer, ids, prefix=prefix, **options)


@pytest.mark.parametrize("template", [CHATML, GEMMA, LLAMA3, MISTRAL, QWEN3, HERMES, LLAMA31, CODER])
def test_words_are_read_back(template):
    message = {"role": "assistant", "content": "Hello there. <Not> a [token]!"}
    assert {**read(template, message), "reasoning_content": ""} == {**message, "reasoning_content": ""}


@pytest.mark.parametrize("template", [HERMES, LLAMA31, CODER])
def test_calls_are_read_back_with_their_arguments_typed_by_the_tool(template):
    arguments = {"city": "75001", "days": 7, "exact": True}
    assert read(template, calling(arguments), tools=[TOOL]) == calling(arguments)
    as_text = {"city": "75001", "days": "7", "exact": "true"}
    assert read(template, calling(as_text), tools=[TOOL]) == calling(arguments)


@pytest.mark.parametrize("template", [HERMES, CODER])
def test_several_calls_are_read_back(template):
    message = calling({"city": "Paris", "days": 1}, {"city": "Rome\nand around", "days": 2})
    assert read(template, message, tools=[TOOL]) == message


def test_reasoning_that_the_prompt_opens_is_read_from_the_prompt():
    message = {"role": "assistant", "content": "So.", "reasoning_content": "Hm, hm."}
    assert read(CODER, message) == message


def test_a_function_of_python_types_arguments():
    def look(city: str, days: int):
        """Look.

        Args:
            city: Where.
            days: How long.
        """

    assert read(HERMES, calling({"city": "7", "days": "7"}), tools=[look]) == calling({"city": "7", "days": 7})


@pytest.mark.parametrize(
    "written",
    [
        '<tool_call>\n{"name": "look", "arg',
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        "<tool_call>\n[1]\n</tool_call>",
    ],
)
def test_what_cannot_be_read_is_its_text(written):
    tokenizer = add_response_schema(tiny_tokenizer(HERMES))
    ids = tokenizer(written + "<|im_end|>", add_special_tokens=False)["input_ids"]
    assert parse_response(tokenizer, ids) == {"role": "assistant", "content": written}


def test_a_call_without_arguments_has_none():
    tokenizer = add_response_schema(tiny_tokenizer(HERMES))
    ids = tokenizer('<tool_call>\n{"name": "look"}\n</tool_call><|im_end|>', add_special_tokens=False)["input_ids"]
    assert parse_response(tokenizer, ids)["tool_calls"][0]["function"] == {"name": "look", "arguments": {}}


def test_a_template_that_a_tokenizer_brings_is_kept_and_saved_with_it(tmp_path):
    tokenizer = tiny_tokenizer(CHATML)
    tokenizer.response_template = {"mine": 1}
    assert add_response_schema(tokenizer).response_template == {"mine": 1}
    add_response_schema(fresh := tiny_tokenizer(CHATML)).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert saved["response_template"] == fresh.response_template


def test_what_writes_calls_in_a_way_of_its_own_is_refused_with_the_way_out():
    strange = HERMES.replace("<tool_call>", "<<call>>").replace("</tool_call>", "<<end>>")
    with pytest.raises(ConfigError, match="Set the tokenizer's response_template"):
        add_response_schema(tiny_tokenizer(strange))
    with pytest.raises(ConfigError, match="add_response_schema"):
        parse_response(tiny_tokenizer(CHATML), [1])
