"""What TRL 1.16 makes of a dataset, we make of it: tokens and labels of its trainer, and the masks of the templates it brings."""

from __future__ import annotations

import copy
import re

import pytest
from datasets import Dataset

from tests.data.stock_templates import stock_tokenizers
from tests.tiny_tokenizer import CHATML, CHATML_MARKED, tiny_tokenizer
from trellium import add_response_schema, get_training_chat_template, parse_response
from trellium.data.prepare import PrepareOptions, prepare_dataset
from trellium.data.responses import _written
from trellium.data.rows import read_contents
from trellium.data.template_marks import WEATHER
from trellium.data.templates import ChatTemplate, tokens_in_spans
from trellium.errors import ConfigError, DatasetError

pytestmark = pytest.mark.peers

USER, ANSWER = {"role": "user", "content": "hi there"}, {"role": "assistant", "content": "hello"}
ROWS = {
    "text": [{"text": "hello there, how are you " * 10}, {"text": "short"}],
    "prompt-completion": [
        {"prompt": "def function(self):", "completion": " return name"},
        {"prompt": "value", "completion": " of it"},
    ],
    "messages": [{"messages": [USER, ANSWER, USER, ANSWER]}, {"messages": [USER, ANSWER]}],
    "conversational prompt-completion": [
        {"prompt": [USER], "completion": [ANSWER]},
        {"prompt": [USER, ANSWER], "completion": [ANSWER]},
    ],
    "tokens": [{"input_ids": [20, 21, 22, 23], "assistant_masks": [0, 1, 1, 0]}],
}


@pytest.mark.parametrize("max_length", [None, 40])
@pytest.mark.parametrize("kind", ROWS)
def test_tokens_and_labels_are_those_of_trls_trainer(kind, max_length, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    tokenizer = tiny_tokenizer(CHATML)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
    )
    config = SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", max_length=max_length)
    theirs = SFTTrainer(
        model, config, train_dataset=Dataset.from_list(ROWS[kind]), processing_class=tokenizer
    ).train_dataset
    ours = prepare_dataset(Dataset.from_list(ROWS[kind]), tokenizer, PrepareOptions(max_length=max_length))
    assert len(ours) == len(theirs)
    for mine, their in zip(ours, theirs, strict=True):
        assert mine["input_ids"] == list(their["input_ids"])
        # The first token is predicted by nothing; TRL leaves its label standing and never reads it.
        assert mine["labels"][1:] == list(their["labels"])[1:]


