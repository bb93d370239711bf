"""Rows of supervised fine-tuning to tokens and labels.

- Labels are the tokens, -100 where a token is not a target: outside the completion, outside the assistant's turns, and the first
  token, which nothing predicts. They are made here and nowhere else.
- Then the row is cut to `max_length`; what is left of a turn or a completion is trained. A row in which nothing is left to train gets a
  `Fate` that says why.

Cost: the tokenizer's time; rendering a conversation adds about 70 µs, and as much again twice an assistant turn where masks are derived.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from datasets import Features

from trellium.data.encoding import Encoder
from trellium.data.formats import RowFormat
from trellium.data.images import shifted
from trellium.data.pipeline import TOKENS, EncodedRow, Row
from trellium.data.report import Fate
from trellium.data.rows import (
    Asked,
    Message,
    common_prefix_length,
    joined,
    read_contents,
    read_text,
    read_tokens,
    rendering,
    shorten,
)
from trellium.data.sequence import IGNORE_INDEX
from trellium.data.templates import ChatTemplate, tokens_in_spans, tokens_in_spans_by_prefix
from trellium.data.token_checks import TokenLimits, check_labels
from trellium.errors import ConfigError, DatasetError


@dataclass(frozen=True)
class Supervised:
    """Rows of supervised fine-tuning, encoded as tokens and labels.

    Attributes:
        encoder: of texts or messages.
        format: of the rows.
        max_length: tokens a row may have, at most; None for no limit.
        truncation_mode: which end of a longer row is kept, `keep_start` or `keep_end`.
        completion_only_loss: train the completion only.
        assistant_only_loss: train the assistant's turns only.
        formatting_func: from a row to its text; the columns are then its own affair.
        limits: of the model; a row beyond them is an error.
    """

    encoder: Encoder
    format: RowFormat
    max_length: int | None
    truncation_mode: str
    completion_only_loss: bool
    assistant_only_loss: bool
    formatting_func: Callable[[dict], str] | None
    limits: TokenLimits

    @property
    def features(self) -> Features:
        """`input_ids`, `labels`, and the images where rows have any."""
        return Features(input_ids=TOKENS, labels=TOKENS, **self.encoder.image_features)

    def encode(self, rows: list[Row], places: list[str]) -> list[EncodedRow]:
        """One row of tokens a row."""
        if self.format.kind == "tokens":
            marked = [self._tokens(row, where) for row, where in zip(rows, places, strict=True)]
        elif self.format.kind == "text":
            marked = self._texts(rows, places)
        elif self.format.conversational:
            marked = self._conversations(rows, places)
        else:
            marked = self._prompt_completions(rows, places)
        return [
            self._finish(row, where, origin) for origin, (row, where) in enumerate(zip(marked, places, strict=True))
        ]

    def _finish(self, row: _Marked, where: str, origin: int) -> EncodedRow:
        """A row cut to `max_length`, with its labels, how many tokens were cut and what becomes of it."""
        ids, trained = row.input_ids, row.trained
        whole = ids
        cut = 0 if self.max_length is None else max(0, len(ids) - self.max_length)
        trained[:1] = False
        had_targets = bool(trained.any())
        if cut:
            kept = slice(0, self.max_length) if self.truncation_mode == "keep_start" else slice(cut, None)
            ids, trained = ids[kept], trained[kept]
            trained[:1] = False
        self.limits.check(ids, where)
        labels = np.where(trained, np.asarray(ids, dtype=np.int32), np.int32(IGNORE_INDEX)).astype(np.int32)
        targets = int(trained.sum())
        if self.encoder.cuts_image(whole, ids):
            fate = Fate.IMAGE_CUT
        elif targets:
            fate = Fate.KEPT
        elif had_targets:
            fate = Fate.TRUNCATED_AWAY
        else:
            fate = Fate.TOO_SHORT if len(ids) < 2 else Fate.ALL_MASKED
        values = {"input_ids": ids, "labels": labels, **row.images}
        return EncodedRow(values, fate, len(ids), targets, len(ids), cut, origin, row.merged, row.unstopped)

    def _tokens(self, row: Row, where: str) -> _Marked:
        read = read_tokens(row, where, self.format.fields)
        ids = read["input_ids"]
        if "labels" in read:
            check_labels(ids, read["labels"], where)
            trained = np.asarray(read["labels"], dtype=np.int64) != IGNORE_INDEX
        else:
            trained = np.ones(len(ids), dtype=bool)
        if "assistant_masks" in read:
            trained &= np.asarray(read["assistant_masks"], dtype=bool)
        if "completion_mask" in read and self.completion_only_loss:
            trained &= np.asarray(read["completion_mask"], dtype=bool)
        asked: Asked = {"where": where}
        self.encoder.illustrate(row, ("",), asked)
        return _Marked(ids, trained, self.encoder.stored_images(asked))

    def _texts(self, rows: list[Row], places: list[str]) -> list[_Marked]:
        field = self.format.field
        texts = [
            self._formatted(row, where) if self.formatting_func else read_text(row.get(field), where, field)
            for row, where in zip(rows, places, strict=True)
        ]
        asked: list[Asked] = [{"where": where} for where in places]
        for row, text, asks in zip(rows, texts, asked, strict=True):
            self.encoder.illustrate(row, (text,), asks)
        return [
            _Marked(ids, np.ones(len(ids), dtype=bool), self.encoder.stored_images(asks))
            for ids, asks in zip(self.encoder.sequences(texts, asked), asked, strict=True)
        ]

    def _formatted(self, row: Row, where: str) -> str:
        assert self.formatting_func is not None
        text = self.formatting_func(row)
        if not isinstance(text, str):
            raise DatasetError(
                f"{where}: formatting_func must return the row's text, a str, got {type(text).__name__} {shorten(text)}. It is called with one row, not with a batch."
            )
        return text

    def _prompt_completions(self, rows: list[Row], places: list[str]) -> list[_Marked]:
        read = [self._read(row, where) for row, where in zip(rows, places, strict=True)]
        asked = [asks for _, asks in read]
        prompts = self.encoder.sequences([parts[0] for parts, _ in read], asked, whole=False)
        wholes = self.encoder.sequences([joined(*parts) for parts, _ in read], asked)
        return [
            self._after_prompt(
                prompt, _Marked(whole, np.ones(len(whole), dtype=bool), self.encoder.stored_images(asks))
            )
            for prompt, whole, asks in zip(prompts, wholes, asked, strict=True)
        ]

    def _read(self, row: Row, where: str) -> tuple[tuple[Any, ...], Asked]:
        """What a row says in its columns, with places for its images, and what it asks of the chat template."""
        conversational, image_blocks = self.format.conversational, bool(self.format.images)
        parts, asked = read_contents(
            row, where, self.format.fields, conversational=conversational, image_blocks=image_blocks
        )
        return self.encoder.illustrate(row, parts, asked), asked

    def _after_prompt(self, prompt: list[int], whole: _Marked) -> _Marked:
        start = common_prefix_length(prompt, whole.input_ids)
        if self.completion_only_loss:
            whole.trained[:start] = False
        return replace(whole, merged=start < len(prompt))

    def _conversations(self, rows: list[Row], places: list[str]) -> list[_Marked]:
        read = [self._read(row, where) for row, where in zip(rows, places, strict=True)]
        chat = self.encoder.chat()
        conversations: list[list[Message]] = [[message for part in parts for message in part] for parts, _ in read]
        texts = [
            chat.render(messages, **rendering(asked)) for messages, (_, asked) in zip(conversations, read, strict=True)
        ]
        derive = self.assistant_only_loss and self.encoder.tokenizer.is_fast
        encoded = self._encoded(texts, [asked for _, asked in read], offsets=derive)
        marked = []
        for messages, text, (_, asked), tokens in zip(conversations, texts, read, encoded, strict=True):
            if self.assistant_only_loss:
                row = self._assistant_turns(chat, messages, text, asked, tokens)
            else:
                ids = list(tokens["input_ids"])
                unstopped = messages[-1]["role"] == "assistant" and not text.rstrip().endswith(chat.special_tokens)
                row = _Marked(ids, np.ones(len(ids), dtype=bool), unstopped=unstopped)
            marked.append(replace(row, images=self.encoder.stored_images(asked)))
        if self.format.kind == "messages":
            return marked
        prompts = self.encoder.sequences([parts[0] for parts, _ in read], [asked for _, asked in read], whole=False)
        return [self._after_prompt(prompt, row) for prompt, row in zip(prompts, marked, strict=True)]

    def _encoded(self, texts: list[str], asked: list[Asked], *, offsets: bool) -> list[Mapping[str, Any]]:
        """Of each rendered conversation `input_ids`, with `offsets` also where its tokens lie."""
        if self.encoder.images is None:
            encoded = self.encoder.ids(texts, special=False, offsets=offsets)
            return [{name: values[at] for name, values in encoded.items()} for at in range(len(texts))]
        options: dict[str, Any] = {"add_special_tokens": False}
        if offsets:
            options |= {"return_offsets_mapping": True, "return_text_replacement_offsets": True}
        return [
            self.encoder.images.encode(text, asks["images"], asks["where"], **options)
            for text, asks in zip(texts, asked, strict=True)
        ]

    def _assistant_turns(
        self,
        chat: ChatTemplate,
        messages: list[Message],
        text: str,
        asked: Asked,
        tokens: Mapping[str, Any],
    ) -> _Marked:
        ids, offsets, asked = list(tokens["input_ids"]), tokens.get("offset_mapping"), rendering(asked)
        marks = offsets is not None and chat.is_marked(asked["tools"])
        if marks and self.encoder.images is None:
            ids, trained = chat.encode_marked(messages, **asked)
        else:
            spans = chat.marked_spans(messages, **asked) if marks else chat.assistant_spans(messages, text, **asked)
            if offsets is None and self.encoder.images is not None:
                raise ConfigError(
                    f"{asked['where']}: assistant_only_loss with images needs to know where tokens lie in the text, which only a fast tokenizer tells. "
                    "Use one (use_fast=True), or set assistant_only_loss=False."
                )
            if offsets is not None:
                trained = tokens_in_spans(offsets, shifted(spans, tokens.get("text_replacement_offsets") or []))
            else:
                trained = tokens_in_spans_by_prefix(self.encoder.tokenizer, text, ids, spans)
        targets = np.flatnonzero(trained)
        unstopped = bool(targets.size) and ids[targets[-1]] not in chat.stop_ids
        return _Marked(ids, trained, unstopped=unstopped)


@dataclass(frozen=True)
class _Marked:
    """A row's tokens before it is cut: which are trained, the column of its images, whether a token crosses the prompt's end, whether the last trained token does not end a turn."""

    input_ids: list[int]
    trained: np.ndarray
    images: dict[str, list] = field(default_factory=dict)
    merged: bool = False
    unstopped: bool = False
