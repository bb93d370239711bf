"""A dataset of any accepted kind to one with the columns `input_ids` and `labels`, and an account of what was left out.

One pass through `datasets.map`, cached by the content of dataset, tokenizer and options, then one look at the counts that pass wrote
beside the tokens: so a second run says the same without tokenizing again. Rows in which nothing would be trained are
left out and counted; if that is all of them, it is an error, because such a run would finish without having learned anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from datasets import Dataset, DatasetDict, Features, IterableDataset, IterableDatasetDict, List, Value

from trellium.data.prepared import check_prepared
from trellium.data.rows import RowFormat, check_options, detect_format, place_of
from trellium.data.sequence import IGNORE_INDEX
from trellium.data.token_checks import NO_LIMITS, TokenLimits
from trellium.data.tokenization import FATE_REASONS, Fate, TokenizeRows
from trellium.errors import ConfigError, DatasetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

TRUNCATION_MODES = ("keep_start", "keep_end")

_FEATURES = Features(
    {
        "input_ids": List(Value("int32")),
        "labels": List(Value("int32")),
        "cut": Value("int32"),
        "fate": Value("int8"),
        "merged": Value("bool"),
        "unstopped": Value("bool"),
    }
)
_PREPARED = ("input_ids", "labels")
_COUNTS = ("cut", "fate", "merged", "unstopped")
_WAYS_OUT = {
    Fate.TOO_SHORT: "give longer texts",
    Fate.ALL_MASKED: "check the row's masks, or the options completion_only_loss and assistant_only_loss",
    Fate.TRUNCATED_AWAY: "raise max_length, or shorten the prompts",
}


@dataclass(frozen=True)
class PreparationReport:
    """What preparation did with a dataset's rows.

    Attributes:
        name: of the dataset.
        rows: rows that came.
        kept: rows that are trained on.
        tokens: tokens of the rows kept, after truncation.
        trained_tokens: of these, the targets.
        longest: tokens of the longest row kept.
        truncated: rows that were longer than `max_length`, kept or not.
        tokens_cut: tokens cut from these.
        dropped: rows left out, by reason; no entry for a reason without rows.
        examples: for each reason the places of up to three of its rows.
        merged_prompts: rows whose prompt is not a prefix of prompt and completion in tokens.
        unstopped: rows whose trained tokens do not end with a special token, so the model does not learn there to end its turn.
    """

    name: str
    rows: int
    kept: int
    tokens: int
    trained_tokens: int
    longest: int
    truncated: int
    tokens_cut: int
    dropped: dict[Fate, int]
    examples: dict[Fate, tuple[str, ...]]
    merged_prompts: int
    unstopped: int

    def line(self) -> str:
        """The account in one line."""
        parts = [
            f"{self.name}: {self.kept} of {self.rows} rows, {self.tokens} tokens, {self.trained_tokens} of them trained"
        ]
        if self.truncated:
            parts.append(f"{_rows(self.truncated)} truncated by {self.tokens_cut} tokens in all")
        parts += [
            f"dropped {_rows(count)} with {FATE_REASONS[fate]} (e.g. {self.examples[fate][0]})"
            for fate, count in sorted(self.dropped.items())
        ]
        return "; ".join(parts) + "."


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """How a dataset is prepared.

    Attributes:
        max_length: a longer row is cut to so many tokens; None leaves all as they are.
        truncation_mode: which part of a longer row is kept, `keep_start` or `keep_end`.
        completion_only_loss: train completions only; None means: where the dataset has them.
        assistant_only_loss: train only what the assistant wrote, of conversations.
        dataset_text_field: the text column of a language-modelling dataset.
        eos_token: ends texts and completions in place of the tokenizer's own.
        num_proc: processes that tokenize.
        formatting_func: from a row to its text; the row's columns are then free.
        skip_prepare: rows have `input_ids` and `labels` already: they are checked and otherwise left as they are.
        limits: of the model; a row beyond them is an error.
        source: what to call the rows' origin in errors, e.g. a file; `name` if None.
        name: what to call the dataset in the log and on the progress bar.

    Raises:
        ConfigError: options that cannot be, or cannot be together.
    """

    max_length: int | None
    truncation_mode: str = "keep_start"
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    dataset_text_field: str = "text"
    eos_token: str | None = None
    num_proc: int | None = None
    formatting_func: Callable[[dict], str] | None = None
    skip_prepare: bool = False
    limits: TokenLimits = NO_LIMITS
    source: str | None = None
    name: str = "train"

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 2:
            raise ConfigError(
                f"max_length={self.max_length}, but a row needs two tokens for one to be predicted. Set at least 2, or None for no limit."
            )
        if self.truncation_mode not in TRUNCATION_MODES:
            raise ConfigError(
                f"truncation_mode={self.truncation_mode!r} is not one of {', '.join(map(repr, TRUNCATION_MODES))}."
            )
        if self.formatting_func is not None and self.completion_only_loss:
            raise ConfigError(
                "completion_only_loss=True cannot be with formatting_func: in the one text it returns nothing marks the completion. "
                "Map the dataset to 'prompt' and 'completion' columns instead."
            )

    @property
    def called(self) -> str:
        """What the dataset is called in errors."""
        return self.source or self.name


def prepare_dataset(
    dataset: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase, options: PrepareOptions
) -> Dataset | IterableDataset:
    """The dataset as the trainers take it; see `prepare_with_report`. What was done is logged in one line."""
    return prepare_with_report(dataset, tokenizer, options)[0]


def prepare_with_report(
    dataset: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase, options: PrepareOptions
) -> tuple[Dataset | IterableDataset, PreparationReport | None]:
    """The dataset as the trainers take it, and the account of what was done.

    Args:
        dataset: rows of an accepted kind (`trellium.data.rows`). An `IterableDataset` is prepared as it is read.
        tokenizer: the model's.
        options: how.

    Returns:
        A dataset with the columns `input_ids` and `labels` (`[n]` each; -100 is not a target, and the first token never is one) and its
        account. There is no account for an `IterableDataset`, nor with `skip_prepare`.

    Raises:
        DatasetError: no rows, a row that is wrong, or no row with anything to train.
        ConfigError: options that do not fit the dataset.
    """
    _check_dataset(dataset, options.called)
    dataset = dataset.with_format(None)
    first = next(iter(dataset), None)
    if first is None:
        raise DatasetError(
            f"{options.called}: the dataset is empty. Training needs at least one row: check the file, the split, and any filter."
        )
    columns = list(dataset.column_names or first)
    if options.skip_prepare:
        return check_prepared(dataset, columns, options.limits, options.called), None
    tokenize = _tokenization(tokenizer, columns, first, options, streaming=isinstance(dataset, IterableDataset))
    read = list(tokenize.format.columns)
    dataset = dataset.select_columns(read)
    if isinstance(dataset, IterableDataset):
        features = Features({key: _FEATURES[key] for key in _PREPARED})
        return dataset.map(tokenize, with_indices=True, batched=True, remove_columns=read, features=features), None
    processes = options.num_proc or 1
    tokenized = dataset.map(
        tokenize,
        with_indices=True,
        batched=True,
        remove_columns=read,
        features=_FEATURES,
        num_proc=processes if processes > 1 and len(dataset) >= 2 * processes else None,
        desc=f"Tokenizing {options.name}",
    )
    return _keep_trainable(tokenized, dataset, options)


def _check_dataset(dataset: object, called: str) -> None:
    if isinstance(dataset, dict | DatasetDict | IterableDatasetDict):
        splits = ", ".join(map(repr, dataset)) or "none"
        raise DatasetError(
            f"{called}: expected one dataset, got a dict of them ({splits}). Choose one: dataset['train']."
        )
    if not isinstance(dataset, Dataset | IterableDataset):
        raise DatasetError(
            f"{called}: expected a datasets.Dataset or IterableDataset, got {type(dataset).__name__}. datasets.Dataset.from_list(rows) makes one from a list of dicts."
        )
    if isinstance(dataset, Dataset) and dataset.format["type"] == "custom":
        raise ConfigError(
            f"{called}: the dataset has a transform (with_transform or set_transform), which would run after tokenization. Apply it with dataset.map, or reset it with dataset.with_format(None)."
        )


def _tokenization(
    tokenizer: PreTrainedTokenizerBase, columns: list[str], first: dict, options: PrepareOptions, *, streaming: bool
) -> TokenizeRows:
    """What is mapped over the rows, of which `first` is one."""
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
    needs_eos = format.kind != "tokens" and not format.conversational
    return TokenizeRows(
        tokenizer=tokenizer,
        format=format,
        eos_token_id=_eos_token_id(tokenizer, options.eos_token, needed=needs_eos),
        max_length=options.max_length,
        truncation_mode=options.truncation_mode,
        completion_only_loss=completion_only,
        assistant_only_loss=options.assistant_only_loss,
        formatting_func=options.formatting_func,
        name=options.called,
        limits=options.limits,
        streaming=streaming,
    )


def _rows(count: int) -> str:
    return f"{count} row" if count == 1 else f"{count} rows"


def _keep_trainable(tokenized: Dataset, rows: Dataset, options: PrepareOptions) -> tuple[Dataset, PreparationReport]:
    """The rows with something to train, and the account; `rows` are those `tokenized` was made of, in the same order."""
    table = tokenized.with_format("arrow").select_columns(list(_COUNTS))[:]
    counts = {name: np.asarray(table[name]) for name in _COUNTS}
    fates = counts["fate"]
    dropped, examples = {}, {}
    for fate in FATE_REASONS:
        where = np.flatnonzero(fates == fate)
        if where.size:
            dropped[fate] = int(where.size)
            examples[fate] = tuple(place_of(rows[int(index)], int(index), options.called) for index in where[:3])
    kept = np.flatnonzero(fates == Fate.KEPT)
    if not kept.size:
        why = "; ".join(
            f"{_rows(count)} with {FATE_REASONS[fate]} (e.g. {', '.join(examples[fate])}): {_WAYS_OUT[fate]}"
            for fate, count in dropped.items()
        )
        raise DatasetError(f"{options.called}: no row has a token to train: {why}.")
    prepared = tokenized.select_columns(list(_PREPARED))
    if kept.size < len(fates):
        prepared = prepared.select(kept)
    tokens, trained, longest = _count_tokens(prepared)
    report = PreparationReport(
        name=options.name,
        rows=len(fates),
        kept=int(kept.size),
        tokens=tokens,
        trained_tokens=trained,
        longest=longest,
        truncated=int((counts["cut"] > 0).sum()),
        tokens_cut=int(counts["cut"].sum()),
        dropped=dropped,
        examples=examples,
        merged_prompts=int(counts["merged"].sum()),
        unstopped=int(counts["unstopped"].sum()),
    )
    _log(report, options.called)
    return prepared, report


def _count_tokens(prepared: Dataset) -> tuple[int, int, int]:
    """Tokens of all rows, the targets among them, and the tokens of the longest row."""
    tokens = trained = longest = 0
    for batch in prepared.with_format("arrow").iter(batch_size=10_000):
        lengths = batch["input_ids"].combine_chunks().value_lengths().to_numpy()
        tokens += int(lengths.sum())
        longest = max(longest, int(lengths.max()))
        trained += int((batch["labels"].combine_chunks().flatten().to_numpy() != IGNORE_INDEX).sum())
    return tokens, trained, longest


def _log(report: PreparationReport, called: str) -> None:
    logger.log(logging.WARNING if report.truncated or report.dropped else logging.INFO, report.line())
    if report.merged_prompts:
        logger.warning(
            "%s: in %d of %d rows the tokens of the prompt are not a prefix of those of prompt and completion; the completion is trained from where they part. "
            "A prompt that ends in white space is the usual cause: move it to the completion.",
            called,
            report.merged_prompts,
            report.rows,
        )
    if report.unstopped:
        logger.warning(
            "%s: in %d of %d rows the assistant's last trained token is not a special token, so the model does not learn there to end its turn. "
            "Let the chat template write the end-of-turn token inside its {%% generation %%} marks.",
            called,
            report.unstopped,
            report.rows,
        )


def _eos_token_id(tokenizer: PreTrainedTokenizerBase, eos_token: str | None, *, needed: bool) -> int | None:
    if eos_token is not None:
        token_id = tokenizer.convert_tokens_to_ids(eos_token)
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
