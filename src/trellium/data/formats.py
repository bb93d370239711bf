"""Which kind of dataset this is, told by its columns and its first row.

Supervised fine-tuning:

| kind                | columns                                                              | trained by default    |
|---------------------|----------------------------------------------------------------------|-----------------------|
| `text`              | the text column (`dataset_text_field`)                               | every token           |
| `messages`          | `messages`, or `conversations` (`role`/`content` or `from`/`value`)  | every token           |
| `prompt-completion` | `prompt` and `completion`, both text or both messages                | the completion        |
| `tokens`            | `input_ids`, with `labels`, `assistant_masks` or `completion_mask`   | as these say          |

Preferences:

| kind         | columns                                                                                              |
|--------------|------------------------------------------------------------------------------------------------------|
| `preference` | `chosen` and `rejected`, both text or both messages; with `prompt` of the same form, or both begin with it |
| `unpaired`   | `prompt`, `completion` and `label`                                                                   |
| `tokens`     | `prompt_ids` with `chosen_ids` and `rejected_ids`, or with `completion_ids` and `label`              |

Conversations may bring `tools` and `chat_template_kwargs`; any row `image` or `images` (`trellium.data.images`). Other columns are left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trellium.data.rows import SOURCE_COLUMN
from trellium.errors import ConfigError, DatasetError

_ACCEPTED = (
    "Accepted are: a text column (dataset_text_field); 'messages' or 'conversations'; 'prompt' with 'completion'; "
    "'input_ids' with 'labels', 'assistant_masks' or 'completion_mask'"
)
_MASK_COLUMNS = ("labels", "assistant_masks", "completion_mask")
_ASKED_COLUMNS = ("tools", "chat_template_kwargs")
IMAGE_COLUMNS = ("image", "images")
"""Of which a dataset may have one."""

Kind = Literal["text", "messages", "prompt-completion", "preference", "unpaired", "tokens"]


@dataclass(frozen=True)
class RowFormat:
    """The kind of a dataset.

    Attributes:
        kind: one of the kinds above.
        conversational: whether what is read are messages, which a chat template renders.
        columns: the columns that are read; the others of the dataset are left alone.
        field: the column of the text or of the messages; empty for the other kinds.
    """

    kind: Kind
    conversational: bool
    columns: tuple[str, ...]
    field: str = ""

    @property
    def fields(self) -> tuple[str, ...]:
        """Of the columns, those that hold what is tokenized, or tokens."""
        return tuple(c for c in self.columns if c not in (*_ASKED_COLUMNS, *IMAGE_COLUMNS, SOURCE_COLUMN, "label"))

    @property
    def images(self) -> str:
        """The column of images, empty where there is none."""
        return next((c for c in self.columns if c in IMAGE_COLUMNS), "")


def _format(kind: Kind, conversational: bool, fields: tuple[str, ...], have: set[str], field: str = "") -> RowFormat:
    """The format that reads `fields`, and of the columns there are those that belong to such rows."""
    if have.issuperset(IMAGE_COLUMNS):
        raise DatasetError(
            "there are both 'image' and 'images' among the columns. Keep one: dataset.remove_columns(['image']) or ['images']."
        )
    beside = (*(_ASKED_COLUMNS if conversational else ()), *IMAGE_COLUMNS, SOURCE_COLUMN)
    return RowFormat(kind, conversational, (*fields, *(c for c in beside if c in have)), field)


def _shown(columns: Iterable[str]) -> str:
    return ", ".join(repr(c) for c in columns if c != SOURCE_COLUMN) or "none"


def detect_format(
    columns: Iterable[str], first_row: Mapping[str, Any], *, text_field: str = "text", name: str = "dataset"
) -> RowFormat:
    """The kind of a dataset for supervised fine-tuning with these columns.

    Args:
        columns: the names of all its columns.
        first_row: its first row; what `prompt` and `completion` are is seen from it.
        text_field: the column that holds the text of a language-modelling dataset.
        name: what to call the dataset in an error.

    Raises:
        DatasetError: no accepted columns, or those of more than one kind.
    """
    columns = list(columns)
    have = set(columns)
    if "input_ids" in have:
        return _format("tokens", False, ("input_ids", *(c for c in _MASK_COLUMNS if c in have)), have)

    found: list[tuple[str, RowFormat]] = []
    if {"prompt", "completion"} <= have:
        conversational = not isinstance(first_row.get("prompt"), str)
        pair = _format("prompt-completion", conversational, ("prompt", "completion"), have)
        found.append(("'prompt' with 'completion'", pair))
    for column in ("messages", "conversations"):
        if column in have and column != text_field:
            found.append((repr(column), _format("messages", True, (column,), have, column)))
    if text_field in have:
        conversational = isinstance(first_row.get(text_field), list)
        kind: Kind = "messages" if conversational else "text"
        found.append((repr(text_field), _format(kind, conversational, (text_field,), have, text_field)))

    if len(found) > 1:
        raise DatasetError(
            f"{name}: the columns {_shown(columns)} could be read in {len(found)} ways: {' or '.join(what for what, _ in found)}. "
            "A dataset must have the columns of one kind: take the others away with dataset.remove_columns([...])."
        )
    if found:
        return found[0][1]

    strings = [c for c in columns if isinstance(first_row.get(c), str) and c != SOURCE_COLUMN]
    if {"chosen", "rejected"} & have:
        hint = "'chosen' and 'rejected' are rows of preference training, not of supervised fine-tuning: rename 'chosen' to 'messages' or 'completion'."
    elif "prompt" in have or "completion" in have:
        missing = "completion" if "prompt" in have else "prompt"
        hint = f"'{missing}' is missing: add it, or for plain text set dataset_text_field='{'prompt' if missing == 'completion' else 'completion'}'."
    elif len(strings) == 1:
        hint = f"If '{strings[0]}' is the text, set dataset_text_field='{strings[0]}'."
    else:
        hint = "Rename your columns with dataset.rename_columns({...}), or give formatting_func, a function from a row to its text."
    raise DatasetError(f"{name}: cannot tell what to train on from the columns {_shown(columns)}. {_ACCEPTED}. {hint}")


def _preference(have: set[str], first_row: Mapping[str, Any]) -> RowFormat:
    """The format of paired preferences. A text prompt beside conversations is not read: they begin with it."""
    conversational = not isinstance(first_row.get("chosen"), str)
    prompt = first_row.get("prompt")
    explicit = "prompt" in have and not (conversational and isinstance(prompt, str))
    return _format("preference", conversational, (*(["prompt"] if explicit else []), "chosen", "rejected"), have)


def detect_preferences(
    columns: Iterable[str], first_row: Mapping[str, Any], *, whole_sequences: bool, name: str = "dataset"
) -> RowFormat:
    """The kind of a dataset of paired preferences with these columns: `preference`, or `tokens` of it.

    Args:
        columns: the names of all its columns.
        first_row: its first row; whether it holds messages, and whether the prompt stands alone, is seen from it.
        whole_sequences: whether `chosen_ids` and `rejected_ids` hold the prompt, so that `prompt_ids` is not needed.
        name: what to call the dataset in an error.

    Raises:
        DatasetError: other columns.
    """
    columns = list(columns)
    have = set(columns)
    tokens = (*(() if whole_sequences else ("prompt_ids",)), "chosen_ids", "rejected_ids")
    if have.issuperset(tokens):
        return _format("tokens", False, tokens, have)
    if {"chosen", "rejected"} <= have:
        return _preference(have, first_row)
    hint = "Rename your columns with dataset.rename_columns({...})."
    if {"prompt", "completion", "label"} <= have:
        hint = "Single answers with a 'label' are rows of KTO."
    elif {"chosen_ids", "rejected_ids"} <= have:
        hint = "'prompt_ids' is missing: the tokens of the prompt, which the other two then leave out."
    elif missing := {"chosen", "rejected"} & have:
        hint = f"{_shown({'chosen', 'rejected'} - missing)} is missing: add it."
    raise DatasetError(
        f"{name}: cannot tell the preferences from the columns {_shown(columns)}. Accepted are: 'chosen' and 'rejected', with a 'prompt' or both "
        f"beginning with it; {', '.join(map(repr, tokens))}. {hint}"
    )


def detect_unpaired(columns: Iterable[str], first_row: Mapping[str, Any], *, name: str = "dataset") -> RowFormat:
    """The kind of a dataset of judged answers: `unpaired`, `tokens` of it, or `preference`, of which each row is two answers.

    Args:
        columns: the names of all its columns.
        first_row: its first row; whether it holds messages is seen from it.
        name: what to call the dataset in an error.

    Raises:
        DatasetError: other columns.
    """
    columns = list(columns)
    have = set(columns)
    if {"prompt_ids", "completion_ids", "label"} <= have:
        return _format("tokens", False, ("prompt_ids", "completion_ids", "label"), have)
    if {"chosen", "rejected"} <= have:
        return _preference(have, first_row)
    wanted = ("prompt", "completion", "label")
    if have.issuperset(wanted):
        return _format("unpaired", not isinstance(first_row.get("prompt"), str), wanted, have)
    missing = _shown([column for column in wanted if column not in have])
    raise DatasetError(
        f"{name}: cannot tell the judged answers from the columns {_shown(columns)}. Accepted are: 'prompt', 'completion' and 'label'; 'chosen' and "
        f"'rejected', which are then two answers; 'prompt_ids', 'completion_ids' and 'label'. Of the first {missing} is missing: rename your columns with dataset.rename_columns({{...}})."
    )


def check_options(
    format: RowFormat, *, name: str, completion_only_loss: bool | None, assistant_only_loss: bool
) -> bool:
    """Whether only completions are trained: what `completion_only_loss` says, or None's meaning for this kind of dataset.

    None means True exactly if the dataset says where its completions are: `prompt` and `completion`, or `completion_mask`.

    Raises:
        ConfigError: an option that this kind of dataset cannot honour.
    """
    has_completions = format.kind == "prompt-completion" or "completion_mask" in format.columns
    if completion_only_loss and not has_completions:
        raise ConfigError(
            f"completion_only_loss=True, but {name} is a '{format.kind}' dataset, in which nothing marks the completion. "
            "Give 'prompt' and 'completion' columns, or leave completion_only_loss unset."
        )
    if assistant_only_loss and not format.conversational and not {"assistant_masks", "labels"} & set(format.columns):
        raise ConfigError(
            f"assistant_only_loss=True, but {name} is a '{format.kind}' dataset without conversations, in which nothing marks the assistant's words. "
            "Give 'messages' (or 'prompt' and 'completion' as messages), or set assistant_only_loss=False."
        )
    return has_completions if completion_only_loss is None else completion_only_loss
