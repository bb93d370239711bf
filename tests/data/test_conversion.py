"""TRL's functions on rows and datasets, beside TRL's own."""

from __future__ import annotations

import copy

import pytest
from datasets import Dataset, DatasetDict

from tests.data.stock_templates import stock_tokenizers
from tests.tiny_tokenizer import CHATML, LLAMA3, QWEN3, tiny_tokenizer
from trellium.data import conversion
from trellium.data.templates import ChatTemplate
from trellium.errors import DatasetError

USER, ANSWER = {"role": "user", "content": "hi there"}, {"role": "assistant", "content": "hello"}
OTHER = {"role": "assistant", "content": "what"}
SPOKEN = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello", "weight": 1}]
ROWS = {
    "text": {"text": "hello"},
    "prompt": {"prompt": "hello"},
    "messages": {"messages": [USER, ANSWER]},
    "spoken": {"conversations": SPOKEN},
    "spoken pairs": {"chosen": SPOKEN, "rejected": SPOKEN, "note": [1]},
    "no messages": {"messages": "hello"},
    "prompt only": {"prompt": [USER]},
    "unfinished prompt": {"prompt": [USER, ANSWER]},
    "completion": {"prompt": [USER], "completion": [ANSWER], "id": 3},
    "answer of a tool": {"prompt": [USER, ANSWER, {"role": "tool", "content": "rain"}], "completion": [ANSWER]},
    "judged": {"prompt": [USER], "completion": [ANSWER], "label": True},
    "pair": {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]},
    "whole pair": {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
    "whole pair with a text prompt": {"prompt": "hi there", "chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
    "text pair": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "whole text pair": {"chosen": "The sky is blue.", "rejected": "The sky is green."},
    "one begins with the other": {"chosen": "The sky", "rejected": "The sky is"},
    "alike": {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]},
    "options": {"messages": [USER, ANSWER], "chat_template_kwargs": {"enable_thinking": False}},
}
MIXED = "whole pair with a text prompt"
ON_ROWS = ["is_conversational", "is_conversational_from_value", "maybe_convert_to_chatml", "maybe_extract_prompt"]


@pytest.mark.peers
@pytest.mark.parametrize(
    ("row", "function"),
    # Of the mixed row's columns TRL's is_conversational looks at any one, another in each process.
    [(row, function) for row in ROWS for function in ON_ROWS if (row, function) != (MIXED, "is_conversational")],
)
def test_a_functions_result_for_a_row_is_that_of_trls(row, function):
    import trl

    theirs = getattr(trl, function)(copy.deepcopy(ROWS[row]))
    given = copy.deepcopy(ROWS[row])
    assert getattr(conversion, function)(given) == theirs
    assert given == ROWS[row]


@pytest.mark.peers
@pytest.mark.parametrize("template", [CHATML, LLAMA3, QWEN3], ids=["chatml", "llama3", "qwen3"])
@pytest.mark.parametrize("row", [row for row in ROWS if "spoken" not in row and row != MIXED])
def test_a_rows_text_is_that_of_trls(row, template):
    import trl

    tokenizer = tiny_tokenizer(template)
    theirs = trl.maybe_apply_chat_template(copy.deepcopy(ROWS[row]), tokenizer)
    assert conversion.maybe_apply_chat_template(ROWS[row], tokenizer) == theirs


@pytest.mark.peers
@pytest.mark.parametrize("kind", ["dataset", "dict", "stream"])
def test_an_unpaired_dataset_is_that_of_trls(kind):
    import trl

    rows = Dataset.from_list([{"prompt": str(i), "chosen": "a", "rejected": "b", "n": i} for i in range(3)])
    dataset = {"dataset": rows, "dict": DatasetDict(train=rows), "stream": rows.to_iterable_dataset()}[kind]

    def read(made):
        return [list(part) for part in made.values()] if kind == "dict" else list(made)

    assert read(conversion.unpair_preference_dataset(dataset)) == read(trl.unpair_preference_dataset(dataset))
    if kind != "stream":  # whose map knows no num_proc
        assert read(conversion.maybe_unpair_preference_dataset(dataset, desc="x")) == read(
            trl.maybe_unpair_preference_dataset(dataset, desc="x")
        )


