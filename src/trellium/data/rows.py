"""What a dataset row may hold, and what is wrong with one that does not.

Reading a row *is* checking it: the `read_*` functions return the row's value in one canonical form or raise a `DatasetError` that names the
place, so every row that is tokenized has been checked, at no second pass. Which columns are read is told by `trellium.data.formats`.
Cost: about 2 µs a message.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trellium.data.tool_calls import read_arguments, type_calls
from trellium.errors import DatasetError

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

_TEMPLATE_OPTIONS_OF_OURS = {
    "messages",
    "tools",
    "add_generation_prompt",
    "tokenize",
    "continue_final_message",
    "chat_template",
    "conversation",
}

Message = dict[str, Any]
Content = str | list[Message]
"""What is tokenized: a text, or messages."""
Asked = dict[str, Any]
"""`where` a row stands, the `tools` and `options` with which its messages are rendered, and `images` where rows have any."""


def shorten(value: object, width: int = 60) -> str:
    """`repr(value)`, cut to `width` characters."""
    text = repr(value)
    return text if len(text) <= width else text[: width - 1] + "…"


def place_of(row: Mapping[str, Any], index: int, name: str) -> str:
    """Where a row stands, for a message: `file:line` if it was read from a file of lines, else the dataset's name and the row's index."""
    return row.get(SOURCE_COLUMN) or f"{name}: row {index} (from 0)"


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


def read_messages(value: object, where: str, column: str, *, image_blocks: bool = False) -> list[Message]:
    """A conversation as a list of `{"role", "content", …}` with string contents.

    From/value messages are renamed, blocks of text are joined, and what Arrow filled with None is left out. The content of an assistant message
    that only calls tools becomes `""`. With `image_blocks` contents that were blocks of text and images stay blocks.

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
    return [_read_message(message, where, column, position, image_blocks) for position, message in enumerate(value)]


def _read_message(message: object, where: str, column: str, position: int, image_blocks: bool) -> Message:
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
        blocks = [_read_block(block, at, image_blocks) for block in content]
        content = blocks if image_blocks else "".join(block["text"] for block in blocks)
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
        return [read_arguments(call, at) for call in without_none(value)]
    raise DatasetError(
        f"{at} has 'tool_calls' that are {type(value).__name__} {shorten(value)}. They must be a list of "
        "{'type': 'function', 'function': {'name', 'arguments'}}"
        + (": json.loads reads it from a string." if isinstance(value, str) else ".")
    )


def _read_block(block: object, at: str, image_blocks: bool) -> dict[str, Any]:
    kept = {key: field for key, field in block.items() if field is not None} if isinstance(block, dict) else {}
    if kept.get("type") == "text" and isinstance(kept.get("text"), str):
        return {"type": "text", "text": kept["text"]}
    if kept.get("type") == "image" and image_blocks:
        return {key: field for key, field in kept.items() if key in ("type", "image")}
    way_out = (
        "or images, {'type': 'image'}, can be trained on: leave out rows with audio or video."
        if image_blocks
        else "can be trained on. Images are read where the dataset has a column 'image' or 'images'; leave out rows with audio or video."
    )
    raise DatasetError(
        f"{at} has a content block {shorten(block)}. Only blocks {{'type': 'text', 'text': '…'}} {way_out}"
    )


def rendering(asked: Asked) -> Asked:
    """Of what is known of a row, what `ChatTemplate.render` takes."""
    return {name: value for name, value in asked.items() if name != "images"}


def read_contents(
    row: Mapping[str, Any],
    where: str,
    columns: Sequence[str],
    *,
    conversational: bool,
    may_be_empty: bool = False,
    image_blocks: bool = False,
) -> tuple[tuple[Content, ...], Asked]:
    """What a row says in some columns, all text or all messages, and what it asks of the chat template.

    Args:
        columns: of the row; the messages of all of them are one conversation's, with the same tools.
        conversational: whether they hold messages, in every row.
        may_be_empty: whether a text may be `""`.
        image_blocks: whether messages may hold images.

    Returns:
        The contents in order, and `where`, `tools` and `options` as `ChatTemplate.render` takes them.

    Raises:
        DatasetError: a content that is missing, empty, or of another form than the first row's; tools or options that are neither.
    """
    for column in columns:
        value = row.get(column)
        if value is None or (not value and isinstance(value, list | str) and not (may_be_empty and value == "")):
            what = "missing" if value is None else "an empty " + ("string" if isinstance(value, str) else "list")
            raise DatasetError(
                f"{where}: '{column}' is {what}. Every row needs something there: fill it, or drop the row with "
                f"dataset.filter(lambda row: row['{column}'])."
            )
    are_text = [isinstance(row[column], str) for column in columns]
    if len(set(are_text)) > 1 or are_text[0] == conversational:
        shown = " and ".join(f"'{c}' is {type(row[c]).__name__} {shorten(row[c], 40)}" for c in columns)
        raise DatasetError(
            f"{where}: {shown}. All must be strings, or all lists of {{'role', 'content'}}, in every row the same."
        )
    if not conversational:
        return tuple(read_text(row[column], where, column) for column in columns), {"where": where}
    tools = read_tools(row.get("tools"), where)
    asked = {"where": where, "tools": tools, "options": read_template_options(row.get("chat_template_kwargs"), where)}
    read = [read_messages(row[column], where, column, image_blocks=image_blocks) for column in columns]
    return tuple(type_calls(messages, tools) for messages in read), asked


