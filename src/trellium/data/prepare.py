"""A dataset of any kind that supervised fine-tuning accepts to one with the columns `input_ids` and `labels`, and an account of what was left out.

The way is that of every dataset, `trellium.data.pipeline`; which kinds there are, `trellium.data.formats`; how a row is encoded,
`trellium.data.tokenization`. Preferences and judged answers have their own doors, `trellium.data.preferences` and `trellium.data.unpaired`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trellium.data.encoding import TRUNCATION_MODES, Encoder, Processing, check_truncation_mode
from trellium.data.formats import RowFormat, check_options, detect_format
from trellium.data.pipeline import PipelineOptions, Prepared, Row, Rows, encode_rows, open_rows
from trellium.data.prepared import check_prepared
from trellium.data.report import PreparationReport
from trellium.data.tokenization import Supervised
from trellium.errors import ConfigError

__all__ = [
    "TRUNCATION_MODES",
    "PreparationReport",
    "PrepareOptions",
    "prepare_dataset",
    "prepare_with_report",
]


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(PipelineOptions):
    """How a dataset is prepared for supervised fine-tuning.

    Attributes:
        truncation_mode: which part of a longer row is kept, `keep_start` or `keep_end`.
        completion_only_loss: train completions only; None means: where the dataset has them.
        assistant_only_loss: train only what the assistant wrote, of conversations.
        dataset_text_field: the text column of a language-modelling dataset.
        formatting_func: from a row to its text; the row's columns are then free.
        skip_prepare: rows have `input_ids` and `labels` already: they are checked and otherwise left as they are.

    Raises:
        ConfigError: options that cannot be, or cannot be together.
    """

    truncation_mode: str = "keep_start"
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    dataset_text_field: str = "text"
    formatting_func: Callable[[dict], str] | None = None
    skip_prepare: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_truncation_mode(self.truncation_mode)
        if self.formatting_func is not None and self.completion_only_loss:
            raise ConfigError(
                "completion_only_loss=True cannot be with formatting_func: in the one text it returns nothing marks the completion. "
                "Map the dataset to 'prompt' and 'completion' columns instead."
            )


def prepare_dataset(dataset: Rows, tokenizer: Processing, options: PrepareOptions) -> Rows:
    """The dataset as the trainers take it; see `prepare_with_report`. What was done is logged in one line."""
    return prepare_with_report(dataset, tokenizer, options)[0]


def prepare_with_report(dataset: Rows, tokenizer: Processing, options: PrepareOptions) -> Prepared:
    """The dataset as the trainers take it, and the account of what was done.

    Args:
        dataset: rows of an accepted kind (`trellium.data.formats`). An `IterableDataset` is prepared as it is read.
        tokenizer: the model's, or its processor.
        options: how.

    Returns:
        A dataset with the columns `input_ids` and `labels` (`[n]` each; -100 is not a target, and the first token never is one), with `images` where
        rows have any, and its account. There is no account for an `IterableDataset`, nor with `skip_prepare`.

    Raises:
        DatasetError: no rows, a row that is wrong, or no row with anything to train.
        ConfigError: options that do not fit the dataset.
    """
    rows, columns, first = open_rows(dataset, options)
    if options.skip_prepare:
        return check_prepared(rows, columns, options.limits, options.called), None
    return encode_rows(rows, columns, _kind(tokenizer, columns, first, options), options)


def _kind(tokenizer: Processing, columns: list[str], first: Row, options: PrepareOptions) -> Supervised:
    """How the rows, of which `first` is one, are read and encoded."""
    if options.formatting_func is not None:
        format = RowFormat("text", False, tuple(columns))
    else:
        format = detect_format(columns, first, text_field=options.dataset_text_field, name=options.called)
    completion_only = check_options(
        format,
        name=options.called,
        completion_only_loss=options.completion_only_loss,
        assistant_only_loss=options.assistant_only_loss,
    )
    return Supervised(
        encoder=Encoder.of(tokenizer, format, options),
        format=format,
        max_length=options.max_length,
        truncation_mode=options.truncation_mode,
        completion_only_loss=completion_only,
        assistant_only_loss=options.assistant_only_loss,
        formatting_func=options.formatting_func,
        limits=options.limits,
    )
