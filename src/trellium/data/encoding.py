"""Texts and messages to tokens, by the same rules for every kind of row.

- A text gets the tokenizer's own special tokens, and as a whole sequence ends with exactly one end-of-sequence token; a conversation is what its
  chat template writes, with nothing added.
- A prompt is tokenized alone, with the generation prompt for messages, and again together with its completion, which begins where the two stop
  agreeing. Where that is before the prompt's end, the tokenizer merged across the border.
- Where rows have images, the processor makes the tokens, and each image is as many as it has features.

Cost: the tokenizer's time; rendering a conversation adds about 70 µs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from datasets import Features

from trellium.data.formats import RowFormat
from trellium.data.images import IMAGE_IN_ANSWER, IMAGES, STORED_IMAGES, ImageProcessor, illustrate, tokenizer_in
from trellium.data.pipeline import PipelineOptions, Row
from trellium.data.rows import Asked, Content, rendering
from trellium.data.templates import ChatTemplate
from trellium.errors import ConfigError, DatasetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

Processing: TypeAlias = Union["PreTrainedTokenizerBase", "ProcessorMixin"]
"""What a trainer is given to make tokens with."""

TRUNCATION_MODES = ("keep_start", "keep_end")


def check_truncation_mode(mode: str) -> None:
    """Hold a truncation mode to those there are.

    Raises:
        ConfigError: another.
    """
    if mode not in TRUNCATION_MODES:
        raise ConfigError(f"truncation_mode={mode!r} is not one of {', '.join(map(repr, TRUNCATION_MODES))}.")


@dataclass(frozen=True)
class Encoder:
    """A tokenizer and what it needs to know of the rows. A value: two with equal fields have the same fingerprint.

    Attributes:
        tokenizer: the model's.
        conversational: whether contents are messages; otherwise they are texts.
        eos_token_id: ends texts.
        name: of the dataset, for errors.
        images: the processor, where rows have images.
    """

    tokenizer: PreTrainedTokenizerBase
    conversational: bool
    eos_token_id: int | None
    name: str
    images: ImageProcessor | None = None

    @classmethod
    def of(cls, processing: Processing, format: RowFormat, options: PipelineOptions) -> Encoder:
        """For the rows of a dataset of this format.

        Args:
            processing: the model's tokenizer, or its processor.

        Raises:
            ConfigError: texts need an end-of-sequence token that is not there, or rows with images a processor.
        """
        images = ImageProcessor.of(processing, options.called) if format.images else None
        tokenizer = tokenizer_in(processing)
        template = getattr(processing, "chat_template", None)
        if template and template != tokenizer.chat_template:
            tokenizer = copy.copy(tokenizer)
            tokenizer.chat_template = template
        needed = format.kind != "tokens" and not format.conversational
        eos = eos_token_id(tokenizer, options.eos_token, needed=needed)
        return cls(tokenizer, format.conversational, eos, options.called, images)

    def chat(self) -> ChatTemplate:
        """The tokenizer's chat template.

        Raises:
            ConfigError: it has none.
        """
        return ChatTemplate(self.tokenizer, name=self.name)

    def ids(self, texts: list[str], *, special: bool, offsets: bool = False) -> dict[str, list]:
        """What the tokenizer makes of texts: `input_ids`, and `offset_mapping` where it is wanted."""
        if not texts:
            return {"input_ids": []}
        return self.tokenizer(
            texts,
            add_special_tokens=special,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=offsets,
            verbose=False,
        )

    def sequences(self, contents: Sequence[Content], asked: Sequence[Asked], *, whole: bool = True) -> list[list[int]]:
        """The tokens of contents that begin a sequence.

        Args:
            contents: texts or messages.
            asked: of each, what `ChatTemplate.render` needs to know.
            whole: a sequence to its end; otherwise a prompt, whose end stays open: without an end-of-sequence token, with the generation prompt.

        Raises:
            DatasetError: the chat template refuses a conversation.
        """
        if self.conversational:
            chat = self.chat()
            texts = [
                chat.render(messages, generation_prompt=not whole, **rendering(asking))  # type: ignore[arg-type]
                for messages, asking in zip(contents, asked, strict=True)
            ]
            return self._token_lists(texts, asked, special=False, whole=whole)
        texts = [str(text) for text in contents]
        ids = self._token_lists(texts, asked, special=True, whole=whole)
        return [self._ended(text, each, eos=whole) for text, each in zip(texts, ids, strict=True)]

    def _token_lists(self, texts: list[str], asked: Sequence[Asked], *, special: bool, whole: bool) -> list[list[int]]:
        if self.images is None:
            return self.ids(texts, special=special)["input_ids"]
        return [
            self.images.encode(text, asks["images"], asks["where"], whole=whole, add_special_tokens=special)[
                "input_ids"
            ]
            for text, asks in zip(texts, asked, strict=True)
        ]

    def illustrate(
        self, row: Row, contents: tuple[Content, ...], asked: Asked, *, only_first: bool = False
    ) -> tuple[Content, ...]:
        """The contents of a row with places for its images, where rows have any; see `trellium.data.images.illustrate`."""
        if self.images is None:
            return contents
        placeholder = self.images.processor.image_token
        if only_first and any(isinstance(content, str) and placeholder in content for content in contents[1:]):
            raise DatasetError(f"{asked['where']}: {IMAGE_IN_ANSWER}")
        return illustrate(row, contents, asked, only_first=only_first)

    def cuts_image(self, whole: Sequence[int], left: Sequence[int]) -> bool:
        """Whether of the tokens of images in a sequence some are not in what is left of it."""
        return self.images is not None and len(left) < len(whole) and self.images.count(left) < self.images.count(whole)

    def stored_images(self, asked: Asked) -> dict[str, list]:
        """The column of a row's images, where rows have any."""
        return {} if self.images is None else {STORED_IMAGES: asked["images"]}

    @property
    def image_features(self) -> Features:
        """The type of that column."""
        return Features({} if self.images is None else {STORED_IMAGES: IMAGES})

    def _ended(self, text: str, ids: list[int], *, eos: bool) -> list[int]:
        """Tokens of a text with the tokenizer's own special tokens, the beginning at most once, the end once (`eos`) or not at all."""
        bos, bos_id = self.tokenizer.bos_token, self.tokenizer.bos_token_id
        if bos_id is not None and ids[:2] == [bos_id] * 2 and text.startswith(bos) and not text.startswith(bos * 2):
            ids = ids[1:]
        if not ids or ids[-1] != self.eos_token_id:
            return [*ids, self.eos_token_id] if eos else ids  # type: ignore[list-item]
        end = self.tokenizer.convert_ids_to_tokens(ids[-1])
        doubled = ids[-2:-1] == ids[-1:] and not text.endswith(
            end * 2
        )  # the text brought one, and the tokenizer added its own
        if doubled or (not eos and not text.endswith(end)):
            return ids[:-1]
        return ids


def eos_token_id(tokenizer: PreTrainedTokenizerBase, eos_token: str | None, *, needed: bool) -> int | None:
    """The token that ends texts: the one named, else the tokenizer's own.

    Args:
        tokenizer: the model's.
        eos_token: the name of another.
        needed: whether there must be one.

    Raises:
        ConfigError: the one named is not in the vocabulary, or none is there and it is needed.
    """
    if eos_token is not None:
        token_id: Any = tokenizer.convert_tokens_to_ids(eos_token)
        if token_id is None or tokenizer.convert_ids_to_tokens(token_id) != eos_token:
            raise ConfigError(
                f"eos_token={eos_token!r} is not in the tokenizer's vocabulary. Name one that is, or leave it unset for {tokenizer.eos_token!r}."
            )
        return token_id
    if needed and tokenizer.eos_token_id is None:
        raise ConfigError(
            "The tokenizer has no end-of-sequence token, so the model could not learn to stop. Name one with eos_token."
        )
    return tokenizer.eos_token_id
