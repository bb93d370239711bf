"""Rows of supervised fine-tuning to tokens and labels.

- Labels are the tokens, -100 where a token is not a target: outside the completion, outside the assistant's turns, and the first
  token, which nothing predicts. They are made here and nowhere else.
- Then the row is cut to `max_length`; what is left of a turn or a completion is trained. A row in which nothing is left to train gets a
  `Fate` that says why.

Cost: the tokenizer's time; rendering a conversation adds about 70 µs, and as much again twice an assistant turn where masks are derived.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Features

from trellium.data.encoding import Encoder
from trellium.data.formats import RowFormat
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
    shorten,
)
from trellium.data.sequence import IGNORE_INDEX
from trellium.data.templates import ChatTemplate, tokens_in_spans, tokens_in_spans_by_prefix
from trellium.data.token_checks import TokenLimits, check_labels
from trellium.errors import DatasetError


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
        """`input_ids`, `labels`."""
        return Features(input_ids=TOKENS, labels=TOKENS)

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
        if targets:
            fate = Fate.KEPT
        elif had_targets:
            fate = Fate.TRUNCATED_AWAY
        else:
            fate = Fate.TOO_SHORT if len(ids) < 2 else Fate.ALL_MASKED
        values = {"input_ids": ids, "labels": labels}
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
        return _Marked(ids, trained)

    def _texts(self, rows: list[Row], places: list[str]) -> list[_Marked]:
        field = self.format.field
        texts = [
            self._formatted(row, where) if self.formatting_func else read_text(row.get(field), where, field)
            for row, where in zip(rows, places, strict=True)
        ]
        return [
            _Marked(ids, np.ones(len(ids), dtype=bool))
            for ids in self.encoder.sequences(texts, [{"where": where} for where in places])
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
        read = [
            read_contents(row, where, self.format.fields, conversational=False)
            for row, where in zip(rows, places, strict=True)
        ]
        asked = [asks for _, asks in read]
        prompts = self.encoder.sequences([parts[0] for parts, _ in read], asked, whole=False)
        wholes = self.encoder.sequences([joined(*parts) for parts, _ in read], asked)
        return [
            self._after_prompt(prompt, _Marked(whole, np.ones(len(whole), dtype=bool)))
            for prompt, whole in zip(prompts, wholes, strict=True)
        ]

    def _after_prompt(self, prompt: list[int], whole: _Marked) -> _Marked:
        start = common_prefix_length(prompt, whole.input_ids)
        if self.completion_only_loss:
            whole.trained[:start] = False
        return _Marked(whole.input_ids, whole.trained, merged=start < len(prompt), unstopped=whole.unstopped)

    def _conversations(self, rows: list[Row], places: list[str]) -> list[_Marked]:
        read: list[tuple[tuple[Any, ...], Asked]] = [
            read_contents(row, where, self.format.fields, conversational=True)
            for row, where in zip(rows, places, strict=True)
        ]
        chat = self.encoder.chat()
        conversations: list[list[Message]] = [[message for part in parts for message in part] for parts, _ in read]
        texts = [chat.render(messages, **asked) for messages, (_, asked) in zip(conversations, read, strict=True)]
        derive = self.assistant_only_loss and self.encoder.tokenizer.is_fast
        encoded = self.encoder.ids(texts, special=False, offsets=derive)
        marked = []
        for at, (messages, text, (_, asked)) in enumerate(zip(conversations, texts, read, strict=True)):
            ids = list(encoded["input_ids"][at])
            if self.assistant_only_loss:
                offsets = encoded["offset_mapping"][at] if derive else None
                row = self._assistant_turns(chat, messages, text, asked, ids, offsets)
            else:
                unstopped = messages[-1]["role"] == "assistant" and not text.rstrip().endswith(chat.special_tokens)
                row = _Marked(ids, np.ones(len(ids), dtype=bool), unstopped=unstopped)
            marked.append(row)
        if self.format.kind == "messages":
            return marked
        prompts = self.encoder.sequences([parts[0] for parts, _ in read], [asked for _, asked in read], whole=False)
        return [self._after_prompt(prompt, row) for prompt, row in zip(prompts, marked, strict=True)]

    def _assistant_turns(
        self,
        chat: ChatTemplate,
        messages: list[Message],
        text: str,
        asked: Asked,
        ids: list[int],
        offsets: list[tuple[int, int]] | None,
    ) -> _Marked:
        if chat.is_marked(asked["tools"]) and offsets is not None:
            ids, trained = chat.encode_marked(messages, **asked)
        else:
            spans = chat.assistant_spans(messages, text, **asked)
            if offsets is not None:
                trained = tokens_in_spans(offsets, spans)
            else:
                trained = tokens_in_spans_by_prefix(self.encoder.tokenizer, text, ids, spans)
        targets = np.flatnonzero(trained)
        unstopped = bool(targets.size) and ids[targets[-1]] not in chat.stop_ids
        return _Marked(ids, trained, unstopped=unstopped)


@dataclass(frozen=True)
class _Marked:
    """A row's tokens before it is cut: which are trained, whether a token crosses the prompt's end, whether the last trained token does not end a turn."""

    input_ids: list[int]
    trained: np.ndarray
    merged: bool = False
    unstopped: bool = False
