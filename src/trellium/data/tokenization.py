"""Rows of any accepted kind to tokens and labels, a batch at a time.

The rules, the same for every kind:

- A text or a prompt with its completion gets the tokenizer's own special tokens and ends with exactly one end-of-sequence token; a conversation is
  what its chat template writes, with nothing added.
- A prompt and its completion are tokenized together; the completion begins where the tokens of the prompt alone (with the generation
  prompt, for messages) stop agreeing with them. Where that is before the prompt's end, the tokenizer merged across the border, and the
  row is counted.
- Labels are the tokens, -100 where a token is not a target: outside the completion, outside the assistant's turns, and the first
  token, which nothing predicts. They are made here and nowhere else.
- Then the row is cut to `max_length`. A row in which nothing is left to train gets a `Fate` that says why.

Cost: the tokenizer's time; rendering a conversation adds about 70 µs, and as much again twice an assistant turn where masks are derived.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trellium.data.rows import (
    RowFormat,
    place_of,
    read_messages,
    read_prompt_completion,
    read_template_options,
    read_text,
    read_tokens,
    read_tools,
    shorten,
)
from trellium.data.sequence import IGNORE_INDEX
from trellium.data.templates import ChatTemplate, common_prefix_length, tokens_in_spans, tokens_in_spans_by_prefix
from trellium.data.token_checks import NO_LIMITS, TokenLimits, check_labels
from trellium.errors import DatasetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Fate(enum.IntEnum):
    """Whether a row is trained on, and if not, why."""

    KEPT = 0
    TOO_SHORT = 1
    ALL_MASKED = 2
    TRUNCATED_AWAY = 3


FATE_REASONS = {
    Fate.TOO_SHORT: "fewer than two tokens, so nothing to predict",
    Fate.ALL_MASKED: "every token masked",
    Fate.TRUNCATED_AWAY: "all trained tokens beyond max_length",
}


@dataclass(frozen=True)
class TokenizeRows:
    """A batch of rows (columns of lists, and their indices) to a batch of tokens: the function that `datasets` maps.

    It is a value: two with equal fields have the same fingerprint, so what was tokenized once is found again.

    Attributes:
        tokenizer: the model's.
        format: the kind of the rows.
        eos_token_id: ends texts and completions.
        max_length: tokens a row may have, at most; None for no limit.
        truncation_mode: which end of a longer row is kept, `keep_start` or `keep_end`.
        completion_only_loss: train the completion only.
        assistant_only_loss: train the assistant's turns only.
        formatting_func: from a row to its text; the columns are then its own affair.
        name: of the dataset, for errors.
        limits: of the model; a row beyond them is an error.
        streaming: leave rows that are not kept out, and the counts with them, because nobody can go back for them.
        revision: raised when the result for the same row changes, so that results of older versions are not found.
    """

    tokenizer: PreTrainedTokenizerBase
    format: RowFormat
    eos_token_id: int | None
    max_length: int | None
    truncation_mode: str
    completion_only_loss: bool
    assistant_only_loss: bool
    formatting_func: Callable[[dict], str] | None
    name: str
    limits: TokenLimits = NO_LIMITS
    streaming: bool = False
    revision: int = 2

    def __call__(self, batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        rows = [dict(zip(batch, fields, strict=True)) for fields in zip(*batch.values(), strict=True)]
        places = [place_of(row, index, self.name) for row, index in zip(rows, indices, strict=True)]
        if self.format.kind == "tokens":
            encoded = [self._tokens(row, where) for row, where in zip(rows, places, strict=True)]
        elif self.format.kind == "text":
            encoded = self._texts(rows, places)
        elif self.format.conversational:
            encoded = self._conversations(rows, places)
        else:
            encoded = self._prompt_completions(rows, places)

        columns: dict[str, list] = {key: [] for key in ("input_ids", "labels", "cut", "fate", "merged", "unstopped")}
        for row, where in zip(encoded, places, strict=True):
            fate, cut, ids, labels = self._finish(row.input_ids, row.trained, where)
            if self.streaming and fate is not Fate.KEPT:
                continue
            for key, field in zip(columns, (ids, labels, cut, int(fate), row.merged, row.unstopped), strict=True):
                columns[key].append(field)
        if self.streaming:
            if not columns["input_ids"] and indices and indices[0] == 0:
                raise DatasetError(
                    f"{self.name}: not one of the first {len(rows)} rows has a token to train. The first, {places[0]}, has "
                    f"{FATE_REASONS[self._finish(encoded[0].input_ids, encoded[0].trained, places[0])[0]]}. "
                    "Check the masks and the loss options, or raise max_length."
                )
            return {"input_ids": columns["input_ids"], "labels": [labels.tolist() for labels in columns["labels"]]}
        return columns

    def _finish(self, ids: list[int], trained: np.ndarray, where: str) -> tuple[Fate, int, list[int], np.ndarray]:
        """A row cut to `max_length`, with its labels, how many tokens were cut and what becomes of it."""
        cut = 0 if self.max_length is None else max(0, len(ids) - self.max_length)
        trained[:1] = False
        had_targets = bool(trained.any())
        if cut:
            kept = slice(0, self.max_length) if self.truncation_mode == "keep_start" else slice(cut, None)
            ids, trained = ids[kept], trained[kept]
            trained[:1] = False
        self.limits.check(ids, where)
        labels = np.where(trained, np.asarray(ids, dtype=np.int32), np.int32(IGNORE_INDEX)).astype(np.int32)
        if trained.any():
            fate = Fate.KEPT
        elif had_targets:
            fate = Fate.TRUNCATED_AWAY
        else:
            fate = Fate.TOO_SHORT if len(ids) < 2 else Fate.ALL_MASKED
        return fate, cut, ids, labels

    def _encode(self, texts: list[str], *, special: bool, offsets: bool = False) -> dict[str, list]:
        return self.tokenizer(
            texts,
            add_special_tokens=special,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=offsets,
            verbose=False,
        )

    def _encode_plain(self, texts: list[str], *, eos: bool) -> list[list[int]]:
        """Tokens of texts with the tokenizer's own special tokens, the beginning at most once, the end once (`eos`) or not at all."""
        bos, bos_id = self.tokenizer.bos_token, self.tokenizer.bos_token_id
        rows = []
        for text, ids in zip(texts, self._encode(texts, special=True)["input_ids"] if texts else [], strict=True):
            if (
                bos_id is not None
                and ids[:2] == [bos_id, bos_id]
                and text.startswith(bos)
                and not text.startswith(bos * 2)
            ):
                ids = ids[1:]
            if ids[-2:] == [self.eos_token_id] * 2 and not text.endswith(
                self.tokenizer.convert_ids_to_tokens(ids[-2:])[0] * 2
            ):
                ids = ids[:-1]  # the text brought one, and the tokenizer added its own
            ended = bool(ids) and ids[-1] == self.eos_token_id
            if eos and not ended:
                ids = [*ids, self.eos_token_id]
            elif not eos and ended and not text.endswith(self.tokenizer.convert_ids_to_tokens(self.eos_token_id)):
                ids = ids[:-1]
            rows.append(ids)
        return rows

    def _tokens(self, row: dict, where: str) -> _Encoded:
        read = read_tokens(row, where, (c for c in self.format.columns if not c.startswith("_")))
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
        return _Encoded(ids, trained)

    def _texts(self, rows: list[dict], places: list[str]) -> list[_Encoded]:
        texts = [
            self._format(row, where)
            if self.formatting_func
            else read_text(row.get(self.format.field), where, self.format.field)
            for row, where in zip(rows, places, strict=True)
        ]
        return [_Encoded(ids, np.ones(len(ids), dtype=bool)) for ids in self._encode_plain(texts, eos=True)]

    def _format(self, row: dict, where: str) -> str:
        assert self.formatting_func is not None
        text = self.formatting_func(row)
        if not isinstance(text, str):
            raise DatasetError(
                f"{where}: formatting_func must return the row's text, a str, got {type(text).__name__} {shorten(text)}. It is called with one row, not with a batch."
            )
        return text

    def _prompt_completions(self, rows: list[dict], places: list[str]) -> list[_Encoded]:
        pairs = [
            read_prompt_completion(row, where, conversational=False) for row, where in zip(rows, places, strict=True)
        ]
        prompts = self._encode_plain([str(prompt) for prompt, _ in pairs], eos=False)
        wholes = self._encode_plain([f"{prompt}{completion}" for prompt, completion in pairs], eos=True)
        return [self._after_prompt(prompt, whole) for prompt, whole in zip(prompts, wholes, strict=True)]

    def _after_prompt(self, prompt: list[int], whole: list[int], trained: np.ndarray | None = None) -> _Encoded:
        trained = np.ones(len(whole), dtype=bool) if trained is None else trained
        start = common_prefix_length(prompt, whole)
        if self.completion_only_loss:
            trained[:start] = False
        return _Encoded(whole, trained, merged=start < len(prompt))

    def _conversations(self, rows: list[dict], places: list[str]) -> list[_Encoded]:
        chat = ChatTemplate(self.tokenizer, name=self.name)
        split = self.format.kind == "prompt-completion"
        conversations: list[_Conversation] = []
        for row, where in zip(rows, places, strict=True):
            tools, options = (
                read_tools(row.get("tools"), where),
                read_template_options(row.get("chat_template_kwargs"), where),
            )
            prompt: list[dict[str, Any]] = []
            if split:
                read, completion = read_prompt_completion(row, where, conversational=True)
                prompt, messages = list(read), [*read, *completion]  # type: ignore[arg-type, list-item]
            else:
                messages = read_messages(row.get(self.format.field), where, self.format.field)
            asked: dict[str, Any] = {"where": where, "tools": tools, "options": options}
            prompt_text = ""
            if split:
                unfinished = prompt[-1]["role"] == "assistant"
                prompt_text = chat.render(
                    prompt, generation_prompt=not unfinished, continue_final_message=unfinished, **asked
                )
            conversations.append(_Conversation(messages, chat.render(messages, **asked), prompt_text, asked))

        derive = self.assistant_only_loss and self.tokenizer.is_fast
        whole = self._encode([c.text for c in conversations], special=False, offsets=derive)
        prompts = self._encode([c.prompt_text for c in conversations], special=False)["input_ids"] if split else None

        encoded = []
        for at, conversation in enumerate(conversations):
            ids = list(whole["input_ids"][at])
            trained = np.ones(len(ids), dtype=bool)
            unstopped = False
            if self.assistant_only_loss:
                ids, trained = self._assistant_mask(
                    chat, conversation, ids, whole["offset_mapping"][at] if derive else None
                )
                targets = np.flatnonzero(trained)
                unstopped = bool(targets.size) and ids[targets[-1]] not in chat.stop_ids
            row_encoded = (
                self._after_prompt(prompts[at], ids, trained) if prompts is not None else _Encoded(ids, trained)
            )
            encoded.append(_Encoded(row_encoded.input_ids, row_encoded.trained, row_encoded.merged, unstopped))
        return encoded

    def _assistant_mask(
        self, chat: ChatTemplate, conversation: _Conversation, ids: list[int], offsets: list[tuple[int, int]] | None
    ) -> tuple[list[int], np.ndarray]:
        if chat.is_marked(conversation.asked["tools"]) and offsets is not None:
            return chat.encode_marked(conversation.messages, **conversation.asked)
        spans = chat.assistant_spans(conversation.messages, conversation.text, **conversation.asked)
        if offsets is not None:
            return ids, tokens_in_spans(offsets, spans)
        return ids, tokens_in_spans_by_prefix(self.tokenizer, conversation.text, ids, spans)


@dataclass(frozen=True)
class _Conversation:
    messages: list[dict[str, Any]]
    text: str
    prompt_text: str
    asked: dict[str, Any]


@dataclass(frozen=True)
class _Encoded:
    """A row's tokens before it is cut: which are trained, whether a token crosses the prompt's end, whether the last trained token does not end a turn."""

    input_ids: list[int]
    trained: np.ndarray
    merged: bool = False
    unstopped: bool = False
