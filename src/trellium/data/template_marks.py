"""Write `{% generation %}` marks into a chat template that has none, whatever template it is.

The template is taken apart into statements, its texts and concatenations into pieces, and rendered on a few conversations with every piece's place in the result
known. Which characters the assistant writes is known too (`trellium.data.templates.assistant_spans`, from renderings alone), so each piece is the assistant's,
or not, or, where one statement writes the turns of all roles, the assistant's by the role of its message. Neighbours of one kind get one pair of marks. A text that
reaches over the border of a turn is cut there.

A text that is the assistant's in some of its turns and the prompt's in others (GPT-OSS writes `<|start|>assistant` before an answer, and within a turn after its
reasoning) stays unmarked.

What comes out is written without free text, so that no white space depends on the marks, and is checked: it must render every conversation as the template does,
and mark what the assistant writes in each, to the character but for white space between two end tokens. A template that hides it (one expression that writes more than the turn) is an error.

Cost: about 40 renderings of some short conversations, under a second.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from trellium.data.template_parts import (
    Block,
    Piece,
    Silent,
    Written,
    parse_template,
    pieces_of,
    places,
    source_of,
    tag_of,
    told,
)
from trellium.data.templates import ChatTemplate, Span
from trellium.errors import ConfigError, DatasetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Which."}}},
    },
}


def weather_call(city: str) -> dict[str, Any]:
    """A call of `WEATHER`, with its name where either kind of template looks for it."""
    function = {"name": "weather", "arguments": {"city": city}}
    return {"type": "function", "id": "call00001", "function": function, **function}


def _message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


_ASKED = [_message("user", "What is red?"), _message("assistant", "An apple.")]
_CALLED = [
    _message("user", "How is it there?"),
    _message("assistant", "", tool_calls=[weather_call("Paris")]),
    _message("tool", "sunny", name="weather", tool_call_id="call00001"),
]
_CONVERSATIONS: list[tuple[list[dict[str, Any]], list[dict] | None]] = [
    (_ASKED, None),
    ([*_ASKED, _message("user", "And blue?"), _message("assistant", "The sky, mostly.")], None),
    ([_message("system", "Be short."), *_ASKED, *_ASKED], None),
    ([*_CALLED, _message("assistant", "It is sunny.")], [WEATHER]),
    ([*_ASKED, *_CALLED, _message("assistant", "Sunny."), *_ASKED], [WEATHER]),
    ([_message("user", "Why?"), _message("assistant", "<think>\nHm.\n</think>\n\nSo it is.")], None),
    ([_message("user", "Why?"), _message("assistant", "So it is.", reasoning_content="Hm.")], None),
]


# ---- where marks go


def _kinds(node: Any) -> set[str]:
    """Of which kinds the pieces of a node are, as far as they wrote anything: `in`, `out`, `mixed`."""
    names = {frozenset({True}): "in", frozenset({False}): "out", frozenset({True, False}): "mixed"}
    return {names[frozenset(piece.inside)] for piece in pieces_of([node]) if piece.inside}


def _marked(nodes: list[Any], message: str | None, *, over_silent: bool) -> str:
    """Nodes as a template with marks around what is the assistant's.

    Args:
        message: the variable of the loop that stands around them.
        over_silent: whether a pair of marks may stand around statements that write nothing, whose variables end with it.
    """
    nodes = [part for node in nodes for part in _apart(node)]
    kinds = [_kinds(node) for node in nodes]
    parts, place = [], 0
    while place < len(nodes):
        end = place
        if kinds[place] and kinds[place] <= {"in", "mixed"}:
            end = max(_run(nodes, kinds, place, over_silent=over_silent)) + 1
        if end == place:
            parts.append(_inner_marked(nodes[place], message, over_silent=over_silent))
            place += 1
            continue
        plain, marks = source_of(nodes[place:end]), (tag_of("generation"), tag_of("endgeneration"))
        marked = plain.join(marks)
        if any("mixed" in kind for kind in kinds[place:end]):
            condition = tag_of(f"if {message}.role == 'assistant'")
            marked = f"{condition}{marked}{tag_of('else')}{plain}{tag_of('endif')}"
        parts.append(marked)
        place = end
    return "".join(parts)


def _run(nodes: list[Any], kinds: list[set[str]], start: int, *, over_silent: bool) -> Iterator[int]:
    """The places from `start` on of what is the assistant's without a gap."""
    for place in range(start, len(nodes)):
        if not kinds[place] <= {"in", "mixed"} or (not over_silent and isinstance(nodes[place], Silent)):
            return
        if kinds[place]:
            yield place


def _apart(node: Any) -> list[Any]:
    """An output statement as its pieces, where they are not of one kind."""
    if not isinstance(node, Written) or len(_kinds(node)) < 2:
        return [node]
    return [Written(piece.source, [piece]) for piece in node.pieces]


def _inner_marked(node: Any, message: str | None, *, over_silent: bool) -> str:
    if not isinstance(node, Block):
        return source_of([node])
    parts = []
    for tag, inner in node.branches:
        loop = re.match(r"for\s+(\w+)\s+in\b", tag)
        parts.append(tag_of(tag) + _marked(inner, loop[1] if loop else message, over_silent=over_silent))
    return "".join([*parts, tag_of(node.end)])


# ---- what the assistant writes


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A conversation, what the template makes of it, and where the assistant's turns lie."""

    messages: list[dict[str, Any]]
    tools: list[dict] | None
    text: str
    spans: list[Span]


def _rendered(template: ChatTemplate) -> list[_Rendered]:
    """The conversations that the template takes."""
    found = []
    for messages, tools in _CONVERSATIONS:
        try:
            text = template.render(messages, where="conversation", tools=tools)
            spans = template.assistant_spans(messages, text, where="conversation", tools=tools)
            wanted = template.as_wanted(messages, "conversation")
        except DatasetError:
            continue
        found.append(_Rendered(wanted, tools, text, spans))
    return found


