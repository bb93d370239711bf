"""Rows with images: the forms they come in, the tokens they become, which of them are trained, and what is refused."""

from __future__ import annotations

import io
import logging

import numpy as np
import pytest
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image

from tests.tiny_tokenizer import tiny_tokenizer
from tests.tiny_vision import FAMILIES, chat_template, completion_rows, message_rows, picture, tiny_processor
from trellium.data.conversion import prepare_multimodal_messages
from trellium.data.images import opened, read_images, shifted
from trellium.data.preferences import PreferenceOptions, prepare_preferences
from trellium.data.prepare import PrepareOptions, prepare_dataset, prepare_with_report
from trellium.data.report import Fate
from trellium.errors import ConfigError, DatasetError

ASKED = [{"role": "user", "content": "what is it"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "a cat"}]


def prepared(rows, processing=None, **options):
    rows = Dataset.from_list(rows) if isinstance(rows, list) else rows
    processing = tiny_processor("llava") if processing is None else processing
    return prepare_dataset(rows, processing, PrepareOptions(**{"max_length": None, **options}))


def tokens_of_transformers(processor, row, **options):
    """What transformers makes of a conversation with its images."""
    messages = prepare_multimodal_messages(row["messages"], row["images"])
    made = processor.apply_chat_template([messages], tokenize=True, return_dict=True, **options)
    return {name: list(values[0]) for name, values in made.items() if name in ("input_ids", "assistant_masks")}


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_assistant_marks_are_those_of_transformers(family):
    processor, rows = tiny_processor(family), message_rows(6)
    ours = prepared(rows, processor, assistant_only_loss=True)
    for row, mine in zip(rows, ours, strict=True):
        theirs = tokens_of_transformers(
            processor,
            row,
            return_assistant_tokens_mask=True,
            processor_kwargs={"add_special_tokens": False, "images_kwargs": {"return_tensors": "pt"}},
        )
        assert mine["input_ids"] == theirs["input_ids"]
        trained = [label != -100 for label in mine["labels"]]
        assert trained == [bool(mark) for mark in theirs["assistant_masks"]]
        assert len(mine["images"]) == len(row["images"])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_without_marks_gives_the_same_targets(family):
    marked, unmarked = tiny_processor(family), tiny_processor(family)
    unmarked.chat_template = chat_template(family).replace("{% generation %}", "").replace("{% endgeneration %}", "")
    rows = message_rows(6)
    with_marks, without = (prepared(rows, each, assistant_only_loss=True) for each in (marked, unmarked))
    assert with_marks["labels"][:] == without["labels"][:]


def test_every_form_of_an_image_gives_the_same_tokens_and_pixels(tmp_path):
    made = picture(3)
    file = tmp_path / "it.png"
    made.save(file)
    forms = [made, np.asarray(made), str(file), file, file.read_bytes(), {"bytes": file.read_bytes(), "path": None}]
    for form in forms:
        [stored] = read_images({"image": form}, "row 0")
        assert np.array_equal(np.asarray(opened(stored, "row 0")), np.asarray(made)), type(form)
        assert read_images({"images": [form]}, "row 0") == [stored]
    assert read_images({"image": None}, "row 0") == read_images({"images": None}, "row 0") == []


def test_a_picture_read_from_a_lossy_file_is_kept_without_loss():
    written = io.BytesIO()
    picture(1).save(written, format="JPEG")
    read = Image.open(written)
    [stored] = read_images({"image": read}, "row 0")
    assert np.array_equal(np.asarray(opened(stored, "row 0")), np.asarray(read))


def test_files_are_kept_as_they_came_and_colours_as_they_were_asked_for():
    raw = {"image": [picture(0)], "messages": [ANSWERED]}
    rows = Dataset.from_dict(
        raw,
        features=Features(image=ImageFeature(), messages=List({"role": Value("string"), "content": Value("string")})),
    )
    bytes_before = rows.cast_column("image", ImageFeature(decode=False))[0]["image"]["bytes"]
    assert prepared(rows)[0]["images"][0]["bytes"] == bytes_before
    grey = prepared(rows.cast_column("image", ImageFeature(mode="L")))
    assert opened(grey[0]["images"][0], "row 0").mode == "L"


