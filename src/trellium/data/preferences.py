"""Paired preferences to tokens: for each row the prompt, the chosen and the rejected completion, or the two whole sequences.

A policy (DPO) is trained on completions: rows longer than `max_length` are cut, and one whose prompt leaves no room is left out. A reward model judges
whole sequences, of which half would be another sequence: rows longer than `max_length` are left out. Rows, tokenization and counts are those of
supervised fine-tuning; see `trellium.data.encoding` and `trellium.data.pipeline`.

Source: the columns and the rules are TRL 1.16's, but that under `keep_end` TRL cuts the two sequences of a pair apart, so that the completions of
one row answer different prompts; here the prompt stays one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from datasets import Features

from trellium.data.branches import Branches
from trellium.data.encoding import Encoder, Processing, check_truncation_mode
from trellium.data.formats import RowFormat, detect_preferences
from trellium.data.pipeline import TOKENS, EncodedRow, PipelineOptions, Prepared, Row, Rows, encode_rows, open_rows
from trellium.data.report import Fate
from trellium.data.rows import Asked, Content, joined, read_preference, read_token_list
from trellium.data.token_checks import TokenLimits
from trellium.errors import ConfigError, DatasetError


@dataclass(frozen=True, kw_only=True)
class PreferenceOptions(PipelineOptions):
    """How preferences are prepared.

    Attributes:
        truncation_mode: which part of a longer row is kept, `keep_start` or `keep_end`.
        whole_sequences: give the two sequences, prompt included, and leave longer rows out instead of cutting them.

    Raises:
        ConfigError: options that cannot be, or cannot be together.
    """

    truncation_mode: str = "keep_start"
    whole_sequences: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_truncation_mode(self.truncation_mode)
        if self.whole_sequences and self.truncation_mode != "keep_start":
            raise ConfigError(
                f"truncation_mode={self.truncation_mode!r} cannot be with whole_sequences: longer rows are left out, not cut. Leave it unset."
            )


@dataclass(frozen=True)
class Preferences:
    """Rows with `chosen` and `rejected`, encoded as the prompt and two completions.

    Attributes:
        encoder: of texts or messages.
        format: of the rows.
        max_length: tokens of prompt and completion, at most.
        truncation_mode: which part is kept of more.
        limits: of the model.
    """

    encoder: Encoder
    format: RowFormat
    max_length: int | None
    truncation_mode: str
    limits: TokenLimits

    @property
    def features(self) -> Features:
        """`prompt_ids`, `chosen_ids`, `rejected_ids`, and the images of the prompt where rows have any."""
        return Features(prompt_ids=TOKENS, chosen_ids=TOKENS, rejected_ids=TOKENS, **self.encoder.image_features)

    def encode(self, rows: list[Row], places: list[str]) -> list[EncodedRow]:
        """One row of tokens a row."""
        if self.format.kind == "tokens":
            branches = [_read_branches(row, where) for row, where in zip(rows, places, strict=True)]
            asked = [tokens_asked(self.encoder, row, where) for row, where in zip(rows, places, strict=True)]
        else:
            contents, asked = read_preferences(rows, places, self.format, self.encoder)
            branches = encode_branches(self.encoder, contents, asked)
        encoded = []
        for origin, (whole, where, asks) in enumerate(zip(branches, places, asked, strict=True)):
            left = whole.cut(self.max_length, self.truncation_mode)
            chosen, rejected = left.completions
            values = {"prompt_ids": left.prompt, "chosen_ids": chosen, "rejected_ids": rejected}
            values |= self.encoder.stored_images(asks)
            cut = self.encoder.cuts_image(whole.prompt, left.prompt)
            encoded.append(left.encoded(values, whole, self.limits, where, origin, image_cut=cut))
        return encoded


@dataclass(frozen=True)
class PreferredSequences:
    """Rows with `chosen` and `rejected`, encoded as two whole sequences.

    Attributes:
        encoder: of texts or messages.
        format: of the rows.
        max_length: tokens of a sequence, at most; a row with a longer one is left out.
        limits: of the model.
    """

    encoder: Encoder
    format: RowFormat
    max_length: int | None
    limits: TokenLimits

    @property
    def features(self) -> Features:
        """`chosen_ids`, `rejected_ids`."""
        return Features(chosen_ids=TOKENS, rejected_ids=TOKENS)

    def encode(self, rows: list[Row], places: list[str]) -> list[EncodedRow]:
        """One row of tokens a row."""
        if self.format.kind == "tokens":
            sides = [
                [read_token_list(row, where, column) for row, where in zip(rows, places, strict=True)]
                for column in ("chosen_ids", "rejected_ids")
            ]
        else:
            contents, asked = read_preferences(rows, places, self.format, self.encoder)
            sides = [
                self.encoder.sequences([joined(content[0], content[side]) for content in contents], asked)
                for side in (1, 2)
            ]
        return [
            self._judged(chosen, rejected, where, origin)
            for origin, (chosen, rejected, where) in enumerate(zip(*sides, places, strict=True))
        ]

    def _judged(self, chosen: list[int], rejected: list[int], where: str, origin: int) -> EncodedRow:
        longest = max(len(chosen), len(rejected))
        fate = Fate.KEPT if chosen and rejected else Fate.NO_COMPLETION
        if self.max_length is not None and longest > self.max_length:
            fate = Fate.TOO_LONG
        if fate is Fate.KEPT:
            self.limits.check(chosen, where)
            self.limits.check(rejected, where)
        values = {"chosen_ids": chosen, "rejected_ids": rejected}
        return EncodedRow(values, fate, len(chosen) + len(rejected), 0, longest, 0, origin)


def read_preferences(
    rows: list[Row], places: list[str], format: RowFormat, encoder: Encoder
) -> tuple[list[tuple[Content, ...]], list[Asked]]:
    """Of each row prompt, chosen and rejected, with places for the prompt's images, and what it asks of the chat template.

    Raises:
        DatasetError: a row that is wrong.
    """
    contents, asked = [], []
    for row, where in zip(rows, places, strict=True):
        content, asks = read_preference(
            row, where, format.fields, conversational=format.conversational, image_blocks=bool(format.images)
        )
        contents.append(encoder.illustrate(row, content, asks, only_first=True))
        asked.append(asks)
    return contents, asked


def encode_branches(
    encoder: Encoder, contents: Sequence[tuple[Content, ...]], asked: Sequence[Asked]
) -> list[Branches]:
    """Prompts with their completions, as many in each row, to tokens.

    Raises:
        DatasetError: messages without a prompt, for which no chat template writes a beginning; images that the answers do not share.
    """
    for (prompt, *_), asks in zip(contents, asked, strict=True):
        if encoder.conversational and not prompt:
            raise DatasetError(
                f"{asks['where']}: 'chosen' and 'rejected' do not begin with the same message, so there is no prompt. "
                "Give the prompt in both, or as 'prompt'."
            )
    prompts = encoder.sequences([content[0] for content in contents], asked, whole=False)
    wholes = [
        encoder.sequences([joined(content[0], content[branch]) for content in contents], asked)
        for branch in range(1, len(contents[0]))
    ]
    branches = [Branches.split(prompt, of_row) for prompt, *of_row in zip(prompts, *wholes, strict=True)]
    for each, asks in zip(branches, asked, strict=True):
        if any(encoder.cuts_image(sequence, each.prompt) for sequence in each.sequences):
            raise DatasetError(
                f"{asks['where']}: the chat template writes the prompt's images otherwise when an answer follows, so that the answers do not share them. "
                "Set another template with chat_template_path."
            )
    return branches


def tokens_asked(encoder: Encoder, row: Row, where: str) -> Asked:
    """What is known of a row of tokens: its place, and its images where rows have any."""
    asked: Asked = {"where": where}
    encoder.illustrate(row, ("",), asked)
    return asked


def _read_branches(row: Row, where: str) -> Branches:
    prompt, *completions = (read_token_list(row, where, c) for c in ("prompt_ids", "chosen_ids", "rejected_ids"))
    return Branches(prompt, tuple(completions))


def prepare_preferences(dataset: Rows, tokenizer: Processing, options: PreferenceOptions) -> Rows:
    """Preferences as the trainers take them; see `prepare_preferences_with_report`. What was done is logged in one line."""
    return prepare_preferences_with_report(dataset, tokenizer, options)[0]


def prepare_preferences_with_report(dataset: Rows, tokenizer: Processing, options: PreferenceOptions) -> Prepared:
    """Preferences as the trainers take them, and the account of what was done.

    Args:
        dataset: rows with `chosen` and `rejected` (`trellium.data.formats`). An `IterableDataset` is prepared as it is read.
        tokenizer: the model's, or its processor.
        options: how.

    Returns:
        A dataset with the columns `prompt_ids`, `chosen_ids` and `rejected_ids` (completions without the prompt; of a text they end with the
        end-of-sequence token), or with `whole_sequences` the last two, prompt included; and those of `keep_columns` that are there. There is no
        account for an `IterableDataset`.

    Raises:
        DatasetError: no rows, a row that is wrong, or no row with anything to train.
        ConfigError: options that do not fit the dataset.
    """
    rows, columns, first = open_rows(dataset, options)
    format = detect_preferences(columns, first, whole_sequences=options.whole_sequences, name=options.called)
    if options.whole_sequences and format.images:
        raise ConfigError(
            f"{options.called}: the rows have images ('{format.images}'), which reward models do not read here, nor in TRL, where they are passed over in "
            f"silence. To judge the text alone, take them away: dataset.remove_columns(['{format.images}'])."
        )
    encoder = Encoder.of(tokenizer, format, options)
    kind: Preferences | PreferredSequences
    if options.whole_sequences:
        kind = PreferredSequences(encoder, format, options.max_length, options.limits)
    else:
        kind = Preferences(encoder, format, options.max_length, options.truncation_mode, options.limits)
    return encode_rows(rows, columns, kind, options)
