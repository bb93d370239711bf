"""A chat template taken apart into what it writes, piece by piece, and put together again.

The nodes are statements as jinja reads them: those that write (each as the concatenation it is), those that do not, and branches and loops with their bodies. Put together
they are a template without free text, so that no white space depends on what stands beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jinja2.sandbox

_OPEN, _MIDDLE, _CLOSE = "\ue200", "\ue201", "\ue202"
_PLACES = re.compile(f"{_OPEN}([0-9]+){_MIDDLE}|{_CLOSE}")
_TRANSPARENT = {"if": "endif", "for": "endfor", "with": "endwith"}
"""Tags whose bodies are written where they stand."""
_OPAQUE = {"macro", "call", "filter", "generation", "autoescape", "block"}
"""Tags whose bodies are made into a value first."""
_NO_SUM = {"if", "else", "and", "or", "not", "in", "is", "==", "!=", "<", ">", "<=", ">=", "-", "*", "/", "//", "%"}


@dataclass(slots=True)
class Piece:
    """What one statement writes, or a part of it: an expression, or a text."""

    source: str
    text: str | None = None
    inside: set[bool] = field(default_factory=set)
    cuts: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Written:
    """An output statement, as the pieces it is the concatenation of."""

    source: str
    pieces: list[Piece]


@dataclass(slots=True)
class Silent:
    """A statement that writes nothing where it stands: if it sets a variable to a concatenation, which, and its parts."""

    source: str
    name: str = ""
    pieces: list[Piece] = field(default_factory=list)


@dataclass(slots=True)
class Block:
    """Branches with their tags, and the tag that ends them."""

    branches: list[tuple[str, list[Any]]]
    end: str


def _tags(source: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """`("data", …)`, `("variable", …)` and `("block", …)` in turn, with their tokens; as jinja lexes what transformers renders."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    inside: list[tuple[str, str]] = []
    for _, kind, value in environment.lex(source):
        if kind in ("variable_begin", "block_begin"):
            inside = []
        elif kind in ("variable_end", "block_end"):
            yield kind.removesuffix("_end"), inside
        elif kind == "data":
            yield "data", [("data", value)]
        elif kind.startswith(("comment", "raw")):
            continue
        else:
            inside.append((kind, value))


def _joined(tokens: list[tuple[str, str]]) -> str:
    return "".join(value for _, value in tokens).strip()


def _text_of(tokens: list[tuple[str, str]]) -> str | None:
    """The text that a single string token stands for, as jinja reads it."""
    words = [token for token in tokens if token[0] != "whitespace"]
    if len(words) != 1 or words[0][0] != "string":
        return None
    return words[0][1][1:-1].encode("ascii", "backslashreplace").decode("unicode-escape")


def _summands(tokens: list[tuple[str, str]], known: str) -> list[list[tuple[str, str]]]:
    """The parts of a concatenation of texts, one of them or the variable `known`; the whole where it is none for sure."""
    depth, operators = 0, set()
    parts: list[list[tuple[str, str]]] = [[]]
    for kind, value in tokens:
        depth += (value in "([{") - (value in ")]}") if kind == "operator" else 0
        if depth == 0 and (value in _NO_SUM or value in "+~") and kind in ("operator", "name"):
            operators.add(value)
        if depth == 0 and kind == "operator" and value in "+~":
            parts.append([])
        else:
            parts[-1].append((kind, value))
    is_text = "~" in operators or any(_text_of(part) is not None or _joined(part) == known for part in parts)
    return parts if operators <= {"+", "~"} and is_text else [tokens]


def summand_pieces(tokens: list[tuple[str, str]], known: str = "") -> list[Piece]:
    return [Piece(_joined(part), _text_of(part)) for part in _summands(tokens, known)]


def _with_value(before: list[Any], output: Written) -> list[Any]:
    """What an output statement writes: of a variable that was set to a concatenation just before it, and perhaps got a beginning under a condition
    (`{% set content = … %}{% if … %}{% set content = bos_token + content %}{% endif %}{{ content }}`), the parts."""
    beginnings: list[Block] = []
    for node in reversed(before):
        if isinstance(node, Silent) and node.name == output.source and len(node.pieces) > 1:
            return [*beginnings, Written("", node.pieces)]
        inner = node.branches[0][1] if isinstance(node, Block) and len(node.branches) == 1 else []
        if len(inner) != 1 or not isinstance(inner[0], Silent) or inner[0].name != output.source:
            break
        *more, last = inner[0].pieces
        if last.source != output.source:
            break
        beginnings.insert(0, Block([(node.branches[0][0], [Written("", more)])], node.end))
    return [output]


