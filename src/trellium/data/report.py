"""What preparation did with a dataset's rows: an account, a line of it for the log, and the reasons why rows were left out."""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass

logger = logging.getLogger(__name__)


class Fate(enum.IntEnum):
    """Whether a row is trained on, and if not, why."""

    KEPT = 0
    TOO_SHORT = 1
    ALL_MASKED = 2
    TRUNCATED_AWAY = 3
    TOO_LONG = 4
    NO_COMPLETION = 5
    IMAGE_CUT = 6


FATE_REASONS = {
    Fate.TOO_SHORT: "fewer than two tokens, so nothing to predict",
    Fate.ALL_MASKED: "every token masked",
    Fate.TRUNCATED_AWAY: "all trained tokens beyond max_length",
    Fate.TOO_LONG: "more tokens than max_length",
    Fate.NO_COMPLETION: "a completion of which no token is left after the prompt",
    Fate.IMAGE_CUT: "an image of which max_length would cut tokens",
}
WAYS_OUT = {
    Fate.TOO_SHORT: "give longer texts",
    Fate.ALL_MASKED: "check the row's masks, or the options completion_only_loss and assistant_only_loss",
    Fate.TRUNCATED_AWAY: "raise max_length, or shorten the prompts",
    Fate.TOO_LONG: "raise max_length, or shorten the texts",
    Fate.NO_COMPLETION: "check what the chat template writes of the completions",
    Fate.IMAGE_CUT: "raise max_length, or let the processor make images smaller",
}


@dataclass(frozen=True)
class PreparationReport:
    """What preparation did with a dataset's rows.

    A paired row of which two are made counts as two. Of a pair, the tokens are those of both its sequences, the prompt in each.

    Attributes:
        name: of the dataset.
        rows: rows that came.
        kept: rows that are trained on.
        tokens: tokens of the rows kept, after truncation.
        trained_tokens: of these, the targets; 0 where a sequence is judged as a whole.
        longest: tokens of the longest sequence kept.
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
        trained = f", {self.trained_tokens} of them trained" if self.trained_tokens else ""
        parts = [f"{self.name}: {self.kept} of {self.rows} rows, {self.tokens} tokens{trained}"]
        if self.truncated:
            parts.append(f"{count_rows(self.truncated)} truncated by {self.tokens_cut} tokens in all")
        parts += [
            f"dropped {count_rows(count)} with {FATE_REASONS[fate]} (e.g. {self.examples[fate][0]})"
            for fate, count in sorted(self.dropped.items())
        ]
        return "; ".join(parts) + "."


def count_rows(count: int) -> str:
    """`1 row`, `2 rows`."""
    return f"{count} row" if count == 1 else f"{count} rows"


def why_none_is_left(dropped: dict[Fate, int], examples: dict[Fate, tuple[str, ...]]) -> str:
    """The reasons for which every row was left out, each with its rows and the way out."""
    return "; ".join(
        f"{count_rows(count)} with {FATE_REASONS[fate]} (e.g. {', '.join(examples[fate])}): {WAYS_OUT[fate]}"
        for fate, count in dropped.items()
    )


def log_report(report: PreparationReport, called: str) -> None:
    """The account's line, as a warning where rows were cut or left out, and what else is amiss with the dataset `called` so."""
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
            "Let the chat template write an end-of-turn token after what the assistant says, inside its {%% generation %%} marks if it has these.",
            called,
            report.unstopped,
            report.rows,
        )
