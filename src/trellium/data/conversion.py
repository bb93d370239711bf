"""The functions on rows and datasets that scripts written for TRL import, under their names.

The trainers do all of this themselves and need none of it. They are for a script that looks at its rows, or makes others of them, before it trains.
No function changes what it is given.

Source: names, arguments and results are TRL 1.16's. Where TRL fails or wraps around these do not: an empty list of messages is no conversation;
two texts that differ at once have an empty prompt; a row with a text prompt beside conversations is conversational, not now and then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

from trellium.data.rows import common_prefix_length, shared_prompt_length, shorten
from trellium.data.templates import ChatTemplate
from trellium.errors import DatasetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTENTS = ("prompt", "chosen", "rejected", "completion", "messages")
_RENDERED = [
    {"messages"},
    {"prompt"},
    {"prompt", "completion"},
    {"prompt", "chosen", "rejected"},
    {"chosen", "rejected"},
    {"prompt", "completion", "label"},
]
"""The sets of keys that a row to be rendered may have, other keys left aside."""

Row = Mapping[str, Any]
AnyDataset = TypeVar("AnyDataset", Dataset, DatasetDict, IterableDataset, IterableDatasetDict)


def _begins_with(value: object, *keys: str) -> bool:
    """Whether a value is a list whose first item is a dict with these keys."""
    return (
        isinstance(value, list) and bool(value) and isinstance(value[0], dict) and all(key in value[0] for key in keys)
    )


def is_conversational(example: Row) -> bool:
    """Whether a row holds messages with roles in `prompt`, `chosen`, `rejected`, `completion` or `messages`."""
    return any(_begins_with(example.get(key), "role") for key in _CONTENTS)


def is_conversational_from_value(example: Row) -> bool:
    """Whether a row's `conversations` are messages of the form `{"from", "value"}`."""
    return _begins_with(example.get("conversations"), "from", "value")


def maybe_convert_to_chatml(example: Row) -> dict[str, Any]:
    """A row with messages `{"from", "value"}` as one with `{"role", "content"}`, and `conversations` called `messages`; another as it is.

    The roles keep their names: the trainers, which read such rows themselves, know that `human` is the user.
    """
    names = {"from": "role", "value": "content"}
    converted = {}
    for key, value in example.items():
        if key in (*_CONTENTS, "conversations") and isinstance(value, list):
            value = [
                {names.get(field, field): said for field, said in each.items()} if isinstance(each, dict) else each
                for each in value
            ]
        converted["messages" if key == "conversations" else key] = value
    return converted


def apply_chat_template(
    example: Row,
    processing_class: PreTrainedTokenizerBase,
    tools: list[dict | Callable] | None = None,
    **template_kwargs: Any,
) -> dict[str, Any]:
    """A conversational row as text.

    Args:
        example: a row with `messages`, or with `prompt` and what follows it, or with `chosen` and `rejected`; `chat_template_kwargs` are its own
            variables of the template.
        processing_class: a tokenizer with a chat template.
        tools: functions, or their JSON schemas, that the system prompt offers.
        **template_kwargs: variables of the template for every row.

    Returns:
        The same keys with texts (`messages` as `text`), and `label` where it is there. A prompt ends with the generation prompt, or inside the
        assistant's message it ends with; a completion is what its conversation goes on with from there.

    Raises:
        DatasetError: other keys, or a prompt that ends with a role nothing is answered to.
    """
    keys = {key for key in (*_CONTENTS, "label") if key in example}
    if keys not in _RENDERED:
        raise DatasetError(
            f"a row with the keys {', '.join(map(repr, example)) or 'none'} cannot be rendered. Accepted are "
            f"{'; '.join(', '.join(map(repr, sorted(accepted))) for accepted in _RENDERED)}."
        )

    def render(messages: list[dict], **how: Any) -> str:
        own = example.get("chat_template_kwargs") or {}
        return processing_class.apply_chat_template(
            messages, tools=tools or None, tokenize=False, **how, **own, **template_kwargs
        )

    rest = [key for key in ("chosen", "rejected", "completion") if key in example]
    output: dict[str, Any] = {}
    if "messages" in example:
        output["text"] = render(example["messages"])
    if "prompt" in example:
        prompt = _render_prompt(example["prompt"], render)
        wholes = {key: render([*example["prompt"], *example[key]]) for key in rest}
        # A template may write the generation prompt otherwise when the answer is there.
        for whole in wholes.values():
            prompt = prompt[: common_prefix_length(prompt, whole)]
        output |= {"prompt": prompt, **{key: whole[len(prompt) :] for key, whole in wholes.items()}}
    else:
        output |= {key: render(example[key]) for key in rest}
    if "label" in example:
        output["label"] = example["label"]
    return output


def _render_prompt(messages: list[dict], render: Callable[..., str]) -> str:
    if not _begins_with(messages, "role"):
        raise DatasetError(
            f"'prompt' must be messages, as what follows it is, got {shorten(messages)}. maybe_extract_prompt(row) takes it from the answers."
        )
    role = messages[-1]["role"]
    if role not in ("user", "tool", "assistant"):
        raise DatasetError(
            f"a prompt that ends with the role {shorten(role)} cannot be rendered: it must end with 'user', 'tool' or 'assistant'."
        )
    unfinished = role == "assistant"
    return render(messages, add_generation_prompt=not unfinished, continue_final_message=unfinished)


