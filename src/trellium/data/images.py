"""Rows with images: how a row may give them, how they are kept, and what a processor makes of them.

A row gives its images as `image` (one) or `images` (a list, which may be empty): pictures of PIL, arrays, paths, bytes, or `{"bytes", "path"}`. Beside
its tokens they are kept as they came, in their files' own compression; pixels are many times as large and are made anew for each batch. Preparation
makes them once too, because only the processor knows how many tokens a picture becomes.

In a text an image is one placeholder, which the processor replaces by as many tokens as the image has features. A sequence that holds fewer of them
than its images have features would fail in the middle of a run, so no cut may leave one (`Fate.IMAGE_CUT`).

Cost: reading and resizing each image once in preparation and once a batch it is in.
"""

from __future__ import annotations

import importlib.util
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import Dataset, Features, Image, IterableDataset, List
from datasets.fingerprint import Hasher

from trellium.data.conversion import prepare_multimodal_messages
from trellium.data.formats import IMAGE_COLUMNS
from trellium.data.rows import Asked, Content, Message, shorten
from trellium.data.templates import Span
from trellium.errors import ConfigError, DatasetError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

STORED_IMAGES = "images"
"""The column in which the images of a prepared row stand."""

IMAGES = List(Image(decode=False))
"""The type of that column."""

Stored = dict[str, Any]
"""An image as it is kept: `bytes` and `path`, one of which may be None."""

IMAGE_IN_ANSWER = "an answer holds an image. Of answers that are compared, only the prompt can have images."

_PNG_MODES = ("1", "L", "LA", "RGB", "RGBA")


# ---- images of a row


def undecoded(rows: Dataset | IterableDataset, column: str) -> Dataset | IterableDataset:
    """The rows with the images of a column as they are stored; where a colour mode is asked for, or the column's type is not known, as they came."""
    kind = None if rows.features is None else rows.features.get(column)
    if isinstance(kind, Image):
        image, stored = kind, Image(decode=False)
    else:
        image, stored = getattr(kind, "feature", None), IMAGES
    if not isinstance(image, Image) or not image.decode or image.mode is not None:
        return rows
    if isinstance(rows, IterableDataset):
        return rows.cast_column(column, stored)
    # Dataset.cast_column would write every list of images anew.
    info = rows.info.copy()
    info.features = Features({**rows.features, column: stored})
    fingerprint = Hasher.hash((rows._fingerprint, column, "undecoded"))
    return Dataset(rows.data, info=info, split=rows.split, indices_table=rows._indices, fingerprint=fingerprint)


def read_images(row: Mapping[str, Any], where: str) -> list[Stored]:
    """The images of a row, as they are kept; none where the column is None.

    Raises:
        DatasetError: a value that is no image.
    """
    column = next((name for name in IMAGE_COLUMNS if name in row), "")
    value = row.get(column)
    if value is None:
        return []
    if column == "image":
        return [_stored(value, where, column)]
    if not isinstance(value, list | tuple):
        raise DatasetError(
            f"{where}: 'images' must be a list of images, got {type(value).__name__} {shorten(value)}. For one image a row use 'image'."
        )
    return [_stored(each, where, column) for each in value]


def _stored(value: Any, where: str, column: str) -> Stored:
    from PIL import Image as pillow

    if isinstance(value, Mapping) and (value.get("bytes") is not None or value.get("path") is not None):
        return {"bytes": value.get("bytes"), "path": value.get("path")}
    if isinstance(value, str | os.PathLike):
        return {"bytes": None, "path": os.fspath(value)}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value), "path": None}
    if isinstance(value, np.ndarray):
        value = pillow.fromarray(value)
    if not isinstance(value, pillow.Image):
        raise DatasetError(
            f"{where}: '{column}' must hold images (of PIL, arrays, paths, bytes, or {{'bytes', 'path'}}), got {type(value).__name__} {shorten(value)}."
        )
    written = io.BytesIO()  # without loss, whatever the picture was read from
    value.save(written, format="PNG" if value.mode in _PNG_MODES else "TIFF")
    return {"bytes": written.getvalue(), "path": None}


def opened(image: Stored, where: str) -> Picture:
    """The picture of a stored image.

    Raises:
        DatasetError: no such file, or none that can be read.
    """
    try:
        return Image().decode_example(image)
    except (OSError, ValueError) as error:
        raise DatasetError(
            f"{where}: an image cannot be read ({error}). Check the file, or leave the row out."
        ) from error