@pytest.mark.parametrize("column", ["image", "images"])
def test_rows_read_as_a_stream_are_the_same(column):
    rows = Dataset.from_list([{column: picture(0) if column == "image" else [picture(0)], "messages": ANSWERED}])
    streamed = list(prepared(rows.to_iterable_dataset()))
    assert streamed == list(prepared(rows))


def test_an_image_stands_where_its_block_stands():
    blocks = [{"type": "text", "text": "first"}, {"type": "image", "text": None}, {"type": "text", "text": "then"}]
    row = {
        "images": [picture(0)],
        "messages": [
            {"role": "user", "content": blocks},
            {"role": "assistant", "content": [{"type": "text", "text": "yes"}]},
        ],
    }
    processor = tiny_processor("llava")
    text = processor.tokenizer.decode(prepared([row], processor)[0]["input_ids"])
    assert "first<image><image><image><image>then" in text


def test_plain_texts_hold_their_placeholders_and_end_once():
    rows = [{"image": picture(0), "text": "<image>a cat"}, {"image": None, "text": "no picture"}]
    processor = tiny_processor("llava")
    ours = prepared(rows, processor)
    image, end = processor.image_token_id, processor.tokenizer.eos_token_id
    assert [ids.count(image) for ids in ours["input_ids"][:]] == [4, 0]
    assert all(ids[-1] == end and ids.count(end) == 1 for ids in ours["input_ids"][:])
    pair = prepared([{"image": picture(0), "prompt": "<image>what?", "completion": " a cat"}], processor)[0]
    trained = [token for token in pair["labels"] if token != -100]
    assert processor.tokenizer.decode(trained) == " a cat<|im_end|>"


def test_only_the_completion_is_trained_of_a_prompt_with_images():
    processor = tiny_processor("idefics3")
    for row in prepared(completion_rows(6), processor):
        trained = processor.tokenizer.decode([token for token in row["labels"] if token != -100])
        assert trained.endswith("<|im_end|>\n")
        assert "image" not in trained
        assert "user" not in trained


@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
def test_a_row_of_which_an_image_would_be_cut_is_left_out_and_told(caplog, mode):
    image_last = {"role": "user", "content": [{"type": "text", "text": "one two three"}, {"type": "image"}]}
    cut, whole = [image_last, ANSWERED[1]], [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, ANSWERED[1]]
    if mode == "keep_end":
        cut = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "one two three"}]}, ANSWERED[1]]
    text = [
        {**turn, "content": [{"type": "text", "text": turn["content"]}]} if isinstance(turn["content"], str) else turn
        for turn in cut
    ]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "a cat"}]}
    rows = Dataset.from_list(
        [{"images": [picture(0)], "messages": [text[0], answer]}, {"images": [], "messages": [whole[0], answer]}]
    )
    processor = tiny_processor("llava")
    ids = prepared(rows, processor)[0]["input_ids"]
    images = [place for place, token in enumerate(ids) if token == processor.image_token_id]
    length = images[-1] if mode == "keep_start" else len(ids) - images[0] - 1
    with caplog.at_level(logging.WARNING):
        left, report = prepare_with_report(rows, processor, PrepareOptions(max_length=length, truncation_mode=mode))
    assert len(left) == 1
    assert report.dropped == {Fate.IMAGE_CUT: 1}
    assert "dropped 1 row with an image of which max_length would cut tokens" in caplog.text
    one_more = length + 1
    kept, _ = prepare_with_report(rows, processor, PrepareOptions(max_length=one_more, truncation_mode=mode))
    assert len(kept) == 2


def test_if_every_image_would_be_cut_that_is_an_error():
    with pytest.raises(
        DatasetError, match=r"an image of which max_length would cut tokens.*let the processor make images smaller"
    ):
        prepared([{"image": picture(0), "messages": ANSWERED}], max_length=6)