def maybe_apply_chat_template(
    example: Row,
    processing_class: PreTrainedTokenizerBase,
    tools: list[dict | Callable] | None = None,
    **template_kwargs: Any,
) -> Row:
    """`apply_chat_template` of a conversational row; another as it is."""
    return (
        apply_chat_template(example, processing_class, tools, **template_kwargs)
        if is_conversational(example)
        else example
    )


def extract_prompt(example: Row) -> dict[str, Sequence]:
    """The prompt of a pair, which is what `chosen` and `rejected` begin with, in messages or in characters, and what is left of the two.

    At least one message or character is left of each. A space before the place where texts part belongs to the completions.
    """
    length = shared_prompt_length(example["chosen"], example["rejected"])
    return {
        "prompt": example["chosen"][:length],
        "chosen": example["chosen"][length:],
        "rejected": example["rejected"][length:],
    }


def maybe_extract_prompt(example: Row) -> Row:
    """`extract_prompt` of a pair without a prompt of the same form, e.g. with a text prompt beside conversations; another row as it is."""
    if "chosen" not in example or "rejected" not in example:
        return example
    forms = {is_conversational({key: example[key]}) for key in ("chosen", "prompt") if key in example}
    return example if "prompt" in example and len(forms) == 1 else extract_prompt(example)


def _unpair(batch: dict[str, list]) -> dict[str, list]:
    rows = len(batch["chosen"])
    others = {key: values * 2 for key, values in batch.items() if key not in ("chosen", "rejected")}
    return {"completion": batch["chosen"] + batch["rejected"], "label": [True] * rows + [False] * rows, **others}


def unpair_preference_dataset(dataset: AnyDataset, **map_kwargs: Any) -> AnyDataset:
    """A dataset of pairs as one of judged answers.

    Args:
        dataset: with `chosen` and `rejected`, perhaps `prompt`, and other columns, which both answers of a pair keep.
        **map_kwargs: of the dataset's `map`, e.g. `num_proc`.

    Returns:
        The dataset with `completion` and `label` in their place: of each batch of `map` first all that were chosen, then all that were rejected.
    """
    columns = _columns(dataset) or list(next(iter(_first(dataset))))
    return dataset.map(_unpair, batched=True, remove_columns=columns, **map_kwargs)


def maybe_unpair_preference_dataset(
    dataset: AnyDataset, num_proc: int | None = None, desc: str | None = None
) -> AnyDataset:
    """`unpair_preference_dataset` of a dataset of pairs; another as it is.

    Args:
        dataset: any.
        num_proc: processes that map it.
        desc: what the progress bar says.
    """
    if not {"chosen", "rejected"} <= set(_columns(dataset) or []):
        return dataset
    return unpair_preference_dataset(dataset, num_proc=num_proc, desc=desc)


def prepare_multimodal_messages(messages: Sequence[Row], images: Sequence[Any] | None = None) -> list[dict[str, Any]]:
    """Messages with their contents as blocks, and images in those blocks that wait for one.

    Args:
        messages: with texts or blocks as contents. Where the first user's content is a text, a block for every image is put before it.
        images: one for each block `{"type": "image"}` that holds none yet, in order.

    Raises:
        DatasetError: more or fewer images than blocks for them, or another role than `system`, `user`, `assistant` or `tool`.
    """
    waiting = list(images or [])
    prepared: list[dict[str, Any]] = []
    first_user = True
    for message in messages:
        role, content = message["role"], message.get("content")
        if role not in ("system", "user", "assistant", "tool"):
            raise DatasetError(
                f"a message has the role {shorten(role)}. It must be 'system', 'user', 'assistant' or 'tool'."
            )
        if isinstance(content, str):
            before = [{"type": "image"} for _ in waiting] if role == "user" and first_user else []
            first_user = first_user and role != "user"
            message = {**message, "content": [*before, {"type": "text", "text": content}]}
        prepared.append(dict(message))

    def fillable(message: Row) -> list[dict]:
        blocks = (message.get("content") or []) if message["role"] != "tool" else []
        return [block for block in blocks if block["type"] == "image" and "image" not in block]

    places = sum(len(fillable(message)) for message in prepared)
    if places != len(waiting):
        raise DatasetError(
            f"{len(waiting)} images were given for {places} blocks of messages that wait for one. Give one for each {{'type': 'image'}}."
        )
    images_left = iter(waiting)
    for message in prepared:
        if wanting := fillable(message):
            message["content"] = [
                {**block, "image": next(images_left)} if any(block is each for each in wanting) else block
                for block in message["content"]
            ]
    return prepared


def supports_tool_calling(processing_class: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template writes all of an exchange with a tool: the name that is called, its arguments, and what it answers."""
    if processing_class.chat_template is None:
        return False
    call = {"type": "function", "function": {"name": "callee_1d7", "arguments": {"key_2c5": "value_3b9"}}}
    exchange: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "callee_1d7", "content": "answer_4a1"},
    ]
    try:
        text = ChatTemplate(processing_class).render(exchange, where="an exchange with a tool")
    except DatasetError:
        return False
    return all(part in text for part in ("callee_1d7", "key_2c5", "value_3b9", "answer_4a1"))


def _first(dataset: Any) -> Any:
    """The dataset, or the first of a dict of them."""
    return next(iter(dataset.values())) if isinstance(dataset, dict) else dataset


def _columns(dataset: Any) -> list[str] | None:
    return _first(dataset).column_names
