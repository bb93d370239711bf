"""The calls of tools in a conversation, as a chat template wants them and as the tools' schemas type them.

Datasets keep the arguments of a call in every form: an object, that object as JSON in a string (the form of most APIs), or an object whose values
are all strings (what a parser of tags leaves). A template writes what it is given, so the same call would be learned in three spellings, two of
them wrong. Here arguments become objects, and a value that is a string where the tool's JSON schema wants a number, a truth value, a list or an
object becomes that, if it is one; anything else stays as it is, because what a model should have said cannot be guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trellium.errors import DatasetError

_FITS: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
"""What JSON decodes to, by the names that JSON schemas have for it."""


def read_arguments(call: dict[str, Any], at: str) -> dict[str, Any]:
    """A call with its arguments as an object.

    Args:
        call: `{"type": "function", "function": {"name", "arguments"}}`, or its inner part.
        at: the message, for the error.

    Raises:
        DatasetError: arguments that are neither an object nor one as JSON.
    """
    if isinstance(call.get("function"), dict):
        return {**call, "function": read_arguments(call["function"], at)}
    given = arguments = call.get("arguments")
    if isinstance(given, str):
        try:
            arguments = json.loads(given) if given.strip() else {}
        except ValueError:
            arguments = given
    if arguments is None or isinstance(arguments, dict):
        return call if arguments is given else {**call, "arguments": arguments}
    raise DatasetError(
        f"{at} calls {call.get('name')!r} with 'arguments' that are {type(given).__name__} {repr(given)[:60]}. "
        'They must be an object, or one as a JSON string: \'{"city": "Paris"}\'.'
    )


def type_calls(messages: list[dict[str, Any]], tools: list[dict] | None) -> list[dict[str, Any]]:
    """The messages, with the arguments of each call typed by the schema of the tool that it names.

    Args:
        messages: of a conversation, read.
        tools: the row's JSON schemas; a call of a tool that is not among them stays as it is.
    """
    schemas = {}
    for tool in tools or []:
        function = tool.get("function", tool)
        if isinstance(function, dict) and isinstance(function.get("parameters"), dict):
            schemas[function.get("name")] = function["parameters"]
    if not schemas:
        return messages
    return [
        {**message, "tool_calls": [_typed_call(call, schemas) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _typed_call(call: dict[str, Any], schemas: Mapping[Any, dict]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _typed_call(call["function"], schemas)}
    schema = schemas.get(call.get("name"))
    if schema is None or "arguments" not in call:
        return call
    return {**call, "arguments": typed(call["arguments"], schema, schema)}


def typed(value: Any, schema: Any, root: Mapping[str, Any]) -> Any:
    """A value as its JSON schema types it; unchanged where it does not fit.

    Args:
        value: of an argument, or part of one.
        schema: of this value. `type`, `properties`, `items`, `anyOf`, `oneOf` and local `$ref` are understood.
        root: the whole schema, in which a `$ref` is looked up.
    """
    accepted = _alternatives(schema, root, depth=8)
    if isinstance(value, str):
        value = _decoded(value, [alternative.get("type") for alternative in accepted])
    for alternative in accepted:
        properties, items = alternative.get("properties"), alternative.get("items")
        if isinstance(value, dict) and isinstance(properties, dict):
            return {key: typed(field, properties.get(key), root) for key, field in value.items()}
        if isinstance(value, list) and isinstance(items, dict):
            return [typed(item, items, root) for item in value]
    return value


def _alternatives(schema: Any, root: Mapping[str, Any], depth: int) -> list[dict[str, Any]]:
    """The schemas any of which a value may follow, each with at most one `type`."""
    if not isinstance(schema, dict) or not depth:
        return []
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        found: Any = root
        for step in reference[2:].split("/"):
            found = found.get(step) if isinstance(found, Mapping) else None
        return _alternatives(found, root, depth - 1)
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return [each for choice in choices for each in _alternatives(choice, root, depth - 1)]
    types = schema.get("type")
    return [{**schema, "type": each} for each in (types if isinstance(types, list) else [types])]


def _decoded(text: str, types: list[Any]) -> Any:
    """What a string says, if that is of one of the types; a string where a string may be."""
    fitting = tuple(each for name in types if isinstance(name, str) for each in _FITS.get(name, ()))
    if "string" in types or not fitting:
        return text
    try:
        value = json.loads(text.lower() if text in ("True", "False") else text, parse_constant=_refuse)
    except ValueError:
        return text
    if isinstance(value, float) and value.is_integer() and float not in fitting:
        value = int(value)
    is_number_for_truth = isinstance(value, bool) and bool not in fitting
    return value if isinstance(value, fitting) and not is_number_for_truth else text


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
