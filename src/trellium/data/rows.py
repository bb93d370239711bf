"""What a dataset row may be, which kind of dataset this is, and what is wrong with a row that is neither.

Four kinds, told apart by their columns and their first row:

| kind                | columns                                                              | trained by default    |
|---------------------|----------------------------------------------------------------------|-----------------------|
| `text`              | the text column (`dataset_text_field`)                               | every token           |
| `messages`          | `messages`, or `conversations` (`role`/`content` or `from`/`value`)  | every token           |
| `prompt-completion` | `prompt` and `completion`, both text or both messages                | the completion        |
| `tokens`            | `input_ids`, with `labels`, `assistant_masks` or `completion_mask`   | as these say          |

Conversations may bring `tools` and `chat_template_kwargs`. Reading a row *is* checking it: the `read_*` functions return the row's value in one
canonical form or raise a `DatasetError` that names the place, so every row that is tokenized has been checked, at no second pass.
Cost: about 2 µs a message.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trellium.errors import ConfigError, DatasetError

SOURCE_COLUMN = "_source"
"""A column that says where a row was read, `file:line`. Written by `trellium.data.files`, shown in errors, never trained on."""

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""The roles a message may have. A chat template may know fewer; it then says so itself."""

_FROM_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""What the `from` of a from/value message means, where it is not a role itself."""

_MASK_COLUMNS = ("labels", "assistant_masks", "completion_mask")
_TEMPLATE_OPTIONS_OF_OURS = {
    "messages",
    "tools",
    "add_generation_prompt",
    "tokenize",
    "continue_final_message",
    "chat_template",
    "conversation",
}

_ACCEPTED = (
    "Accepted are: a text column (dataset_text_field); 'messages' or 'conversations'; 'prompt' with 'completion'; "
    "'input_ids' with 'labels', 'assistant_masks' or 'completion_mask'"
)

Message = dict[str, Any]
Kind = Literal["text", "messages", "prompt-completion", "tokens"]


@dataclass(frozen=True)
class RowFormat:
    """The kind of a dataset.

    Attributes:
        kind: one of the four kinds.
        conversational: whether what is read are messages, which a chat template renders.
        columns: the columns that are read; the others of the dataset are left alone.
        field: the column of the text or of the messages; empty for the other kinds.
    """

    kind: Kind
    conversational: bool
    columns: tuple[str, ...]
    field: str = ""


def shorten(value: object, width: int = 60) -> str:
    """`repr(value)`, cut to `width` characters."""
    text = repr(value)
    return text if len(text) <= width else text[: width - 1] + "…"


def place_of(row: Mapping[str, Any], index: int, name: str) -> str:
    """Where a row stands, for a message: `file:line` if it was read from a file of lines, else the dataset's name and the row's index."""
    return row.get(SOURCE_COLUMN) or f"{name}: row {index} (from 0)"


def detect_format(
    columns: Iterable[str], first_row: Mapping[str, Any], *, text_field: str = "text", name: str = "dataset"
) -> RowFormat:
    """The kind of a dataset with these columns.

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
    extra = tuple(c for c in ("tools", "chat_template_kwargs", SOURCE_COLUMN) if c in have)
    source = (SOURCE_COLUMN,) if SOURCE_COLUMN in have else ()
    shown = ", ".join(repr(c) for c in columns if c != SOURCE_COLUMN) or "none"

    if "input_ids" in have:
        return RowFormat("tokens", False, ("input_ids", *(c for c in _MASK_COLUMNS if c in have), *source))

    found: list[tuple[str, RowFormat]] = []
    if {"prompt", "completion"} <= have:
        conversational = not isinstance(first_row.get("prompt"), str)
        read = ("prompt", "completion", *(extra if conversational else source))
        found.append(("'prompt' with 'completion'", RowFormat("prompt-completion", conversational, read)))
    for column in ("messages", "conversations"):
        if column in have and column != text_field:
            found.append((repr(column), RowFormat("messages", True, (column, *extra), column)))
    if text_field in have:
        if isinstance(first_row.get(text_field), list):
            found.append((repr(text_field), RowFormat("messages", True, (text_field, *extra), text_field)))
        else:
            found.append((repr(text_field), RowFormat("text", False, (text_field, *source), text_field)))

    if len(found) > 1:
        raise DatasetError(
            f"{name}: the columns {shown} could be read in {len(found)} ways: {' or '.join(what for what, _ in found)}. "
            "A dataset must have the columns of one kind: take the others away with dataset.remove_columns([...])."
        )
    if found:
        return found[0][1]

    hint = ""
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
    raise DatasetError(f"{name}: cannot tell what to train on from the columns {shown}. {_ACCEPTED}. {hint}")


