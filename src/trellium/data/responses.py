"""What a model wrote, as a message: its reasoning, its words, and the tools it calls.

transformers parses a response by a `response_template` (which field opens and closes with what); few tokenizers bring one. Here it is made from the chat template: where
the assistant's turn begins and ends is read from its renderings, and how it writes a call is the one of a few dialects by which messages that the template wrote are
read back as they were. So a template is known by what it does, not by its text, and a changed line changes nothing. Arguments are typed by the tool's JSON schema, as they
are for training (`trellium.data.tool_calls`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from transformers.utils import get_json_schema
from transformers.utils.chat_parsing import parse_response as parse_by_template

from trellium.data.template_marks import WEATHER, weather_call
from trellium.data.templates import ChatTemplate
from trellium.data.tool_calls import type_calls
from trellium.errors import ConfigError, DatasetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_THOUGHTS = (
    {"open": "<think>", "close_pattern": r"</think>\s*"},
    {"open": "<|channel>thought\n", "close_pattern": r"<channel\|>\s*"},  # Gemma 4
)
_LAST_TOKENS = re.compile(r"(?:(?:<[^<>\s]+>|\[[^\[\]\s]+\])\s*)+$")
"""What ends a text if it is written as special tokens are."""


def _tagged(open_pattern: str, close_pattern: str, tag_pattern: str) -> dict[str, Any]:
    """Calls whose arguments are tags with the text of a value."""
    arguments = {"tag_pattern": tag_pattern}
    field = {"open_pattern": open_pattern, "close_pattern": close_pattern, "content": "xml-inline"}
    return {**field, "repeats": True, "content_args": arguments, "transform": _NAMED}


def _json_after(open_pattern: str, close_pattern: str, **dialect: Any) -> dict[str, Any]:
    """Calls whose arguments are JSON behind their name."""
    field = {"open_pattern": open_pattern, "close_pattern": close_pattern, "content": "json"}
    return {**field, "repeats": True, "content_args": dialect, "transform": _NAMED}


_CALL_DIALECTS: dict[str, dict[str, Any]] = {
    # Qwen, Hermes and many others: the call as JSON
    "json": {
        "open": "<tool_call>",
        "close_pattern": r"</tool_call>\s*",
        "repeats": True,
        "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    },
    # Qwen3.5, Nemotron 3
    "parameters": _tagged(
        r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        r"</function>\s*</tool_call>\s*",
        r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>",
    ),
    # GLM 4.5
    "keys": _tagged(
        r"<tool_call>(?P<name>[^\s<]+)\s*",
        r"</tool_call>\s*",
        r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
    ),
    # Llama 3.1 and later: the turn is the call
    "llama": _json_after(r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*', r"\}\s*<\|e(?:ot|om)_id\|>\s*"),
    # Gemma 4
    "gemma": _json_after(
        r"<\|tool_call>call:(?P<name>[^\s{]+)",
        r"<tool_call\|>\s*(?:<\|tool_response>)?",
        string_delims=[['<|"|>', '<|"|>']],
        unquoted_keys=True,
    ),
    # DeepSeek V3
    "deepseek": _json_after(
        r"(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n",
        r"\n```<｜tool▁call▁end｜>\s*(?:<｜tool▁calls▁end｜>)?",
    ),
    # LFM 2
    "python": {
        "open": "<|tool_call_start|>",
        "close_pattern": r"<\|tool_call_end\|>\s*",
        "content": "python-call-list",
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
        "transform_each": True,
    },
}

_HARMONY = {
    "thinking": {"open": "<|channel|>analysis<|message|>", "close_pattern": r"<\|end\|>\s*"},
    "content": {"open": "<|channel|>final<|message|>", "close_pattern": r"<\|(?:return|end)\|>\s*"},
    "tool_calls": _json_after(
        r"to=functions\.(?P<name>\S+?)<\|channel\|>commentary(?:\s+json|\s*<\|constrain\|>json)?<\|message\|>",
        r"<\|call\|>\s*",
    ),
}
"""GPT-OSS, in which every part has a channel."""


def add_response_schema(processing_class: Any) -> Any:
    """Let `processing_class.parse_response` read what its model writes.

    Args:
        processing_class: a tokenizer, or a processor with one, that has a chat template. Its `response_template` is set; one that it brings is kept.

    Returns:
        The same object.

    Raises:
        ConfigError: no chat template, or one that writes messages in a way that is not known here.
    """
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if getattr(tokenizer, "response_template", None) is None:
        tokenizer.response_template = response_template_of(processing_class)
    return processing_class


def response_template_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The response template by which the messages that `tokenizer`'s chat template writes are read back.

    Raises:
        ConfigError: as for `add_response_schema`.
    """
    examples = list(_written(ChatTemplate(tokenizer, name="add_response_schema")))
    for fields in _candidates(examples):
        template = {"defaults": {"role": "assistant"}, "start_anchor": _anchor(tokenizer, examples), "fields": fields}
        if all(_reads_back(template, *example) for example in examples):
            return template
    raise ConfigError(
        "the chat template writes messages in a way that is not known here, so they cannot be read back. Set the tokenizer's response_template: transformers' "
        "page on response parsing says how."
    )