def test_a_dataset_of_judged_answers_stays_as_it_is():
    rows = Dataset.from_list([{"prompt": "a", "completion": "b", "label": True}])
    assert conversion.maybe_unpair_preference_dataset(rows) is rows


def test_what_two_answers_begin_with_is_the_prompt_and_the_space_is_theirs():
    assert conversion.extract_prompt({"chosen": "The sky is blue.", "rejected": "The sky is green."}) == {
        "prompt": "The sky is",
        "chosen": " blue.",
        "rejected": " green.",
    }
    assert conversion.extract_prompt(ROWS["whole pair"]) == {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]}


def test_answers_that_differ_at_once_have_an_empty_prompt_where_trl_wraps_around():
    """TRL looks at the character before the first, which is the last one: a space there makes the whole text but that the prompt."""
    assert conversion.extract_prompt({"chosen": "yes ", "rejected": "no"}) == {
        "prompt": "",
        "chosen": "yes ",
        "rejected": "no",
    }
    assert conversion.extract_prompt({"chosen": "", "rejected": "no"})["rejected"] == "no"


def test_a_row_that_cannot_be_rendered_is_refused_with_the_way_out():
    tokenizer = tiny_tokenizer(CHATML)
    with pytest.raises(
        DatasetError, match=r"keys 'completion' cannot be rendered\. Accepted are 'messages'; 'prompt';"
    ):
        conversion.apply_chat_template({"completion": [ANSWER]}, tokenizer)
    with pytest.raises(DatasetError, match="ends with the role 'system'"):
        conversion.apply_chat_template({"prompt": [{"role": "system", "content": "a"}]}, tokenizer)
    with pytest.raises(DatasetError, match=r"'prompt' must be messages.*maybe_extract_prompt\(row\)"):
        conversion.maybe_apply_chat_template(ROWS[MIXED], tokenizer)
    assert not conversion.is_conversational({"messages": []})
    assert not conversion.is_conversational_from_value({"conversations": []})


BLOCKS = [{"type": "image"}, {"type": "text", "text": "which?"}, {"type": "image", "image": "own"}, {"type": "image"}]
WITH_IMAGES = {
    "texts": ([{"role": "system", "content": "s"}, USER, ANSWER, USER], ["a", "b"]),
    "no images": ([USER, ANSWER], None),
    "blocks": ([{"role": "user", "content": BLOCKS}, ANSWER], ["a", "b"]),
    "blocks, then text": ([{"role": "user", "content": BLOCKS[:1]}, ANSWER], ["a"]),
    "a call": ([USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, {"role": "tool", "content": "r"}], ["a"]),
}  # fmt: skip


@pytest.mark.peers
@pytest.mark.parametrize("case", WITH_IMAGES)
def test_messages_with_images_are_those_of_trl(case):
    import trl

    messages, images = WITH_IMAGES[case]
    given = copy.deepcopy(messages)
    assert conversion.prepare_multimodal_messages(given, images) == trl.prepare_multimodal_messages(messages, images)
    assert given == messages


def test_images_and_their_places_must_be_as_many():
    with pytest.raises(DatasetError, match="1 images were given for 2 blocks"):
        conversion.prepare_multimodal_messages([{"role": "user", "content": BLOCKS}], ["a"])
    with pytest.raises(DatasetError, match="has the role 'martian'"):
        conversion.prepare_multimodal_messages([{"role": "martian", "content": "a"}])


@pytest.mark.peers
def test_the_templates_that_support_tools_are_those_of_trl():
    import trl

    supported = []
    for path, tokenizer in stock_tokenizers():
        theirs = trl.supports_tool_calling(tokenizer)
        # Of templates that want blocks of text TRL asks with texts, unless it is given the model's processor.
        if conversion.supports_tool_calling(tokenizer) != theirs:
            assert ChatTemplate(tokenizer)._wants_blocks, path.stem
        supported.append(theirs)
    assert 20 <= sum(supported) < len(supported)
    assert not conversion.supports_tool_calling(tiny_tokenizer())
