"""Any chat template can be given the marks by which transformers knows what the assistant wrote, and writes what it did."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny_tokenizer import CHATML, CHATML_MARKED, GEMMA, LLAMA3, MISTRAL, QWEN3, tiny_tokenizer
from trellium import get_training_chat_template
from trellium.data.templates import ChatTemplate
from trellium.errors import ConfigError

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL, "qwen3": QWEN3}
ASSEMBLED = (
    "{% for m in messages %}{% set text = '[' + m['role'] + ']\n' + m['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.first %}{% set text = bos_token + text %}{% endif %}{{ text }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\n' }}{% endif %}"
)
"""A turn is assembled in a variable, which gets a beginning, and is written at once: as the first Llama 3's."""
HIDING = (
    "{% for m in messages %}{{ ['<|im_start|>', m.role, '\n', m.content, '<|im_end|>'] | join }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = st.text("ab c<|>\n", min_size=1, max_size=8).map(lambda text: f"x{text}y")


def marked_parts(tokenizer, template, messages):
    """The rendering, and what of its tokens the marks say the assistant wrote."""
    encoded = tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return encoded["input_ids"], encoded["assistant_masks"]


@pytest.mark.parametrize("name", TEMPLATES)
@given(contents=st.lists(WORDS, min_size=2, max_size=6).filter(lambda contents: len(contents) % 2 == 0))
@settings(max_examples=20, deadline=None)
def test_a_marked_template_writes_the_same_and_marks_what_the_assistant_wrote(name, contents):
    tokenizer = tiny_tokenizer(TEMPLATES[name])
    marked = get_training_chat_template(tokenizer)
    messages = [{"role": ("user", "assistant")[turn % 2], "content": content} for turn, content in enumerate(contents)]
    plain = ChatTemplate(tokenizer)
    text = plain.render(messages, where="row")
    assert tokenizer.apply_chat_template(messages, chat_template=marked, tokenize=False) == text
    ids, mask = marked_parts(tokenizer, marked, messages)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    spans = plain.assistant_spans(messages, text, where="row")
    inside = [any(a < end and b > start for start, end in spans) for a, b in encoded["offset_mapping"]]
    assert ids == encoded["input_ids"]
    assert mask == [int(one) for one in inside]


def test_a_turn_assembled_in_a_variable_is_taken_apart():
    tokenizer = tiny_tokenizer(ASSEMBLED)
    tokenizer.bos_token = "<s>"
    marked = get_training_chat_template(tokenizer)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "hello"}] * 2
    ids, mask = marked_parts(tokenizer, marked, messages)
    said = tokenizer.decode([token for token, inside in zip(ids, mask, strict=True) if inside])
    assert said == "hello<|eot_id|>" * 2
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tokenize=False)


def test_a_template_with_marks_is_left_as_it_is():
    assert get_training_chat_template(tiny_tokenizer(CHATML_MARKED)) is None


def test_the_marks_are_read_by_the_preparation_of_rows():
    tokenizer = tiny_tokenizer(CHATML)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"}]
    plain = ChatTemplate(tokenizer)
    text = plain.render(messages, where="row")
    ((start, end),) = plain.assistant_spans(messages, text, where="row")
    tokenizer.chat_template = get_training_chat_template(tokenizer)
    assert ChatTemplate(tokenizer).is_marked()
    ids, mask = ChatTemplate(tokenizer).encode_marked(messages, where="row")
    assert tokenizer.decode([token for token, inside in zip(ids, mask, strict=True) if inside]) == text[start:end]


def test_a_template_that_writes_a_turn_in_one_expression_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match="assistant_only_loss needs no marks here"):
        get_training_chat_template(tiny_tokenizer(HIDING))
    with pytest.raises(ConfigError, match="no chat template"):
        get_training_chat_template(tiny_tokenizer())
