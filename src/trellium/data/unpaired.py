"""Judged answers to tokens: for each row the prompt, the completion, whether it is desirable, and a completion that answers another prompt.

Paired preferences are taken too: each row is then two answers. The mismatched completion is that of the row before among the rows that are trained
together, of their first row the last's; a row that is alone among them has that of the next, of the last row of all the first's. They are paired up in a
second pass over the rows that are kept, which costs their tokens once more on disk. In a stream the next row is looked for among the same thousand; one
that is alone among them has its own completion.

Source: the columns and the rules are TRL 1.16's, where a row that is alone has its own completion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from datasets import Dataset, Features, IterableDataset, Value
from datasets.fingerprint import Hasher

from trellium.data.branches import Branches
from trellium.data.encoding import Encoder, Processing
from trellium.data.formats import RowFormat, detect_unpaired
from trellium.data.pipeline import (
    TOKENS,
    EncodedRow,
    PipelineOptions,
    Prepared,
    Row,
    Rows,
    encode_rows,
    open_rows,
    rows_at_once,
)
from trellium.data.preferences import encode_branches, read_preferences, tokens_asked
from trellium.data.rows import Asked, Content, read_contents, read_label, read_token_list
from trellium.data.token_checks import TokenLimits

_MISMATCHED = "kl_completion_ids"


@dataclass(frozen=True, kw_only=True)
class UnpairedOptions(PipelineOptions):
    """How judged answers are prepared: as every dataset, and a sequence longer than `max_length` loses its end.

    Attributes:
        together: how many rows are trained together, among which the mismatched completion is taken.
    """

    together: int = 1


@dataclass(frozen=True)
class JudgedAnswers:
    """Rows with `prompt`, `completion` and `label`, or with `chosen` and `rejected`, encoded as answers.

    Attributes:
        encoder: of texts or messages.
        format: of the rows.
        max_length: tokens of prompt and completion, at most.
        limits: of the model.
    """

    encoder: Encoder
    format: RowFormat
    max_length: int | None
    limits: TokenLimits

    @property
    def features(self) -> Features:
        """`prompt_ids`, `completion_ids`, `label`, and the images of the prompt where rows have any."""
        return Features(prompt_ids=TOKENS, completion_ids=TOKENS, label=Value("bool"), **self.encoder.image_features)

    def encode(self, rows: list[Row], places: list[str]) -> list[EncodedRow]:
        """One row of tokens an answer: of paired rows first all that were chosen, then all that were rejected.

        A completion is not yet cut to the room its prompt leaves, because it may be the mismatched one of a shorter prompt.
        """
        origins = list(range(len(rows)))
        if self.format.kind == "preference":
            pairs, asked = read_preferences(rows, places, self.format, self.encoder)
            answers = [(pair[0], pair[side]) for side in (1, 2) for pair in pairs]
            branches = encode_branches(self.encoder, answers, asked * 2)
            labels, origins = [True] * len(rows) + [False] * len(rows), origins * 2
        else:
            labels = [read_label(row, where) for row, where in zip(rows, places, strict=True)]
            branches, asked = self._read(rows, places)
        encoded = []
        for whole, label, origin in zip(branches, labels, origins, strict=True):
            left = whole.cut(self.max_length, "keep_start")
            completion = whole.completions[0][: self.max_length]
            values = {"prompt_ids": left.prompt, "completion_ids": completion, "label": label}
            values |= self.encoder.stored_images(asked[origin])
            cut = self.encoder.cuts_image(whole.prompt, left.prompt)
            encoded.append(left.encoded(values, whole, self.limits, places[origin], origin, image_cut=cut))
        return encoded

    def _read(self, rows: list[Row], places: list[str]) -> tuple[list[Branches], list[Asked]]:
        if self.format.kind == "tokens":
            fields = [
                [read_token_list(row, where, column) for column in ("prompt_ids", "completion_ids")]
                for row, where in zip(rows, places, strict=True)
            ]
            known = [tokens_asked(self.encoder, row, where) for row, where in zip(rows, places, strict=True)]
            return [Branches(prompt, (completion,)) for prompt, completion in fields], known
        contents: list[tuple[Content, ...]] = []
        asked: list[Asked] = []
        for row, where in zip(rows, places, strict=True):
            content, asks = read_contents(
                row,
                where,
                self.format.fields,
                conversational=self.format.conversational,
                may_be_empty=True,
                image_blocks=bool(self.format.images),
            )
            contents.append(self.encoder.illustrate(row, content, asks, only_first=True))
            asked.append(asks)
        return encode_branches(self.encoder, contents, asked), asked


@dataclass(frozen=True)
class PairWithOther:
    """Gives each row the completion of another, both cut to the room that the row's prompt leaves: the function that `datasets` maps.

    Attributes:
        max_length: tokens of prompt and completion, at most.
        together: how many rows are trained together; a batch is made of whole such groups, but for the last.
        rows: all of them; None in a stream, where the rows of a batch are all there are.
    """

    max_length: int | None
    together: int
    rows: Dataset | None

    def __call__(self, batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        completions = batch["completion_ids"]
        others: list[list[int]] = []
        for start in range(0, len(completions), self.together):
            group = completions[start : start + self.together]
            others += [group[-1], *group[:-1]] if len(group) > 1 else [self._next(completions, indices, start)]
        rooms: list[Any] = [None] * len(completions)
        if self.max_length is not None:
            rooms = [self.max_length - len(prompt) for prompt in batch["prompt_ids"]]
        return {
            "completion_ids": [each[:room] for each, room in zip(completions, rooms, strict=True)],
            _MISMATCHED: [each[:room] for each, room in zip(others, rooms, strict=True)],
        }

    def _next(self, completions: list[list[int]], indices: list[int], at: int) -> list[int]:
        if at + 1 < len(completions):
            return completions[at + 1]
        return completions[0] if self.rows is None else self.rows[(indices[at] + 1) % len(self.rows)]["completion_ids"]


def prepare_unpaired(dataset: Rows, tokenizer: Processing, options: UnpairedOptions) -> Rows:
    """Judged answers as the trainers take them; see `prepare_unpaired_with_report`. What was done is logged in one line."""
    return prepare_unpaired_with_report(dataset, tokenizer, options)[0]


def prepare_unpaired_with_report(dataset: Rows, tokenizer: Processing, options: UnpairedOptions) -> Prepared:
    """Judged answers as the trainers take them, and the account of what was done.

    Args:
        dataset: rows with `prompt`, `completion` and `label`, or with `chosen` and `rejected` (`trellium.data.formats`). An `IterableDataset` is
            prepared as it is read.
        tokenizer: the model's, or its processor.
        options: how.

    Returns:
        A dataset with the columns `prompt_ids`, `completion_ids` (without the prompt; of a text it ends with the end-of-sequence token), `label`
        (True for a desirable one), those of `keep_columns` that are there, and `kl_completion_ids`, a completion that answers another prompt.
        There is no account for an `IterableDataset`.

    Raises:
        DatasetError: no rows, a row that is wrong, or no row with anything to train.
        ConfigError: options that do not fit the dataset.
    """
    rows, columns, first = open_rows(dataset, options)
    format = detect_unpaired(columns, first, name=options.called)
    kind = JudgedAnswers(Encoder.of(tokenizer, format, options), format, options.max_length, options.limits)
    answers, report = encode_rows(rows, columns, kind, options)
    features = Features({**(answers.features or {}), _MISMATCHED: TOKENS})
    at_once = rows_at_once(format)
    paired: dict[str, Any] = {
        "with_indices": True,
        "batched": True,
        "batch_size": options.together * -(-at_once // options.together),
        "features": features,
    }
    if isinstance(answers, IterableDataset):
        return answers.map(PairWithOther(options.max_length, options.together, None), **paired), report
    return answers.map(
        PairWithOther(options.max_length, options.together, answers),
        **paired,
        # Of the rows' own, which is short; the function holds all of them.
        new_fingerprint=Hasher.hash((answers._fingerprint, options.max_length, options.together, _MISMATCHED)),
        writer_batch_size=at_once,
        desc=f"Pairing {options.name}",
    ), report
