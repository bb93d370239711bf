"""The bundled dataset `python-docs`: the docstrings of the standard library that runs this process.

Every public module, class and function of the standard library that has a docstring is one row: asked for the docstring by name and signature,
the completion is the docstring. Sources are read and parsed, never imported, in sorted order, so the same Python gives the same rows. A docstring
that occurs several times is kept once, and the split is by a hash of the qualified name, so no completion of the held-out rows is trained on.
About five thousand rows of 5 to 1000 tokens; built in about 4 seconds at the first use, then kept in Trellium's cache by version of Python.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import logging
import platform
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from datasets import Dataset, Features, List, Value
from datasets.arrow_writer import ArrowWriter

from trellium.data.cache import cached_folder
from trellium.data.places import PYTHON_DOCS
from trellium.data.rows import SOURCE_COLUMN

logger = logging.getLogger(__name__)

SPLITS = ("train", "test")
HELD_OUT = 20
"""One row in so many is held out."""

_REVISION = 1
_SYSTEM = "You write Python docstrings."
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_SKIPPED_MODULES = {"idlelib", "lib2to3", "turtledemo", "test", "antigravity", "this"}
_SHORTEST, _LONGEST = 20, 4000
"""Characters of a docstring that is kept."""

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def python_docs(split: str = "train", form: Literal["chat", "messages", "text"] = "chat") -> Dataset:
    """The rows of one split.

    Args:
        split: `train`, or `test`, the held-out twentieth.
        form: `chat`: `prompt` and `completion` as messages; `messages`: both in one conversation; `text`: `prompt` and `completion` as plain text.

    Returns:
        A dataset with those columns, and with `_source`, the file and line of the docstring's owner.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
    if form not in ("chat", "messages", "text"):
        raise ValueError(f"form must be 'chat', 'messages' or 'text', got {form!r}")
    root = sysconfig.get_path("stdlib")
    where = hashlib.sha256(root.encode()).hexdigest()[:8]
    version = f"{platform.python_implementation().lower()}-{platform.python_version()}"
    folder = cached_folder(
        f"{PYTHON_DOCS}/{version}-{where}-r{_REVISION}", lambda building: _build(Path(root), building)
    )
    return Dataset.from_file(str(folder / f"{form}-{split}.arrow"))


def _build(root: Path, folder: Path) -> None:
    logger.info("Building %s from the docstrings of Python %s …", PYTHON_DOCS, platform.python_version())
    rows = {split: [] for split in SPLITS}  # type: dict[str, list[tuple[str, str, str]]]
    seen: set[str] = set()
    for name, described, docstring, where in _docstrings(root):
        if docstring not in seen:
            seen.add(docstring)
            held_out = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % HELD_OUT == 0
            rows["test" if held_out else "train"].append((described, docstring, where))
    message = List({"role": Value("string"), "content": Value("string")})
    forms = {
        "chat": {"prompt": message, "completion": message},
        "messages": {"messages": message},
        "text": {"prompt": Value("string"), "completion": Value("string")},
    }
    for form, features in forms.items():
        for split in SPLITS:
            path, columns = (
                str(folder / f"{form}-{split}.arrow"),
                Features({**features, SOURCE_COLUMN: Value("string")}),
            )
            with ArrowWriter(path=path, features=columns, writer_batch_size=1000) as writer:
                for described, docstring, where in rows[split]:
                    writer.write({**_row(form, described, docstring), SOURCE_COLUMN: where})
                writer.finalize()
    logger.info("%s: %d rows to train on, %d held out.", PYTHON_DOCS, len(rows["train"]), len(rows["test"]))


def _row(form: str, described: str, docstring: str) -> dict:
    asked = f"Write the docstring of the Python {described}."
    if form == "text":
        return {"prompt": f"# The docstring of the Python {described}\n", "completion": docstring}
    prompt = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": asked}]
    completion = [{"role": "assistant", "content": docstring}]
    return {"prompt": prompt, "completion": completion} if form == "chat" else {"messages": prompt + completion}


def _docstrings(root: Path) -> Iterator[tuple[str, str, str, str]]:
    """Qualified name, what it is with its signature, docstring and place of everything public, by name of module."""
    modules = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        if _SKIPPED_FOLDERS & set(parts) or parts[0] in _SKIPPED_MODULES or parts[0] not in sys.stdlib_module_names:
            continue
        names = parts[:-1] if parts[-1] == "__init__" else parts
        if all(part.isidentifier() and not part.startswith("_") for part in names):
            modules[".".join(names)] = path
    for module, path in sorted(modules.items()):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_bytes())
        except SyntaxError:  # the standard library holds files that are not meant to parse
            continue
        shown = path.relative_to(root).as_posix()
        for node, name in _definitions(tree, module):
            docstring = ast.get_docstring(node, clean=False)
            if docstring is None:
                continue
            docstring = inspect.cleandoc(docstring).strip()
            if _SHORTEST <= len(docstring) <= _LONGEST:
                yield name, _described(node, name), docstring, f"{shown}:{getattr(node, 'lineno', 1)}"


def _definitions(node: ast.Module | _Definition, name: str) -> Iterator[tuple[ast.Module | _Definition, str]]:
    """A module or class, and the public classes and functions in it, in the order of the source; not what is inside functions."""
    yield node, name
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    for child in node.body:
        if isinstance(child, _Definition) and not (child.name.startswith("_") and child.name != "__init__"):
            yield from _definitions(child, f"{name}.{child.name}")


def _described(node: ast.Module | _Definition, name: str) -> str:
    if isinstance(node, ast.Module):
        return f"module `{name}`"
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class `{name}{f'({bases})' if bases else ''}`"
    return f"function `{name}({_parameters(node.args)})`"


def _parameters(arguments: ast.arguments) -> str:
    """A signature's parameters with short defaults, without annotations."""
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]:
        if argument is not None:
            argument.annotation = None
    return ast.unparse(arguments)
