"""Chat templates: a conversation as text, and which of its characters the assistant must learn to write.

`assistant_only_loss` needs to know, in the text a template renders, what the model itself would write. Some templates say so with
`{% generation %}` marks; then those are used, by transformers. Most do not. For them the answer is derived from the template alone, by
rendering it again on parts of the conversation and comparing; no template is known by name:

- A turn *begins* where the rendering of everything before it, with the generation prompt, ends: what the template gives at inference is
  not learned, all the rest is (a `<think>` block that is not part of the generation prompt, a call of a tool).
- It *ends* where the rendering up to and with it ends, cut after its last special token if only white space follows: the end-of-turn token is
  learned, the line break that the template writes after it is not, because generation stops before it.
- Where a rendering is not a prefix of the whole (templates that rewrite history, as Qwen3's does with old reasoning), the message's content
  is replaced by two characters that no text holds, and the change shows where the content lies; the end-of-turn is then what follows it
  both in the whole and when the turn is the last. A turn that is a call of a tool is found by what is written of it when it is the last.

If neither shows the place, the template cannot be handled, and an error names the row. A token that reaches over the border of a turn
counts as inside, as it does for transformers' own mask.

Cost: two more renderings an assistant turn, about 70 µs each, and no more tokenization.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from trellium.data.rows import Message, common_prefix_length, shorten
from trellium.errors import ConfigError, DatasetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SENTINEL = "\ue0f0\ue0f1"
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")

_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, KeyError)
"""What a template raises at a conversation it cannot write."""

Span = tuple[int, int]


def has_generation_marks(template: str) -> bool:
    """Whether a template marks what the assistant writes with `{% generation %}`."""
    return bool(_GENERATION_MARK.search(template))


class ChatTemplate:
    """A tokenizer's chat template.

    Args:
        tokenizer: one with a `chat_template`, a string or several by name.
        name: what to call the dataset in an error.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, name: str = "dataset") -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                f"{name} holds conversations, but the tokenizer {shorten(getattr(tokenizer, 'name_or_path', ''))} has no chat template to write them "
                "with. Use an instruct model's tokenizer, set chat_template_path, or give 'prompt' and 'completion' as plain text."
            )
        self.tokenizer = tokenizer
        special = {str(token) for token in tokenizer.all_special_tokens}
        special |= {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        special.discard("")
        self.special_tokens = tuple(sorted(special, key=lambda token: (-len(token), token)))
        self.stop_ids = frozenset(tokenizer.convert_tokens_to_ids(list(self.special_tokens)))
        self._special_pattern = (
            re.compile("(" + "|".join(map(re.escape, self.special_tokens)) + ")") if special else None
        )
        self._wants_blocks = False
        self._wants_blocks = not self._writes(_SENTINEL) and self._writes([{"type": "text", "text": _SENTINEL}])

    def _writes(self, content: object) -> bool:
        """Whether the template writes a content of this form. Those of models with images may pass over a string in silence, and want blocks."""
        try:
            return _SENTINEL in self.render([{"role": "user", "content": content}], where="")
        except DatasetError:
            return False

    def render(
        self,
        messages: list[Message],
        *,
        where: str,
        tools: list[dict] | None = None,
        options: dict[str, Any] | None = None,
        generation_prompt: bool = False,
    ) -> str:
        """The conversation as text.

        Args:
            where: the row, for the error.
            tools: JSON schemas of the tools that the system prompt offers.
            options: more variables of the template, the row's `chat_template_kwargs`.
            generation_prompt: end with what the template gives before an answer.

        Raises:
            DatasetError: the template refuses the conversation; carries the template's own words.
        """
        wanted = self.as_wanted(messages, where)
        try:
            return self.tokenizer.apply_chat_template(
                wanted,
                tools=tools,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **(options or {}),
            )
        except _REFUSALS as error:
            roles = ", ".join(message["role"] for message in messages[:8]) + (", …" if len(messages) > 8 else "")
            raise DatasetError(
                f"{where}: the tokenizer's chat template refuses this conversation (roles {roles}): {error}. "
                "Change the row to what the template expects, or set another template with chat_template_path."
            ) from error

    def as_wanted(self, messages: list[Message], where: str) -> list[Message]:
        """The messages in the form that this template writes: contents as blocks, calls of tools as it takes them."""
        if any("tool_calls" in message for message in messages):
            if self._wants_json_arguments is None:
                raise DatasetError(
                    f"{where}: a message calls a tool, but the tokenizer's chat template does not write calls, so the model would learn to say nothing. "
                    "Set a template that does with chat_template_path, or leave the row out."
                )
            if self._wants_json_arguments:
                messages = [_with_json_arguments(message) for message in messages]
        return self._in_blocks(messages) if self._wants_blocks else messages

    def _in_blocks(self, messages: list[Message]) -> list[Message]:
        return [
            message
            if isinstance(message["content"], list)
            else {**message, "content": [{"type": "text", "text": message["content"]}]}
            for message in messages
        ]

    @functools.cached_property
    def _wants_json_arguments(self) -> bool | None:
        """Whether the template concatenates the arguments of a call, so that they must be JSON: an object is refused, or written as Python does.

        None if it passes over calls in silence.
        """
        name, arguments = _SENTINEL[::-1], {"a": _SENTINEL}
        function = {"name": name, "arguments": arguments}
        call = {"type": "function", "id": "call00000", "function": function, **function}
        calling = {"role": "assistant", "content": "", "tool_calls": [call]}
        written: dict[bool, str] = {}
        for as_json in (False, True):
            conversation = [{"role": "user", "content": "a"}, _with_json_arguments(calling) if as_json else calling]
            with contextlib.suppress(*_REFUSALS):
                written[as_json] = self.tokenizer.apply_chat_template(
                    self._in_blocks(conversation) if self._wants_blocks else conversation, tokenize=False
                )
        best = [as_json for as_json, text in written.items() if _SENTINEL in text and str(arguments) not in text]
        named = [as_json for as_json, text in written.items() if name in text]
        # A template that refuses both may do so for what else it misses in these two messages.
        return next(iter((*best, *named)), None if written else False)

    def encode_marked(
        self,
        messages: list[Message],
        *,
        where: str,
        tools: list[dict] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[list[int], np.ndarray]:
        """The tokens of a conversation and, by the template's own `{% generation %}` marks, `[n]` bool of what the assistant wrote."""
        self.render(messages, where=where, tools=tools, options=options)  # the error with the row, if there is one
        encoded = self.tokenizer.apply_chat_template(
            self.as_wanted(messages, where),
            tools=tools,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **(options or {}),
        )
        return list(encoded["input_ids"]), np.asarray(encoded["assistant_masks"], dtype=bool)

    def marked_spans(
        self,
        messages: list[Message],
        *,
        where: str,
        tools: list[dict] | None = None,
        options: dict[str, Any] | None = None,
    ) -> list[Span]:
        """Where in the rendering of a conversation lies what the template's own `{% generation %}` marks say the assistant wrote."""
        from transformers.utils.chat_template_utils import render_jinja_template

        _, [spans] = render_jinja_template(
            conversations=[self.as_wanted(messages, where)],
            tools=tools,
            chat_template=self.tokenizer.get_chat_template(tools=tools),
            return_assistant_tokens_mask=True,
            **{**self.tokenizer.special_tokens_map, **(options or {})},
        )
        return [(start, end) for start, end in spans]

    def is_marked(self, tools: list[dict] | None = None) -> bool:
        """Whether the template that serves a row with these tools has `{% generation %}` marks."""
        return has_generation_marks(self.tokenizer.get_chat_template(tools=tools))

    def assistant_spans(
        self,
        messages: list[Message],
        text: str,
        *,
        where: str,
        tools: list[dict] | None = None,
        options: dict[str, Any] | None = None,
    ) -> list[Span]:
        """Where in `text`, the rendering of `messages`, lies what the assistant must learn: one `(start, end)` in characters a turn.

        Raises:
            DatasetError: this template hides the place for this row.
        """

        def rendered(part: list[Message], generation_prompt: bool = False) -> str | None:
            try:
                return self.render(part, where=where, tools=tools, options=options, generation_prompt=generation_prompt)
            except (
                DatasetError
            ):  # a part of a conversation may be refused where the whole is not, e.g. one without a user
                return None

        spans: list[Span] = []
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            floor = spans[-1][1] if spans else 0
            before = rendered(messages[:turn], generation_prompt=True)
            upto = text if turn == len(messages) - 1 else rendered(messages[: turn + 1])
            start: int | None
            end: int | None
            if before is not None and len(before) >= floor and text.startswith(before):
                start = len(before)
            else:
                start = self._start_by_content(messages, turn, text, before, upto, rendered)
            if upto is not None and text.startswith(upto):
                end = len(upto)
            else:
                end = self._end_by_content(messages, turn, text, upto, rendered)
                if end is None and None not in (start, before, upto):
                    end = self._end_by_last_turn(message, text, start, before, upto)

            if start is None or end is None or not floor <= start <= end:
                raise DatasetError(
                    f"{where}: cannot tell which part of message {turn}, {shorten(message['content'], 40)}, the assistant wrote: the tokenizer's chat "
                    "template rewrites the conversation when it grows. Mark the assistant's part in the template with "
                    "{% generation %}…{% endgeneration %} and set it with chat_template_path, check the row's chat_template_kwargs, or set assistant_only_loss=False."
                )
            spans.append((start, self._after_stop_token(text, start, end)))
        return spans

    def _content_span(self, messages, turn, text, rendered) -> tuple[int | None, int | None]:
        """Where the content of a message begins and ends in `text`; None where what stands before or after it depends on it."""
        changed = [*messages[:turn], {**messages[turn], "content": _SENTINEL}, *messages[turn + 1 :]]
        variant = rendered(changed)
        if variant is None or _SENTINEL in text or variant.count(_SENTINEL) != 1:
            return None, None
        head, tail = variant.split(_SENTINEL)
        if len(head) + len(tail) > len(text):
            return None, None
        return (len(head) if text.startswith(head) else None), (len(text) - len(tail) if text.endswith(tail) else None)

    def _start_by_content(self, messages, turn, text, before, upto, rendered) -> int | None:
        """The beginning of a turn: that of its content in `text`, and of what stands between `before` and the content in `upto`, if that is there too."""
        start, _ = self._content_span(messages, turn, text, rendered)
        if start is None or before is None or upto is None or not upto.startswith(before):
            return start
        last_start, _ = self._content_span(messages[: turn + 1], turn, upto, rendered)
        written = "" if last_start is None else upto[len(before) : last_start]
        return start - len(written) if text[:start].endswith(written) else start

    def _end_by_content(self, messages, turn, text, upto, rendered) -> int | None:
        """The end of a turn, from the end of its content in `text` and what follows it in `upto`, in which the turn is the last."""
        if upto is None:
            return None
        _, content_end = self._content_span(messages, turn, text, rendered)
        _, last_content_end = self._content_span(messages[: turn + 1], turn, upto, rendered)
        if content_end is None or last_content_end is None:
            return None
        end = content_end
        here, last = self._pieces(text[content_end:]), self._pieces(upto[last_content_end:])
        for mine, other in zip(here, last, strict=False):
            if mine == other:
                end += len(mine)
                continue
            if mine not in self.special_tokens and other not in self.special_tokens:
                end += common_prefix_length(mine, other)
            break
        return end

    def _end_by_last_turn(self, message, text, start, before, upto) -> int | None:
        """The end of a turn from what the template writes of it, after `before`, when it is the last: `text` must go on at `start` with all of
        that but a beginning, and this must hold what the message says. So it is where a template writes an empty `<think>` block into the last turn only.
        """
        if not upto.startswith(before):
            return None
        turn = upto[len(before) :]
        shared = next((turn[cut:] for cut in range(len(turn)) if text.startswith(turn[cut:], start)), "")
        said = [_text_of(message).strip(), *_tool_names(message)]
        return start + len(shared) if shared and any(said) and all(word in shared for word in said) else None

    def _pieces(self, text: str) -> list[str]:
        """`text` cut at special tokens, which are pieces of their own."""
        return [piece for piece in self._special_pattern.split(text) if piece] if self._special_pattern else [text]

    def _after_stop_token(self, text: str, start: int, end: int) -> int:
        """`end`, or the place after the turn's last special token if only white space follows it."""
        written = text[start:end].rstrip()
        return start + len(written) if written.endswith(self.special_tokens) else end


def _with_json_arguments(value: dict[str, Any]) -> dict[str, Any]:
    """A message, or a call in it, with the arguments of every call as JSON."""
    changed = dict(value)
    if "tool_calls" in value:
        changed["tool_calls"] = [_with_json_arguments(call) for call in value["tool_calls"]]
    if isinstance(value.get("function"), dict):
        changed["function"] = _with_json_arguments(value["function"])
    if isinstance(value.get("arguments"), dict):
        changed["arguments"] = json.dumps(value["arguments"], ensure_ascii=False)
    return changed


def _text_of(message: Message) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(block.get("text", "") for block in content)


def _tool_names(message: Message) -> list[str]:
    calls = [call for call in message.get("tool_calls", []) if isinstance(call, dict)]
    return [str(call.get("function", call).get("name", "")) for call in calls]


def tokens_in_spans(offsets: Sequence[tuple[int, int]], spans: list[Span]) -> np.ndarray:
    """`[n]` bool: which tokens, by their `(start, end)` in characters, share a character with one of the ascending `spans`.

    A token of no width, which some tokenizers insert, belongs where it stands.
    """
    mask = np.zeros(len(offsets), dtype=bool)
    if not spans or not len(offsets):
        return mask
    place = np.asarray(offsets, dtype=np.int64)
    starts, ends = place[:, 0], np.maximum(place[:, 1], place[:, 0] + 1)
    for start, end in spans:
        mask |= (starts < end) & (ends > start)
    return mask


def tokens_in_spans_by_prefix(
    tokenizer: PreTrainedTokenizerBase, text: str, input_ids: list[int], spans: list[Span]
) -> np.ndarray:
    """`tokens_in_spans` for a tokenizer that does not tell where its tokens lie: a border is where the tokens of the text before it end.

    Cost: one tokenization a border.
    """
    mask = np.zeros(len(input_ids), dtype=bool)
    for start, end in spans:
        first, last = (
            common_prefix_length(tokenizer(text[:border], add_special_tokens=False)["input_ids"], input_ids)
            for border in (start, end)
        )
        mask[first:last] = True
    return mask