PAIR = {"prompt": ASKED, "chosen": ANSWERED[1:], "rejected": [{"role": "assistant", "content": "a dog"}]}


def pairs(rows, **options):
    return prepare_preferences(
        Dataset.from_list(rows), tiny_processor("llava"), PreferenceOptions(**{"max_length": None, **options})
    )


def test_a_pair_keeps_its_images_with_its_prompt_whether_that_stands_alone_or_not():
    alone = pairs([{"image": picture(0), **PAIR}])
    within = pairs([{"image": picture(0), "chosen": ASKED + PAIR["chosen"], "rejected": ASKED + PAIR["rejected"]}])
    assert list(alone) == list(within)
    assert len(alone[0]["images"]) == 1
    assert alone[0]["prompt_ids"].count(400) == 4


def test_a_pair_whose_image_would_be_cut_is_left_out():
    rows = [{"image": picture(0), **PAIR}, {"image": None, **PAIR, "prompt": [{"role": "user", "content": "hi"}]}]
    assert [row["images"] for row in pairs(rows, max_length=16, truncation_mode="keep_end")] == [[]]


REFUSED = {
    "no image where one is wanted": ({"images": [], "text": "<image>a"}, "0 images for 1 places"),
    "more images than places": ({"images": [picture(0)], "text": "a"}, "1 images for 0 places"),
    "more images than blocks": (
        {"images": [picture(0)], "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        "1 images were given for 0 blocks",
    ),
    "no list": ({"images": 3, "text": "a"}, "'images' must be a list of images, got int 3"),
    "no image": ({"image": 3, "text": "<image>"}, "'image' must hold images .* got int 3"),
    "no such file": ({"image": "/nowhere/it.png", "text": "<image>"}, "an image cannot be read"),
    "no picture": ({"image": {"bytes": b"text", "path": None}, "text": "<image>"}, "an image cannot be read"),
    "both columns": ({"image": picture(0), "images": [picture(0)], "text": "<image>"}, "both 'image' and 'images'"),
    "sound": (
        {"images": [], "messages": [{"role": "user", "content": [{"type": "audio"}]}]},
        "leave out rows with audio or video",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_told(case):
    row, message = REFUSED[case]
    with pytest.raises(DatasetError, match=message):
        prepared([row])


def test_images_without_a_processor_are_refused():
    with pytest.raises(ConfigError, match=r"train has images, but processing_class is the tokenizer .*remove_columns"):
        prepared([{"image": picture(0), "text": "a"}], tiny_tokenizer())


def test_images_in_answers_that_are_compared_are_refused():
    shown = [{"role": "assistant", "content": [{"type": "image", "image": "x.png"}]}]
    texts = {"prompt": "a", "chosen": "<image>", "rejected": "b"}
    for row in ({"images": [], **PAIR, "chosen": shown}, {"image": picture(0), **texts}):
        with pytest.raises(DatasetError, match="an answer holds an image"):
            pairs([row])


def test_a_reward_model_does_not_pass_over_images_in_silence():
    with pytest.raises(ConfigError, match="reward models do not read"):
        pairs([{"image": picture(0), **PAIR}], whole_sequences=True)


def test_the_same_rows_and_processor_are_found_again():
    rows = Dataset.from_list([{"image": picture(0), "messages": ANSWERED}])
    used = tiny_processor("gemma3")
    first = prepared(rows, used)
    assert (
        prepared(rows, used)._fingerprint == first._fingerprint == prepared(rows, tiny_processor("gemma3"))._fingerprint
    )


def test_spans_move_by_what_the_placeholders_before_them_grew():
    replaced = [{"span": (2, 4), "new_span": (2, 10)}, {"span": (6, 8), "new_span": (12, 13)}]
    assert shifted([(0, 2), (4, 6), (1, 7), (8, 9)], replaced) == [(0, 2), (10, 12), (1, 13), (13, 14)]
    assert shifted([(0, 2)], []) == [(0, 2)]
