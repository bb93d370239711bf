"""What a Python frame is called, and what it was called with, in the words of whoever wrote the model.

Dynamo compiles the outermost frame, which for most models of transformers is a decorator's `wrapper(*args, **kwargs)`, and for a module of
torch's own is torch's. Here such a frame is named by the module's class and method, and its `args[1]` by the method's parameter.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_DEEPEST = 6


@dataclass(frozen=True)
class Input:
    """One tensor a frame was called with: `batch['input_ids']`, its sizes, its dtype, and which dimensions are symbolic."""

    argument: str
    shape: tuple[int, ...]
    dtype: str
    dynamic: tuple[int, ...] = ()

    def __str__(self) -> str:
        sizes = "x".join(f"{size}*" if i in self.dynamic else str(size) for i, size in enumerate(self.shape))
        return f"{self.argument} {sizes or 'scalar'}"


@dataclass(frozen=True)
class Subject:
    """A frame as it is spoken of.

    `name` is `Qwen3ForCausalLM.forward`, or `Qwen3ForCausalLM.forward@431` where it goes on after a graph break; `location` is `file:line`.
    `varargs` and `keywords` are what the frame calls its `*args` and `**kwargs`, `positional` what the items of `*args` are called.
    """

    name: str
    location: str
    varargs: str | None = None
    keywords: str | None = None
    positional: tuple[str, ...] = ()

    def argument(self, name: str, key: str | int) -> str:
        """An item of a local variable: of `**kwargs` and `*args` by its own name, if it has one."""
        if name == self.keywords and isinstance(key, str):
            return key
        if name == self.varargs and isinstance(key, int) and key < len(self.positional):
            return self.positional[key]
        return f"{name}[{key!r}]"


def subject_of(code: CodeType, values: Mapping[str, Any]) -> Subject:
    """Name a frame from its code and its local and free variables."""
    import torch

    name, where = code.co_qualname.replace("<locals>.", ""), code
    names = _argument_names(code)
    varargs = (
        names[-2 if code.co_flags & inspect.CO_VARKEYWORDS else -1] if code.co_flags & inspect.CO_VARARGS else None
    )
    keywords = names[-1] if code.co_flags & inspect.CO_VARKEYWORDS else None
    positional: tuple[str, ...] = ()
    first = values.get(names[0]) if names else None
    if name == "wrap_inline.inner" and "fn" in values:  # torch's own, around a module or a method of one
        wrapped = values["fn"]
        owner = getattr(wrapped, "__self__", wrapped)
        if isinstance(owner, torch.nn.Module):
            where = inspect.unwrap(type(owner).forward).__code__
            name = f"{type(owner).__name__}.forward"
            positional = where.co_varnames[1 : where.co_argcount]
    elif isinstance(first, torch.nn.Module):
        name = f"{type(first).__name__}.{code.co_name}"
    elif names and names[0] == varargs and isinstance(first, tuple) and first and isinstance(first[0], torch.nn.Module):
        method = _method_of(type(first[0]), code)
        if method is not None:
            attribute, where = method
            name = f"{type(first[0]).__name__}.{attribute}"
            positional = where.co_varnames[: where.co_argcount]
    line = where.co_firstlineno
    head, resumed, at = name.partition("torch_dynamo_resume_in_")
    if resumed:
        function, _, number = at.rpartition("_at_")
        name, line = f"{head}{function}@{number}", int(number) if number.isdigit() else line
    return Subject(name, f"{where.co_filename}:{line}", varargs, keywords, positional)


def inputs_of_arguments(subject: Subject, code: CodeType, values: Mapping[str, Any]) -> tuple[Input, ...]:
    """The tensors in a frame's arguments, and in dicts, lists, tuples and dataclasses below them. No parameters."""
    return tuple(found for name in _argument_names(code) for found in _tensors(subject, name, values.get(name)))


def with_graph_inputs(arguments: tuple[Input, ...], subject: Subject, gm: Any) -> tuple[Input, ...]:
    """The arguments, with symbolic dimensions marked, then what the graph reads besides (globals, caches; no parameters, no buffers)."""
    import torch

    found = {known.argument: known for known in arguments}
    for node in gm.graph.nodes:
        if node.op != "placeholder":
            continue
        value, graph_argument = node.meta.get("example_value"), node.meta.get("grapharg")
        if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter) or graph_argument is None:
            continue
        source = graph_argument.source.name
        if "._buffers[" in source or "._parameters[" in source:
            continue
        name = _argument_of_source(source, subject)
        traced = _input(name, value)
        found[name] = dataclasses.replace(found[name], dynamic=traced.dynamic) if name in found else traced
    return tuple(found.values())


def _argument_names(code: CodeType) -> list[str]:
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return [name for name in code.co_varnames[:count] if not name.startswith("__nested_")]


def _method_of(owner: type, code: CodeType) -> tuple[str, CodeType] | None:
    """The method whose decorator has this code: its name, and the code of what is decorated."""
    for cls in owner.__mro__:
        for attribute, function in vars(cls).items():
            layer = function
            while layer is not None:
                if getattr(layer, "__code__", None) is code:
                    return attribute, getattr(inspect.unwrap(function), "__code__", code)
                layer = getattr(layer, "__wrapped__", None)
    return None


def _tensors(subject: Subject, name: str, value: Any, depth: int = 0) -> Iterator[Input]:
    import torch

    if isinstance(value, torch.Tensor):
        if not isinstance(value, torch.nn.Parameter):
            yield _input(name, value)
        return
    if depth >= _DEEPEST:
        return
    items: Any = ()
    if isinstance(value, dict):
        items = ((subject.argument(name, key), item) for key, item in dict.items(value))
    elif isinstance(value, (list, tuple)):
        items = ((subject.argument(name, index), item) for index, item in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = ((f"{name}.{field.name}", getattr(value, field.name, None)) for field in dataclasses.fields(value))
    for item_name, item in items:
        yield from _tensors(subject, item_name, item, depth + 1)


def _input(name: str, tensor: torch.Tensor) -> Input:
    sizes = tuple(tensor.shape)
    dynamic = tuple(i for i, size in enumerate(sizes) if not isinstance(size, int))
    shape = tuple(size if isinstance(size, int) else size.node.hint for size in sizes)
    return Input(name, shape, str(tensor.dtype).removeprefix("torch."), dynamic)


def _argument_of_source(source: str, subject: Subject) -> str:
    """Dynamo's `L['batch']['ids']` is `batch['ids']`, its `L['kwargs']['ids']` is `ids`, its `L['args'][1]` the parameter; `G['x']` a global."""
    if source.startswith("G['"):
        return "global " + source[3:].replace("']", "", 1)
    if not source.startswith("L['"):
        return source
    name, _, rest = source[3:].partition("']")
    if name in (subject.keywords, subject.varargs) and rest.startswith("["):
        key, _, rest = rest[1:].partition("]")
        return subject.argument(name, int(key) if key.isdigit() else key.strip("'")) + rest
    return name + rest