def read_text(value: object, where: str, column: str) -> str:
    """A text column's value; it may be empty.

    Raises:
        DatasetError: not a string.
    """
    if isinstance(value, str):
        return value
    if value is None:
        raise DatasetError(
            f"{where}: '{column}' is missing. Every row needs a string there: fill it, or drop the row with dataset.filter(...)."
        )
    raise DatasetError(
        f"{where}: '{column}' must be a string, got {type(value).__name__} {shorten(value)}. "
        "For a conversation use 'messages'; for another text column set dataset_text_field."
    )


def read_messages(value: object, where: str, column: str) -> list[Message]:
    """A conversation as a list of `{"role", "content", …}` with string contents.

    From/value messages are renamed, blocks of text are joined, and what Arrow filled with None is left out. The content of an assistant message
    that only calls tools becomes `""`.

    Raises:
        DatasetError: anything else; names the message by its index.
    """
    if isinstance(value, dict) and value and all(isinstance(v, list) for v in value.values()):
        # How `datasets` hands out a sequence of structs: a struct of sequences.
        value = [dict(zip(value, fields, strict=False)) for fields in zip(*value.values(), strict=False)]
    if isinstance(value, str):
        try:
            encoded = isinstance(json.loads(value), list)
        except ValueError:
            encoded = False
        way_out = (
            "It is JSON in a string: decode it with json.loads." if encoded else "For plain text use a 'text' column."
        )
        raise DatasetError(
            f"{where}: '{column}' must be a list of {{'role', 'content'}}, got str {shorten(value)}. {way_out}"
        )
    if not isinstance(value, list):
        got = "nothing" if value is None else f"{type(value).__name__} {shorten(value)}"
        raise DatasetError(
            f"{where}: '{column}' must be a list of {{'role', 'content'}}, got {got}. For plain text use a 'text' column."
        )
    if not value:
        raise DatasetError(
            f"{where}: '{column}' is an empty list. Every row needs at least one message: drop the row with dataset.filter(...)."
        )
    return [_read_message(message, where, column, position) for position, message in enumerate(value)]


def _read_message(message: object, where: str, column: str, position: int) -> Message:
    at = f"{where}: message {position} of '{column}'"
    if not isinstance(message, dict):
        raise DatasetError(
            f"{at} must be {{'role', 'content'}}, got {type(message).__name__} {shorten(message)}. Write it as {{'role': 'user', 'content': '…'}}."
        )
    kept = {key: field for key, field in message.items() if field is not None}
    if "from" in kept and "role" not in kept:
        spoken = kept.pop("from")
        kept = {
            "role": _FROM_ROLES.get(spoken, spoken) if isinstance(spoken, str) else spoken,
            "content": kept.pop("value", None),
            **kept,
        }

    role = kept.get("role")
    if role is None:
        raise DatasetError(
            f"{at} has no 'role', only {', '.join(map(repr, message)) or 'nothing'}. A message is {{'role', 'content'}} or {{'from', 'value'}}."
        )
    if role not in ROLES:
        near = difflib.get_close_matches(str(role).lower(), ROLES, n=1, cutoff=0.6)
        raise DatasetError(
            f"{at} has the role {shorten(role)}. Accepted roles are {', '.join(ROLES)}. "
            + (f"Did you mean {near[0]!r}?" if near else "Rename it to one of these.")
        )

    content = kept.get("content")
    if isinstance(content, list):
        content = _join_blocks(content, at)
    elif content is None:
        if not kept.get("tool_calls"):
            raise DatasetError(
                f"{at} has no 'content', only {', '.join(repr(key) for key, field in message.items() if field is not None)}. "
                "Every message needs a string there; only an assistant message with 'tool_calls' may leave it out."
            )
        content = ""
    elif not isinstance(content, str):
        raise DatasetError(
            f"{at} has a 'content' that is {type(content).__name__} {shorten(content)}. It must be a string: json.dumps(content) makes it one."
        )
    kept["content"] = content
    if "tool_calls" in kept:
        kept["tool_calls"] = _read_tool_calls(kept["tool_calls"], at)
        if not kept["tool_calls"]:
            del kept["tool_calls"]
    return kept


def _read_tool_calls(value: object, at: str) -> list[dict]:
    if isinstance(value, list) and all(isinstance(call, dict) for call in value):
        return without_none(value)
    raise DatasetError(
        f"{at} has 'tool_calls' that are {type(value).__name__} {shorten(value)}. They must be a list of "
        "{'type': 'function', 'function': {'name', 'arguments'}}"
        + (": json.loads reads it from a string." if isinstance(value, str) else ".")
    )


