"""The assistant's tokens, derived from any chat template, are those that a hand-written account of the template gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tiny_tokenizer import CHATML, CHATML_MARKED, GEMMA, LLAMA3, MISTRAL, QWEN3, tiny_tokenizer
from trellium.data.templates import ChatTemplate, has_generation_marks, tokens_in_spans, tokens_in_spans_by_prefix
from trellium.errors import ConfigError, DatasetError

# The plainest account of each template: its pieces in order, each with whether the assistant must learn it.


def chatml_pieces(messages):
    if messages[0]["role"] != "system":
        yield "<|im_start|>system\nYou are helpful.<|im_end|>\n", False
    for message in messages:
        yield f"<|im_start|>{message['role']}\n", False
        yield f"{message['content']}<|im_end|>", message["role"] == "assistant"
        yield "\n", False


def llama3_pieces(messages):
    yield "<|begin_of_text|>", False
    for message in messages:
        yield f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n", False
        yield f"{message['content'].strip()}<|eot_id|>", message["role"] == "assistant"


def gemma_pieces(messages):
    yield "<bos>", False
    for message in messages:
        yield f"<start_of_turn>{message['role'].replace('assistant', 'model')}\n", False
        yield f"{message['content'].strip()}<end_of_turn>", message["role"] == "assistant"
        yield "\n", False


def mistral_pieces(messages):
    yield "<s>", False
    system = "".join(m["content"] + "\n\n" for m in messages if m["role"] == "system")
    last = max(i for i, m in enumerate(messages) if m["role"] == "user")
    for message in messages:
        # The template tells the last question by equality, so an equal earlier one counts as the last too.
        first = system if message == messages[last] else ""
        if message["role"] == "user":
            yield f"[INST] {first}{message['content']} [/INST]", False
        elif message["role"] == "assistant":
            yield f" {message['content']}</s>", True


def qwen3_pieces(messages):
    last = max(i for i, m in enumerate(messages) if m["role"] == "user")
    for i, message in enumerate(messages):
        yield f"<|im_start|>{message['role']}\n", False
        thought, _, answer = (
            message["content"].rpartition("</think>")
            if message["role"] == "assistant"
            else ("", "", message["content"])
        )
        if message["role"] == "assistant":
            answer = answer.lstrip("\n")
            if i > last:
                answer = f"<think>\n{thought.split('<think>')[-1].strip(chr(10))}\n</think>\n\n{answer}"
        yield f"{answer}<|im_end|>", message["role"] == "assistant"
        yield "\n", False


FAMILIES = {
    "chatml": (CHATML, chatml_pieces),
    "llama3": (LLAMA3, llama3_pieces),
    "gemma": (GEMMA, gemma_pieces),
    "mistral": (MISTRAL, mistral_pieces),
    "qwen3": (QWEN3, qwen3_pieces),
}


def by_hand(tokenizer, pieces):
    """Tokens and mask: a token is learned if one of its characters is."""
    pieces = list(pieces)
    text = "".join(piece for piece, _ in pieces)
    learned = [is_learned for piece, is_learned in pieces for _ in piece]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return text, encoded["input_ids"], [any(learned[start:end]) for start, end in encoded["offset_mapping"]]


def derived(tokenizer, messages, **options):
    chat = ChatTemplate(tokenizer)
    text = chat.render(messages, where="row 1", options=options)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    spans = chat.assistant_spans(messages, text, where="row 1", options=options)
    return text, encoded["input_ids"], tokens_in_spans(encoded["offset_mapping"], spans).tolist(), spans


CONTENT = st.text(st.sampled_from("ab \n<>|é😀."), max_size=8) | st.sampled_from(
    ["assistant", "<think>\nwhy\n</think>\n\nyes", "  spaced  ", "model\n", " [/INST]", "user\nhello", ""]
)


@st.composite
def conversations(draw, family):
    turns = draw(st.integers(1, 4))
    messages = []
    if family != "gemma" and draw(st.booleans()):
        messages.append({"role": "system", "content": draw(CONTENT)})
    for _ in range(turns):
        messages.append({"role": "user", "content": draw(CONTENT)})
        messages.append({"role": "assistant", "content": draw(CONTENT)})
    if draw(st.booleans()):
        messages.append({"role": "user", "content": draw(CONTENT)})
    return messages


@pytest.mark.parametrize("family", FAMILIES)
def test_the_mask_of_random_conversations_is_the_one_by_hand(family):
    template, pieces = FAMILIES[family]
    tokenizer = tiny_tokenizer(template)

    @settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
    @given(conversations(family))
    def check(messages):
        text, ids, mask = by_hand(tokenizer, pieces(messages))
        got_text, got_ids, got_mask, _ = derived(tokenizer, messages)
        assert got_text == text
        assert got_ids == ids
        assert got_mask == mask

    check()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_turn_is_learned_up_to_its_end_of_turn_token_and_no_further(family):
    template, _ = FAMILIES[family]
    tokenizer = tiny_tokenizer(template)
    messages = [
        {"role": "user", "content": "hello there"},
        {"role": "assistant", "content": "I am fine"},
        {"role": "user", "content": "and you?"},
        {"role": "assistant", "content": "me too"},
    ]
    text, _, _, spans = derived(tokenizer, messages)
    learned = [text[start:end] for start, end in spans]
    assert len(learned) == 2
    for words, answer in zip(learned, ("I am fine", "me too"), strict=True):
        assert words.endswith(answer + tokenizer.eos_token)
    assert learned[0].lstrip() == "I am fine" + tokenizer.eos_token


def test_the_derived_mask_is_transformers_own_for_a_template_with_marks():
    marked, stock = tiny_tokenizer(CHATML_MARKED), tiny_tokenizer(CHATML)

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(conversations("chatml"))
    def check(messages):
        theirs = marked.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        _, ids, mask, _ = derived(stock, messages)
        assert ids == theirs["input_ids"]
        assert mask == [bool(m) for m in theirs["assistant_masks"]]
        own_ids, own_mask = ChatTemplate(marked).encode_marked(messages, where="row 1")
        assert own_ids == ids
        assert own_mask.tolist() == mask

    check()
    assert has_generation_marks(CHATML_MARKED)
    assert not has_generation_marks(CHATML)


def test_what_the_generation_prompt_gives_is_not_learned():
    tokenizer = tiny_tokenizer(QWEN3)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}] * 2
    text, _, _, spans = derived(tokenizer, messages)
    assert [text[a:b] for a, b in spans] == ["yes<|im_end|>", "<think>\n\n</think>\n\nyes<|im_end|>"]
    text, _, _, spans = derived(tokenizer, messages, enable_thinking=False)
    assert [text[a:b] for a, b in spans] == ["yes<|im_end|>", "yes<|im_end|>"]


def test_calls_of_tools_are_learned_and_their_results_are_not():
    template = (
        "{% for tool in tools or [] %}{{ tool.name }} {% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.name }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "look"}]},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "It rains."},
    ]
    text, _, _, spans = derived(tiny_tokenizer(template), messages)
    assert [text[a:b] for a, b in spans] == ["<call>look</call><|im_end|>", "It rains.<|im_end|>"]


def test_an_end_token_that_only_the_last_turn_has_is_learned_there():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if loop.last and m.role == 'assistant' %}<|endoftext|>{% else %}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2
    text, _, _, spans = derived(tiny_tokenizer(template), messages)
    assert [text[a:b] for a, b in spans] == ["b", "b<|endoftext|>"]


def test_a_conversation_may_begin_with_the_assistant():
    template = "{{ messages[0].role }}!" + CHATML
    text, _, _, spans = derived(tiny_tokenizer(template), [{"role": "assistant", "content": "hello"}])
    assert [text[a:b] for a, b in spans] == ["hello<|im_end|>"]


def test_a_template_that_hides_the_place_is_an_error_with_the_row():
    template = "{{ messages | length }}{% for m in messages %}{{ m.content | upper | reverse }}{% endfor %}"
    with pytest.raises(
        DatasetError,
        match=r"^row 1: cannot tell which part of message 1, 'b', .*\{% generation %\}.*assistant_only_loss=False",
    ):
        derived(tiny_tokenizer(template), [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])


def test_a_template_that_refuses_a_row_is_quoted_with_the_row():
    chat = ChatTemplate(tiny_tokenizer(GEMMA))
    with pytest.raises(
        DatasetError,
        match=r"^rows\.jsonl:3: .*refuses this conversation \(roles system, user\): System role not supported\. .*chat_template_path",
    ):
        chat.render([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], where="rows.jsonl:3")


def test_a_tokenizer_without_a_template_is_an_error_with_the_way_out():
    with pytest.raises(
        ConfigError, match=r"^train holds conversations, but the tokenizer .* no chat template.*chat_template_path"
    ):
        ChatTemplate(tiny_tokenizer(), name="train")


def test_a_tokenizer_that_hides_its_offsets_gives_the_same_mask():
    tokenizer = tiny_tokenizer(CHATML)
    messages = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "I am fine"}] * 2
    text, ids, mask, spans = derived(tokenizer, messages)
    assert tokens_in_spans_by_prefix(tokenizer, text, ids, spans).tolist() == mask


def test_a_token_across_a_border_is_inside_and_one_without_width_is_where_it_stands():
    offsets = [(0, 2), (2, 4), (4, 4), (4, 6), (6, 8)]
    assert tokens_in_spans(offsets, [(3, 5)]).tolist() == [False, True, True, True, False]
    assert tokens_in_spans(offsets, []).tolist() == [False] * 5
    assert tokens_in_spans([], [(0, 1)]).dtype == np.bool_


def test_a_call_of_a_tool_in_a_turn_that_is_written_differently_when_last_is_found():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ '\n' if m.content }}<call>{{ c.function.name }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look"}}]},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "It rains."},
    ]
    text, _, _, spans = derived(tiny_tokenizer(template), messages)
    assert [text[a:b] for a, b in spans] == [
        "<call>look</call><|im_end|>",
        "<think>\n\n</think>\n\nIt rains.<|im_end|>",
    ]


def test_a_template_that_passes_over_strings_is_given_blocks_of_text():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% for block in m.content %}{% if block.type == 'text' %}{{ block.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]
    text, _, _, spans = derived(tiny_tokenizer(template), messages)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nthere<|im_end|>\n"
    assert [text[a:b] for a, b in spans] == ["there<|im_end|>"]