def parse_response(
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    prefix: Sequence[int] | None = None,
    tools: Sequence[dict | Callable] | None = None,
) -> dict[str, Any]:
    """A response as a message; what cannot be read (a call cut short, no JSON) is its text as it stands.

    Args:
        tokenizer: one with a `response_template` (`add_response_schema`).
        ids: the tokens of the response.
        prefix: those of the prompt before it, where it may hold the beginning of the message (`<think>`).
        tools: JSON schemas, or functions, by which arguments are typed: `"7"` is 7 where an integer belongs.

    Returns:
        `role`, `content` (a string, perhaps empty), and where the model wrote them `reasoning_content` or `thinking`, and `tool_calls`, each with its name and arguments.

    Raises:
        ConfigError: no `response_template`.
    """
    if getattr(tokenizer, "response_template", None) is None:
        raise ConfigError(
            "the tokenizer has no response_template to read a response by. Call add_response_schema(tokenizer) first."
        )
    before = tokenizer.decode(list(prefix)) if prefix is not None else ""
    try:
        parsed = parse_by_template(tokenizer.decode(list(ids)), tokenizer.response_template, prefix=before)
        calls = [_whole(call) for call in parsed.get("tool_calls", ())]
    except (ValueError, TypeError, KeyError):
        return {"role": "assistant", "content": tokenizer.decode(list(ids), skip_special_tokens=True)}
    content = (parsed.get("content") or "").removesuffix(tokenizer.eos_token or "")
    message = {**parsed, "content": content, **({"tool_calls": calls} if calls else {})}
    schemas = [get_json_schema(tool) if callable(tool) else tool for tool in tools or ()]
    return type_calls([message], schemas)[0]


def _whole(call: Any) -> dict[str, Any]:
    """A call with its name and arguments.

    Raises:
        ValueError: it has no name, or arguments that are none.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"no call of a tool: {call!r}")
    arguments = function.get("arguments")
    if not isinstance(arguments, dict | None):
        raise ValueError(f"no arguments: {arguments!r}")
    return {**call, "function": {**function, "arguments": arguments or {}}}


# ---- messages that the template wrote

_Example = tuple[dict[str, Any], str, str]
"""A message, the prompt before it, and what the template writes of it."""


def _written(template: ChatTemplate) -> Iterator[_Example]:
    asked = {"role": "user", "content": "How is it there?"}
    said = {"role": "assistant", "content": "It is sunny."}
    calling = {"role": "assistant", "content": "", "tool_calls": [weather_call("Paris")]}
    twice = {**calling, "tool_calls": [weather_call("Paris"), weather_call("Rome")]}
    for message in (said, calling, twice, {**said, "reasoning_content": "Hm."}, {**said, "thinking": "Hm."}):
        tools = [WEATHER] if "tool_calls" in message else None
        conversation = [asked, message]
        try:
            text = template.render(conversation, where="message", tools=tools)
            ((start, end),) = template.assistant_spans(conversation, text, where="message", tools=tools)
        except DatasetError:
            continue
        shown: tuple[Any, ...] = (
            message.get("thinking", message.get("reasoning_content", "")),
            *("Rome",) * (message is twice),
        )
        if all(part in text for part in shown):
            yield message, text[:start], text[start:end]


def _anchor(tokenizer: PreTrainedTokenizerBase, examples: list[_Example]) -> str:
    """What stands before every answer: the generation prompt, without the beginning of the answer that some write with it."""
    asked: Any = {"conversation": [{"role": "user", "content": "a"}], "tokenize": False}
    with_prompt = tokenizer.apply_chat_template(**asked, add_generation_prompt=True)
    without = tokenizer.apply_chat_template(**asked)
    added = with_prompt[len(without) :] if with_prompt.startswith(without) else ""
    anchor = added.partition("<think>")[0]
    if anchor.strip():
        return anchor
    last = _LAST_TOKENS.search(examples[0][1]) if examples else None
    return last[0] if last else (examples[0][1].splitlines()[-1] if examples else "\n")


def _candidates(examples: list[_Example]) -> Iterator[dict[str, Any]]:
    """The fields of templates that may read the examples."""
    texts = [written for _, _, written in examples]
    if any("<|channel|>final<|message|>" in text for text in texts):
        yield _HARMONY
        return
    ends = {token for message, _, text in examples if message["content"] for token in _end_tokens(text)}
    content = {"close_pattern": rf"(?:(?:{'|'.join(map(re.escape, sorted(ends)))})\s*)+"} if ends else {}
    thoughts = [key for key in ("reasoning_content", "thinking") if any(key in message for message, _, _ in examples)]
    calls = any("tool_calls" in message for message, _, _ in examples)
    for thought in _THOUGHTS:
        plain = {next(iter(thoughts), "reasoning_content"): thought, "content": content}
        for dialect in _CALL_DIALECTS.values() if calls else ():
            yield {**plain, "tool_calls": dialect}
        if not calls:
            yield plain


def _end_tokens(text: str) -> list[str]:
    last = _LAST_TOKENS.search(text)
    return re.findall(r"<[^<>\s]+>|\[[^\[\]\s]+\]", last[0]) if last else []


def _reads_back(template: dict[str, Any], message: dict[str, Any], prompt: str, written: str) -> bool:
    try:
        parsed = parse_by_template(written, template, prefix=prompt)
        calls = [_whole(call)["function"] for call in parsed.get("tool_calls", ())]
    except (ValueError, TypeError, KeyError):
        return False
    wanted = [call["function"] for call in message.get("tool_calls", ())]
    thought = message.get("thinking", message.get("reasoning_content"))
    said = parsed.get("content") or ""
    return (
        said == message["content"]
        and calls == wanted
        and (thought is None or thought in (parsed.get("thinking"), parsed.get("reasoning_content")))
    )