def _join_blocks(blocks: list, at: str) -> str:
    texts = []
    for block in blocks:
        if isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
            continue
        raise DatasetError(
            f"{at} has a content block {shorten(block)}. Only blocks {{'type': 'text', 'text': '…'}} can be trained on: leave out rows with images, audio or video."
        )
    return "".join(texts)


def read_prompt_completion(
    row: Mapping[str, Any], where: str, *, conversational: bool
) -> tuple[str, str] | tuple[list[Message], list[Message]]:
    """The prompt and the completion of a row, both text or both messages.

    Raises:
        DatasetError: one is missing, empty, or of another form than the first row's.
    """
    prompt, completion = row.get("prompt"), row.get("completion")
    for column, value in (("prompt", prompt), ("completion", completion)):
        if value is None or (isinstance(value, str | list) and not value):
            what = "missing" if value is None else "an empty " + ("string" if isinstance(value, str) else "list")
            raise DatasetError(
                f"{where}: '{column}' is {what}. A prompt-completion row needs something in both: fill it, or drop the row with "
                f"dataset.filter(lambda row: row['{column}']). For text without a prompt use a 'text' column."
            )
    if isinstance(prompt, str) != isinstance(completion, str) or isinstance(prompt, str) == conversational:
        raise DatasetError(
            f"{where}: 'prompt' is {type(prompt).__name__} {shorten(prompt, 40)} and 'completion' is {type(completion).__name__} {shorten(completion, 40)}. "
            "Both must be strings or both lists of {'role', 'content'}, in every row the same."
        )
    if not conversational:
        return read_text(prompt, where, "prompt"), read_text(completion, where, "completion")
    return read_messages(prompt, where, "prompt"), read_messages(completion, where, "completion")


def read_tools(value: object, where: str) -> list[dict] | None:
    """A row's tools: a list of JSON schemas, or that list as a JSON string; None where there are none.

    Raises:
        DatasetError: neither.
    """
    value = _decode_json(value, where, "tools")
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DatasetError(
            f"{where}: 'tools' must be a list of JSON schemas, or that list as a JSON string; got {type(value).__name__} {shorten(value)}."
        )
    return without_none(value)


def read_template_options(value: object, where: str) -> dict[str, Any]:
    """A row's `chat_template_kwargs`: a mapping, or that mapping as a JSON string; empty where there is none.

    Raises:
        DatasetError: neither, or an option that belongs to Trellium.
    """
    value = _decode_json(value, where, "chat_template_kwargs")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise DatasetError(
            f"{where}: 'chat_template_kwargs' must map names to values, e.g. {{'enable_thinking': false}}; got {type(value).__name__} {shorten(value)}."
        )
    options = {key: option for key, option in value.items() if option is not None}
    if taken := _TEMPLATE_OPTIONS_OF_OURS & set(options):
        raise DatasetError(
            f"{where}: 'chat_template_kwargs' may not hold {', '.join(sorted(map(repr, taken)))}: these are set by the trainer. Take them out."
        )
    return options


def _decode_json(value: object, where: str, column: str) -> object:
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except ValueError as error:
        raise DatasetError(
            f"{where}: '{column}' is a string that is not JSON ({error}): {shorten(value)}. Write it with json.dumps."
        ) from None


def without_none(value: Any) -> Any:
    """`value` without the None that Arrow puts where other rows' structs have a field and this one has not."""
    if isinstance(value, dict):
        return {key: without_none(field) for key, field in value.items() if field is not None}
    if isinstance(value, list):
        return [without_none(item) for item in value]
    return value


def read_tokens(row: Mapping[str, Any], where: str, columns: Iterable[str]) -> dict[str, list[int]]:
    """The columns of a pre-tokenized row, each a list of integers as long as `input_ids`; masks hold 0 and 1.

    Raises:
        DatasetError: a column is missing, is not integers, or has another length.
    """
    columns = tuple(columns)
    read: dict[str, list[int]] = {}
    for column in columns:
        values: Any = row.get(column)
        if hasattr(values, "tolist"):  # numpy
            values = values.tolist()
        if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
            got = "nothing" if values is None else f"{type(values).__name__} {shorten(values)}"
            raise DatasetError(
                f"{where}: '{column}' must be a list of integers, got {got}. Tokenize every row the same way, or give text and leave it to the trainer."
            )
        if column != "input_ids" and len(values) != len(read["input_ids"]):
            raise DatasetError(
                f"{where}: '{column}' has {len(values)} entries and 'input_ids' {len(read['input_ids'])}. They must be equally long, one entry a token."
            )
        if column in ("assistant_masks", "completion_mask") and not set(values) <= {0, 1}:
            raise DatasetError(
                f"{where}: '{column}' must hold 0 and 1 only, got {shorten(sorted(set(values))[:6])}. 1 marks a token to train on."
            )
        read[column] = values
    return read


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