def illustrate(
    row: Mapping[str, Any], contents: tuple[Content, ...], asked: Asked, *, only_first: bool = False
) -> tuple[Content, ...]:
    """Contents with a place for every image; the images themselves, in the order of their places, become `asked["images"]`.

    Args:
        row: with a column of images.
        contents: texts, which hold their placeholders already, or messages, in which those of the column are placed as
            `prepare_multimodal_messages` does: all of them in the first content.
        asked: what is known of the row; `images` is added.
        only_first: whether the contents behind the first are alternatives, so that none of them can have images of its own.

    Raises:
        DatasetError: images that cannot be placed.
    """
    images, where = read_images(row, asked["where"]), asked["where"]
    asked["images"] = images
    if isinstance(contents[0], str):
        return contents
    placed: list[Content] = []
    found: list[Stored] = []
    for part, content in enumerate(contents):
        try:
            messages = prepare_multimodal_messages(content, images if part == 0 else None)  # type: ignore[arg-type]
        except DatasetError as error:
            raise DatasetError(f"{where}: {error}") from None
        own = [_stored(block["image"], where, "content") for block in _image_blocks(messages)]
        if own and part and only_first:
            raise DatasetError(f"{where}: {IMAGE_IN_ANSWER}")
        found += own
        placed.append([_without_images(message) for message in messages])
    asked["images"] = found
    return tuple(placed)


def _image_blocks(messages: Sequence[Message]) -> list[dict]:
    blocks = [block for message in messages for block in message.get("content") or []]
    return [block for block in blocks if block["type"] == "image" and block.get("image") is not None]


def _without_images(message: Message) -> Message:
    blocks = [{"type": "image"} if block["type"] == "image" else block for block in message.get("content") or []]
    return {**message, "content": blocks}


# ---- what a processor makes of them