def _learn(nodes: list[Any], tokenizer: PreTrainedTokenizerBase, examples: list[_Rendered]) -> bool:
    """Note of every piece whether it is the assistant's, and where it must be cut; whether any must be."""
    pieces = list(pieces_of(nodes))
    for piece in pieces:
        piece.inside, piece.cuts = set(), set()
    with_places = told(nodes, itertools.count())
    for example in examples:
        text = tokenizer.apply_chat_template(
            example.messages, tools=example.tools, tokenize=False, chat_template=with_places
        )
        for number, start, end in places(text):
            if start == end:
                continue
            piece = pieces[number]
            piece.cuts |= {border - start for span in example.spans for border in span if start < border < end}
            piece.inside.add(any(first <= start and end <= last for first, last in example.spans))
    for piece in pieces:
        if len(piece.inside) == 2 and (piece.text or "").isspace():
            piece.inside = {
                False
            }  # the line break after a turn, which is the assistant's where an end of text follows it
    return any(piece.cuts for piece in pieces)


def _cut(nodes: list[Any]) -> None:
    """Cut texts at the borders of turns.

    Raises:
        ConfigError: an expression reaches over one.
    """
    for node in nodes:
        if isinstance(node, Block):
            for _, inner in node.branches:
                _cut(inner)
        elif isinstance(node, Written):
            node.pieces = [part for piece in node.pieces for part in _parts_of(piece)]


def _parts_of(piece: Piece) -> list[Piece]:
    if not piece.cuts:
        return [piece]
    if piece.text is None:
        raise ConfigError(
            f"the chat template cannot be marked: {{{{ {piece.source} }}}} writes what the assistant says and what it does not. assistant_only_loss "
            "needs no marks here; for a template with marks write that expression as several."
        )
    borders = [0, *sorted(piece.cuts), len(piece.text)]
    texts = [piece.text[start:end] for start, end in itertools.pairwise(borders)]
    return [Piece(ascii(text), text) for text in texts]


def _leave_out(nodes: list[Any]) -> set[str]:
    """Let texts that are the assistant's in some turns and the prompt's in others be the prompt's: which."""
    mixed = [piece for piece in pieces_of(nodes) if len(piece.inside) == 2 and piece.text]
    for piece in mixed:
        piece.inside = {False}
    return {str(piece.text) for piece in mixed}


def _is_right(marked: str, tokenizer: PreTrainedTokenizerBase, examples: list[_Rendered], left_out: set[str]) -> bool:
    """Whether a template renders all examples as they are, and marks what the assistant writes but for the texts that are left out."""
    for example in examples:
        options = {"tools": example.tools, **tokenizer.special_tokens_map}
        (text,), (marks,) = render_jinja_template(
            [example.messages], chat_template=marked, return_assistant_tokens_mask=True, **options
        )
        marked_there, written = _characters(marks), _characters(example.spans)
        missed = "".join(text[place] if place in written - marked_there else "\0" for place in range(len(text)))
        if text != example.text or any(not text[place].isspace() for place in marked_there - written):
            return False
        if any(part.strip() and part not in left_out for part in missed.split("\0")):
            return False
        first = next(place for place, message in enumerate(example.messages) if message["role"] == "assistant")
        asked = {"tools": example.tools, "tokenize": False, "add_generation_prompt": True}
        given, prompt = (
            tokenizer.apply_chat_template(example.messages[:first], chat_template=template, **asked)
            for template in (None, marked)
        )
        if prompt != given:
            return False
    return True


def _characters(spans: list[Span]) -> set[int]:
    return {place for start, end in spans for place in range(start, end)}


def with_generation_marks(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer's chat template with `{% generation %}` marks around what the assistant writes, the end of its turn included.

    Raises:
        ConfigError: no chat template, one that takes none of the conversations that are tried, or one that hides what the assistant writes.
    """
    template = ChatTemplate(tokenizer, name="get_training_chat_template")
    examples = _rendered(template)
    if not examples:
        raise ConfigError(
            "the chat template cannot be marked: it refuses a question with an answer, or hides which of it is the answer."
        )
    nodes = parse_template(tokenizer.get_chat_template())
    if _learn(nodes, tokenizer, examples):
        _cut(nodes)
        _learn(nodes, tokenizer, examples)
    left_out: set[str] = set()
    for strict in (True, False):
        if not strict:
            left_out = _leave_out(nodes)
        for over_silent in (True, False):
            marked = _marked(nodes, None, over_silent=over_silent)
            with contextlib.suppress(jinja2.TemplateError, TypeError, ValueError):
                if _is_right(marked, tokenizer, examples, left_out):
                    return marked
    raise ConfigError(
        "the chat template cannot be marked: with marks it does not render what it did, or they miss part of what the assistant writes. "
        "assistant_only_loss needs no marks here."
    )


def get_training_chat_template(processing_class: Any) -> str | None:
    """The chat template of a tokenizer, or of a processor with one, with `{% generation %}` marks; None if it has them.

    TRL's name; it knows a list of templates by their exact text. No template has to be set here for `assistant_only_loss`, which finds the assistant's part in any.
    The template is the tokenizer's own in all else: one that rewrites earlier turns (Qwen3 drops their reasoning) still does.

    Raises:
        ConfigError: as for `with_generation_marks`.
    """
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if tokenizer is not processing_class:
        tokenizer = copy.copy(tokenizer)
        tokenizer.chat_template = processing_class.chat_template
    return None if ChatTemplate(tokenizer).is_marked() else with_generation_marks(tokenizer)