def test_an_assistants_mask_is_trls_but_for_the_line_break_after_the_end_of_turn(tmp_path):
    rows = [{"messages": [USER, ANSWER, USER, ANSWER]}]
    tokenizer = tiny_tokenizer(CHATML_MARKED)
    theirs = tokenizer.apply_chat_template(
        rows[0]["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    [ours] = prepare_dataset(
        Dataset.from_list(rows), tiny_tokenizer(CHATML), PrepareOptions(max_length=None, assistant_only_loss=True)
    )
    assert [int(label != -100) for label in ours["labels"]] == theirs["assistant_masks"]


def test_of_the_stock_templates_that_trl_brings_every_assistants_turn_is_found():
    """With the template as it is; of those for which TRL has a second, marked one, every turn lies within what that marks."""
    messages = [
        {"role": "user", "content": "hello there"},
        {"role": "assistant", "content": "I am fine"},
        {"role": "user", "content": "and you?"},
        {"role": "assistant", "content": "very well"},
    ]
    compared = found = 0
    for path, tokenizer in stock_tokenizers():
        chat = ChatTemplate(tokenizer)
        text = chat.render(messages, where=path.stem)
        spans = chat.assistant_spans(messages, text, where=path.stem)
        turns = [text[start:end] for start, end in spans]
        assert ["I am fine" in turns[0], "very well" in turns[1]] == [True, True], path.stem
        assert not any(question in turn for turn in turns for question in ("hello", "you?")), path.stem
        found += 1

        marked = path.with_name(f"{path.stem}_training.jinja")
        if not marked.exists():
            continue
        theirs = tokenizer.apply_chat_template(
            chat.as_wanted(messages, path.stem),
            chat_template=marked.read_text(),
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        if theirs["input_ids"] == encoded["input_ids"]:
            mine = tokens_in_spans(encoded["offset_mapping"], spans)
            assert all(their for m, their in zip(mine, theirs["assistant_masks"], strict=True) if m), path.stem
            compared += 1
    assert found >= 35
    assert compared >= 20


def test_of_the_stock_templates_those_that_write_calls_of_tools_write_json_arguments_as_arguments():
    """And the others refuse the row, because they would write a turn that says nothing."""
    call = {"type": "function", "function": {"name": "look", "arguments": '{"city": "Paris", "days": "7"}'}}
    properties = {"city": {"type": "string", "description": "a"}, "days": {"type": "integer", "description": "b"}}
    parameters = {"type": "object", "properties": properties, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "look", "description": "c", "parameters": parameters}}
    row = {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}], "tools": [tool]}
    written = []
    for path, tokenizer in stock_tokenizers():
        (messages,), asked = read_contents(row, path.stem, ("messages",), conversational=True)
        chat = ChatTemplate(tokenizer)
        if "tool_calls" not in path.read_text():
            with pytest.raises(DatasetError, match="does not write calls"):
                chat.render(messages, **asked)
            continue
        if (
            path.stem == "deepseek_r1_distill"
        ):  # writes calls of a message without content only, of which transformers makes another
            continue
        text = chat.render(messages, **asked)
        said = text.split(USER["content"])[-1]
        assert re.search(r"look\W.*city.*Paris.*days.*7", said, re.DOTALL), path.stem
        assert '\\"' not in said, path.stem
        assert not re.search("""['"]7['"]""", said), path.stem
        written.append(path.stem)
    assert len(written) >= 27
    assert {"qwen3", "deepseekv3", "llama3_1", "gptoss", "gemma4", "glm4moe"} <= set(written)


def test_the_stock_templates_can_be_marked_but_for_those_that_write_a_turn_at_once():
    marked, refused = [], []
    for path, tokenizer in stock_tokenizers():
        try:
            if get_training_chat_template(tokenizer) is not None:
                marked.append(path.stem)
        except ConfigError:
            refused.append(path.stem)
    assert len(marked) >= 29
    assert {"qwen3", "llama3", "llama3_1", "gptoss", "phi3", "deepseekv3"} <= set(marked)  # TRL: none of Llama 3.1
    assert {stem.split("_")[0].rstrip("4") for stem in refused} <= {"gemma", "nemotron", "diffusion"}


def test_responses_of_the_stock_templates_are_read_as_trl_reads_them():
    """Where TRL knows the template by its text; reasoning has the name that the template reads it by."""
    from trl import add_response_schema as theirs
    from trl.chat_template_utils import parse_response as read_by_trl

    alike = 0
    for path, tokenizer in stock_tokenizers():
        mine, other = copy.deepcopy(tokenizer), copy.deepcopy(tokenizer)
        try:
            other = theirs(other)
        except ValueError:
            continue
        add_response_schema(mine)
        for message, prompt, written in _written(ChatTemplate(tokenizer)):
            prefix, ids = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, written))
            ours = parse_response(mine, ids, prefix=prefix, tools=[WEATHER])
            wanted = read_by_trl(other, ids, prefix=prefix, tools=[WEATHER])
            assert ours["content"] == message["content"], path.stem
            if (ours["content"], ours.get("tool_calls")) == (wanted["content"], wanted.get("tool_calls")):
                alike += 1
            else:  # TRL's wants a beginning of the answer that the prompt of this row does not have
                assert "How is it" in wanted["content"], (path.stem, ours, wanted)
            if "reasoning_content" in message or "thinking" in message:
                assert "Hm." in (ours.get("reasoning_content"), ours.get("thinking")), path.stem
    assert alike >= 60