def tokenizer_in(processing: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a processor, or a tokenizer itself."""
    tokenizer = getattr(processing, "tokenizer", None)
    return processing if tokenizer is None else tokenizer


@dataclass(frozen=True)
class ImageProcessor:
    """A processor of texts with images. A value, as far as its processor is one.

    Attributes:
        processor: the model's; its placeholder of an image is `image_token`.

    Raises:
        ConfigError: it has no placeholder.
    """

    processor: ProcessorMixin

    def __post_init__(self) -> None:
        if not isinstance(getattr(self.processor, "image_token", None), str):
            raise ConfigError(
                f"{type(self.processor).__name__} has no image_token, so where a text's images stand is not known. Leave the images out "
                "(dataset.remove_columns), or use a processor of transformers that has one."
            )

    @classmethod
    def of(cls, processing: Any, name: str) -> ImageProcessor:
        """That of a processing class.

        Raises:
            ConfigError: it is a tokenizer, or Pillow is not installed.
        """
        if importlib.util.find_spec("PIL") is None:
            raise ConfigError(f"{name} has images, which are read with Pillow. Install it: pip install pillow.")
        if not hasattr(processing, "image_processor"):
            raise ConfigError(
                f"{name} has images, but processing_class is the tokenizer {type(processing).__name__}, which cannot read them. Give the processor of a "
                "vision-language model, or leave the images out with dataset.remove_columns([...])."
            )
        return cls(processing)

    @property
    def token_ids(self) -> np.ndarray:
        """The tokens that stand for images."""
        return np.asarray([token for token in self.processor.image_token_ids if token is not None], dtype=np.int64)

    def count(self, ids: Sequence[int] | np.ndarray) -> int:
        """How many tokens of a sequence stand for images."""
        return int(np.isin(np.asarray(ids, dtype=np.int64), self.token_ids).sum())

    def encode(self, text: str, images: Sequence[Stored], where: str, *, whole: bool = True, **options: Any) -> Mapping:
        """What the processor makes of a text: `input_ids` and what `options` ask for.

        Args:
            text: with a placeholder for each of its images.
            images: of the row, in order; a text that is its beginning has the first of them.
            where: the row, for errors.
            whole: whether the text must have them all.
            **options: of the processor's tokenizer.

        Raises:
            DatasetError: placeholders that are not as many, or images that the processor refuses.
        """
        places = text.count(self.processor.image_token)
        if places > len(images) or (whole and places < len(images)):
            raise DatasetError(
                f"{where}: {len(images)} images for {places} places ({self.processor.image_token!r}) in the text. Give an image for each place; of "
                "messages, the chat template writes the places: it must be one for images (chat_template_path)."
            )
        if not places:
            tokens = tokenizer_in(self.processor)([text], return_attention_mask=False, verbose=False, **options)
            return {name: values[0] for name, values in tokens.items()}
        pictures = [opened(image, where) for image in images[:places]]
        try:
            made = self._call([pictures], [text], **options)
        except (ValueError, TypeError) as error:
            raise DatasetError(f"{where}: {type(self.processor).__name__} refuses the row's images: {error}") from error
        return {
            name: made[name][0] for name in ("input_ids", "offset_mapping", "text_replacement_offsets") if name in made
        }

    def pixels(self, images: Sequence[Sequence[Stored]], where: str = "a batch") -> Mapping[str, Tensor]:
        """What the processor makes of the images of rows, some of which may have none; nothing where none has."""
        pictures = [[opened(image, where) for image in row] for row in images if row]
        if not pictures:
            return {}
        return self._call(pictures, [self.processor.image_token * len(row) for row in pictures])

    def _call(self, pictures: list[list[Picture]], texts: list[str], **options: Any) -> Mapping:
        # Tensors of the images only: texts of a batch are of unequal lengths, and are not padded here.
        return self.processor(images=pictures, text=texts, images_kwargs={"return_tensors": "pt"}, **options)


def shifted(spans: Sequence[Span], replaced: Sequence[Mapping[str, Any]]) -> list[Span]:
    """Spans of a text as they lie in it after its placeholders were replaced; one that holds a placeholder holds what it became.

    Args:
        spans: `(start, end)` in characters.
        replaced: of each placeholder, its `span` before and `new_span` after, as processors tell them.
    """

    def moved(place: int) -> int:
        before = [each for each in replaced if each["span"][1] <= place]
        return place + (before[-1]["new_span"][1] - before[-1]["span"][1] if before else 0)

    return [(moved(start), moved(end)) for start, end in spans]


# ---- batches


@dataclass(frozen=True)
class ImageInputs:
    """What a model is given of a batch's images.

    Attributes:
        processor: makes pixels.
        names: of the tensors that the model takes.
        types: what the model calls the kinds of tokens that it must be told, text 0 and image 1; empty where it needs no telling.
        column: in which a row's images stand.
    """

    processor: ImageProcessor
    names: tuple[str, ...]
    types: str = ""
    column: str = STORED_IMAGES

    def holds(self, ids: np.ndarray) -> bool:
        """Whether a sequence has tokens that stand for an image."""
        return self.processor.count(ids) > 0

    def __call__(self, images: Sequence[Sequence[Stored]], input_ids: Tensor) -> dict[str, Tensor]:
        """The tensors of a batch.

        Args:
            images: in the order in which they lie in the batch, by row or tree.
            input_ids: `[R, L]`.
        """
        import torch  # the data room is read without it

        made = self.processor.pixels(images)
        self._check(made)
        tensors = {name: torch.as_tensor(made[name]) for name in self.names if name in made}
        if self.types:
            tensors[self.types] = torch.from_numpy(self._types(input_ids.numpy()))
        return tensors

    def _types(self, ids: np.ndarray | list[int]) -> np.ndarray:
        return np.isin(ids, self.processor.token_ids).astype(np.int64)

    def _check(self, made: Mapping[str, Any]) -> None:
        """Refuse a processor that tells more of tokens than which are of images."""
        texts = made.get("input_ids", [])
        told = made[self.types] if self.types in made else map(self._types, texts)
        exact = all(np.array_equal(self._types(ids), types) for ids, types in zip(texts, told, strict=True))
        # Tensors are of images; lists as long as the texts are of their tokens.
        lists = {name: made[name] for name in self.names if isinstance(made.get(name), list)}
        others = [name for name, rows in lists.items() if list(map(len, rows)) == list(map(len, texts))]
        if others or not exact:
            name = type(self.processor.processor).__name__
            raise ConfigError(
                f"{name} makes {', '.join(others) or self.types} of the tokens of a text, which says more of them than text or image. Images of its model "
                "cannot be trained on here: leave them out with dataset.remove_columns([...])."
            )