def joined(prompt: Content, completion: Content) -> Content:
    """A prompt and what follows it, both text or both messages, as one."""
    return prompt + completion  # type: ignore[operator]


def read_preference(
    row: Mapping[str, Any], where: str, columns: Sequence[str], *, conversational: bool, image_blocks: bool = False
) -> tuple[tuple[Content, Content, Content], Asked]:
    """The prompt, the chosen and the rejected completion of a row, and what it asks of the chat template.

    Without a `prompt` among the `columns` the prompt is what the two begin with, if anything.

    Raises:
        DatasetError: as `read_contents`.
    """
    contents, asked = read_contents(
        row, where, columns, conversational=conversational, may_be_empty=True, image_blocks=image_blocks
    )
    *prompt, chosen, rejected = contents
    if prompt:
        return (prompt[0], chosen, rejected), asked
    length = shared_prompt_length(chosen, rejected)
    return (chosen[:length], chosen[length:], rejected[length:]), asked


def shared_prompt_length(chosen: Content, rejected: Content) -> int:
    """How many leading messages, or characters, two completions share and neither lacks more: at least one is left of each.

    A space before the place where two texts part belongs to the completions, whose first words tokenizers write with it.
    """
    shared, shorter = common_prefix_length(chosen, rejected), min(len(chosen), len(rejected))
    if shared == shorter:
        return max(0, shared - 1)
    return shared - 1 if shared and chosen[shared - 1] == " " else shared


def common_prefix_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many leading items two sequences share; they are compared a slice at a time, so most of it is one comparison in C."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def read_label(row: Mapping[str, Any], where: str) -> bool:
    """Whether a row's completion is a desirable one.

    Raises:
        DatasetError: neither a bool nor 0 or 1.
    """
    value = row.get("label")
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    got = "nothing" if value is None else f"{type(value).__name__} {shorten(value)}"
    raise DatasetError(
        f"{where}: 'label' must be true for a desirable completion and false for an undesirable one, got {got}. "
        "Map it: dataset.map(lambda row: {'label': row['label'] == …})."
    )


def read_number(row: Mapping[str, Any], where: str, column: str) -> float:
    """A column of numbers' value.

    Raises:
        DatasetError: no number, or one that is not finite.
    """
    value = row.get(column)
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    got = "nothing" if value is None else f"{type(value).__name__} {shorten(value)}"
    raise DatasetError(
        f"{where}: '{column}' must be a finite number, got {got}. Every row needs one: fill it, or remove the column."
    )


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


def read_token_list(row: Mapping[str, Any], where: str, column: str) -> list[int]:
    """A column of tokens or of their marks.

    Raises:
        DatasetError: no list of integers.
    """
    values: Any = row.get(column)
    if hasattr(values, "tolist"):  # numpy
        values = values.tolist()
    if isinstance(values, list) and all(isinstance(value, int) for value in values):
        return values
    got = "nothing" if values is None else f"{type(values).__name__} {shorten(values)}"
    raise DatasetError(
        f"{where}: '{column}' must be a list of integers, got {got}. Tokenize every row the same way, or give text and leave it to the trainer."
    )


def read_tokens(row: Mapping[str, Any], where: str, columns: Iterable[str]) -> dict[str, list[int]]:
    """The columns of a pre-tokenized row, `input_ids` first, each a list of integers as long as that; masks hold 0 and 1.

    Raises:
        DatasetError: a column is missing, is not integers, or has another length.
    """
    read: dict[str, list[int]] = {}
    for column in columns:
        values = read_token_list(row, where, column)
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