def parse_template(source: str) -> list[Any]:
    tags = list(_tags(source))
    position = 0

    def body(ends: tuple[str, ...]) -> list[Any]:
        nonlocal position
        nodes: list[Any] = []
        while position < len(tags):
            kind, tokens = tags[position]
            word = next((value for name, value in tokens if name == "name"), "") if kind == "block" else ""
            if word in ends:
                break
            position += 1
            if kind == "data":
                nodes.append(Written(ascii(tokens[0][1]), [Piece(ascii(tokens[0][1]), tokens[0][1])]))
            elif kind == "variable":
                nodes += _with_value(nodes, Written(_joined(tokens), summand_pieces(tokens)))
            elif word in _TRANSPARENT:
                nodes.append(block(tokens, _TRANSPARENT[word]))
            elif word in _OPAQUE or (word == "set" and ("operator", "=") not in tokens):
                inner = body((f"end{word}",))
                position += 1
                nodes.append(Silent(f"{tag_of(_joined(tokens))}{source_of(inner)}{tag_of(f'end{word}')}"))
                if word != "macro" and word != "set":
                    nodes[-1] = Written("", [Piece(nodes[-1].source)])
            elif word == "set":
                equals = tokens.index(("operator", "="))
                name = _joined(tokens[:equals]).removeprefix("set").strip()
                nodes.append(Silent(tag_of(_joined(tokens)), name, summand_pieces(tokens[equals + 1 :], name)))
            else:
                nodes.append(Silent(tag_of(_joined(tokens))))
        return nodes

    def block(tokens: list[tuple[str, str]], end: str) -> Block:
        nonlocal position
        branches = []
        while True:
            branches.append((_joined(tokens), body((end, "elif", "else"))))
            tokens = tags[position][1]
            position += 1
            if _joined(tokens) == end:
                return Block(branches, end)

    return body(())


# ---- and put together


def tag_of(inner: str) -> str:
    return f"{{%- {inner} -%}}"


def _output(piece: Piece | Written) -> str:
    return piece.source if piece.source.startswith("{%") else f"{{{{- {piece.source} -}}}}"


def source_of(nodes: list[Any]) -> str:
    """Nodes as a template, as they came."""
    parts = []
    for node in nodes:
        if isinstance(node, Block):
            parts += [tag_of(tag) + source_of(inner) for tag, inner in node.branches]
            parts.append(tag_of(node.end))
        elif isinstance(node, Written) and node.source:
            parts.append(_output(node))
        else:
            parts.append(node.source if isinstance(node, Silent) else "".join(map(_output, node.pieces)))
    return "".join(parts)


def pieces_of(nodes: list[Any]) -> Iterator[Piece]:
    for node in nodes:
        if isinstance(node, Block):
            for _, inner in node.branches:
                yield from pieces_of(inner)
        elif isinstance(node, Written):
            yield from node.pieces


def told(nodes: list[Any], number: Iterator[int]) -> str:
    """Nodes as a template that writes each piece between its number and a mark."""
    parts = []
    for node in nodes:
        if isinstance(node, Block):
            parts += [tag_of(tag) + told(inner, number) for tag, inner in node.branches]
            parts.append(tag_of(node.end))
        elif isinstance(node, Silent):
            parts.append(node.source)
        else:
            for piece in node.pieces:
                opened = ascii(f"{_OPEN}{next(number)}{_MIDDLE}")
                parts.append(f"{{{{- {opened} -}}}}{_output(piece)}{{{{- {_CLOSE!a} -}}}}")
    return "".join(parts)


def places(text: str) -> Iterator[tuple[int, int, int]]:
    """The number, start and end of every piece in the text without their marks."""
    removed, opened = 0, (0, 0)
    for mark in _PLACES.finditer(text):
        if mark[1] is None:
            yield *opened, mark.start() - removed
        removed += len(mark[0])
        if mark[1] is not None:
            opened = int(mark[1]), mark.end() - removed
