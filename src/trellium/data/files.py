"""Datasets by name: files, folders, the bundled `python-docs`, and, where that is wished, the Hugging Face Hub.

Files of lines (`.jsonl`, `.csv`, `.txt`) are read here rather than by `datasets`, for one reason: each row keeps the file and line it came from in the
column `trellium.data.rows.SOURCE_COLUMN`, so that whatever is wrong with it, now or in tokenization, is said with its line. The file is read
twice, once to check it and learn its columns, once to write it as Arrow into Trellium's cache, from where it is mapped into memory:
about 15 µs a row at the first use, none later, and never the whole file at once. Nested values are kept as JSON, so rows may differ
inside (one tool's arguments from another's) without Arrow filling in what they lack.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import (
    Dataset,
    DatasetDict,
    Features,
    IterableDataset,
    Json,
    List,
    Value,
    concatenate_datasets,
    load_dataset,
    load_from_disk,
)
from datasets.arrow_writer import ArrowWriter
from datasets.exceptions import DatasetsError

from trellium.data.cache import cached_folder
from trellium.data.places import PYTHON_DOCS, SUFFIXES, check_dataset_name
from trellium.data.python_docs import SPLITS as PYTHON_DOCS_SPLITS
from trellium.data.python_docs import python_docs
from trellium.data.rows import SOURCE_COLUMN, shorten
from trellium.data.splits import rows_of_split
from trellium.errors import DatasetError

_REVISION = 2
"""Raised when the same file gives other rows than before."""

_SPLIT_NAMES = {"train": ("train",), "test": ("test", "eval"), "validation": ("validation", "valid", "val", "dev")}

_Row = tuple[str, dict[str, Any]]


def load_dataset_from(
    path_or_name: str | os.PathLike,
    split: str = "train",
    *,
    config: str | None = None,
    online: bool | None = None,
    streaming: bool = False,
    **hub_files: Any,
) -> Dataset | IterableDataset:
    """One split of a dataset, by what its user calls it.

    Args:
        path_or_name: `python-docs`; a `.jsonl`, `.json`, `.csv`, `.parquet` or `.txt` file; a folder of such files, or one written by
            `Dataset.save_to_disk`; or `organization/name` on the Hub.
        split: `train`, `test` or `validation`. A single file is `train`. In a folder, a file whose name begins with a split's name belongs to it,
            and if there is none such, all files are `train`. Parts of splits are written as `datasets` has them: `train[:90%]`, `train+test`.
        config: the configuration of a Hub dataset.
        online: whether the Hub may be asked; None: unless `HF_HUB_OFFLINE` or `HF_DATASETS_OFFLINE` is set.
        streaming: an `IterableDataset`: of the Hub's, which downloads while it is read; of rows here, which are then prepared while they are trained.
        hub_files: `data_dir` and `data_files` of a Hub dataset, as `datasets.load_dataset` takes them.

    Returns:
        The rows. Those from files of lines have `file:line` in the column `_source`.

    Raises:
        DatasetError: nothing by that name, no such split, or a line that is not a row.
    """
    check_dataset_name(path_or_name)
    name = os.fspath(path_or_name)
    path = Path(name).expanduser()
    if name != PYTHON_DOCS and not path.exists():
        return _load_from_hub(name, split, config=config, online=online, streaming=streaming, **hub_files)
    rows = rows_of_split(split, lambda part: _load_here(name, path, part), name=name)
    return rows.to_iterable_dataset() if streaming else rows


def _load_here(name: str, path: Path, split: str) -> Dataset:
    if name == PYTHON_DOCS:
        if split not in PYTHON_DOCS_SPLITS:
            raise _no_split(name, split, PYTHON_DOCS_SPLITS)
        return python_docs(split)
    if path.is_dir():
        return _load_folder(path, split)
    if split != "train":
        raise DatasetError(
            f"{path}: a single file has only the split 'train', {split!r} was asked for. Name the other file, or a folder with {split}.jsonl in it."
        )
    return _load_file(path)


def available_splits(path_or_name: str | os.PathLike) -> tuple[str, ...] | None:
    """The splits of a dataset that is on this machine; None for one that is not, whose splits only the Hub knows."""
    name = os.fspath(path_or_name)
    path = Path(name).expanduser()
    if name == PYTHON_DOCS:
        return PYTHON_DOCS_SPLITS
    if path.is_file():
        return ("train",)
    if not path.is_dir():
        return None
    if (path / "dataset_dict.json").is_file():
        return tuple(json.loads((path / "dataset_dict.json").read_text())["splits"])
    if (path / "state.json").is_file():
        return ("train",)
    return tuple(_files_by_split(path))


def _no_split(name: str, split: str, there: tuple[str, ...]) -> DatasetError:
    return DatasetError(
        f"{name}: there is no split {split!r}. It has {', '.join(map(repr, there)) or 'none'}: choose one of these."
    )


def _load_from_hub(
    name: str, split: str, *, config: str | None, online: bool | None, streaming: bool, **files: Any
) -> Dataset | IterableDataset:
    def on(variable: str) -> bool:
        return os.environ.get(variable, "").upper() in {"1", "ON", "YES", "TRUE"}

    if online is None:
        online = not (on("HF_HUB_OFFLINE") or on("HF_DATASETS_OFFLINE"))
    if not online:
        raise DatasetError(
            f"{name}: there is no such file or folder here, and the Hugging Face Hub may not be asked (offline). "
            f"Give a file ({', '.join(SUFFIXES)}), a folder, or '{PYTHON_DOCS}', which is bundled; or go online: unset HF_HUB_OFFLINE and HF_DATASETS_OFFLINE."
        )
    try:
        return load_dataset(name, config, split=split, streaming=streaming, **files)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise DatasetError(
            f"{name}: there is no such file or folder here, and the Hugging Face Hub did not give it as a dataset with the split {split!r}: "
            f"{type(error).__name__}: {error} Check the name and the split, or give a file."
        ) from error


def _files_by_split(folder: Path) -> dict[str, list[Path]]:
    files = sorted(
        entry
        for entry in folder.iterdir()
        if entry.suffix in SUFFIXES and entry.is_file() and not entry.name.startswith(".")
    )
    named: dict[str, list[Path]] = {}
    for split, prefixes in _SPLIT_NAMES.items():
        if matching := [file for file in files if file.name.lower().startswith(prefixes)]:
            named[split] = matching
    return named or ({"train": files} if files else {})


def _load_folder(folder: Path, split: str) -> Dataset:
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        saved = load_from_disk(str(folder))
        if isinstance(saved, DatasetDict):
            if split not in saved:
                raise _no_split(str(folder), split, tuple(map(str, saved)))
            return saved[split]
        if split != "train":
            raise _no_split(str(folder), split, ("train",))
        return saved
    files = _files_by_split(folder)
    if not files:
        raise DatasetError(
            f"{folder}: there is no dataset file in this folder. Put {', '.join('*' + suffix for suffix in SUFFIXES)} there."
        )
    if split not in files:
        raise _no_split(str(folder), split, tuple(files))
    parts = [_load_file(file) for file in files[split]]
    if len({tuple(sorted(part.column_names)) for part in parts}) > 1:
        raise DatasetError(
            f"{folder}: its files for the split {split!r} have different columns: "
            + "; ".join(
                f"{file.name} {', '.join(c for c in part.column_names if c != SOURCE_COLUMN)}"
                for file, part in zip(files[split], parts, strict=True)
            )
            + ". Files of one split must have the same: give one of them alone."
        )
    return parts[0] if len(parts) == 1 else concatenate_datasets(parts)


def _load_file(path: Path) -> Dataset:
    """One file as a dataset, from Trellium's cache if it has not changed since."""
    if path.suffix not in SUFFIXES:
        raise DatasetError(
            f"{path}: a dataset file ends in {', '.join(SUFFIXES)}, this one in {path.suffix or 'nothing'!r}. Rename it to what it holds."
        )
    stat = path.stat()
    if stat.st_size == 0:
        raise DatasetError(f"{path}: the file is empty. Training needs at least one row.")
    if path.suffix == ".parquet":
        return _load_parquet(path)
    key = json.dumps([str(path), str(path.resolve()), stat.st_size, stat.st_mtime_ns, _REVISION])
    folder = cached_folder(
        f"files/{hashlib.sha256(key.encode()).hexdigest()[:24]}", lambda building: _write(path, building / "rows.arrow")
    )
    return Dataset.from_file(str(folder / "rows.arrow"))


def _load_parquet(path: Path) -> Dataset:
    with path.open("rb") as file:
        start = file.read(4)
    if start != b"PAR1":
        raise DatasetError(
            f"{path}: not a Parquet file: it begins with {start!r}, not b'PAR1'. Rename it to what it holds, or write it again."
        )
    try:
        dataset = load_dataset("parquet", data_files=str(path), split="train")
    except (OSError, ValueError, DatasetsError) as error:
        raise DatasetError(f"{path}: cannot be read as Parquet: {error} Write the file again.") from error
    if not len(dataset):
        raise DatasetError(f"{path}: the file has no row. Training needs at least one.")
    return dataset


def _write(path: Path, target: Path) -> None:
    try:
        _write_rows(path, target)
    except OverflowError as error:
        where = next((place for place, row in _read(path) if _has_large_number(row)), str(path))
        raise DatasetError(
            f"{where}: a number that does not fit into 64 bits. Write it as a string, or remove its column."
        ) from error


def _has_large_number(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_has_large_number, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def _write_rows(path: Path, target: Path) -> None:
    features = _learn_features(path)
    columns = [column for column in features if column != SOURCE_COLUMN]
    with ArrowWriter(path=str(target), features=features, writer_batch_size=1000) as writer:
        for where, row in _read(path):
            writer.write({**{column: row.get(column) for column in columns}, SOURCE_COLUMN: where})
        writer.finalize()


def _read(path: Path) -> Iterator[_Row]:
    """Each row of a file with its place."""
    return {".jsonl": _read_json_lines, ".json": _read_json, ".csv": _read_csv, ".txt": _read_text}[path.suffix](path)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a UTF-8 file that are not blank, numbered from 1."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise DatasetError(
                    f"{path}:{number}: not UTF-8: byte {raw[error.start]:#04x} at column {error.start + 1}. Save the file as UTF-8."
                ) from None
            if line.strip():
                yield number, line


def _why_unreadable(error: RecursionError | ValueError) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply. Rows are flat objects, or hold lists of messages: mend or remove it."
    if isinstance(error, UnicodeEncodeError):
        return "it has half of a surrogate pair (\\ud8xx without its other half), which is no character. Mend or remove it."
    return f"{error}. Mend or remove it."


def _read_json_lines(path: Path) -> Iterator[_Row]:
    for number, line in _lines(path):
        try:
            row = json.loads(line)
            if "\\u" in line:
                json.dumps(row, ensure_ascii=False).encode()
        except json.JSONDecodeError as error:
            start = max(0, error.pos - 40)
            excerpt = (
                ("…" if start else "") + line[start : error.pos + 40] + ("…" if error.pos + 40 < len(line) else "")
            )
            array = number == 1 and line.startswith(("[", "{")) and error.pos >= len(line)
            way_out = (
                "The file seems to be one JSON document over many lines: name it .json."
                if array
                else "A .jsonl file holds one JSON object a line: mend or remove the line."
            )
            raise DatasetError(
                f"{path}:{number}: not valid JSON, {error.msg} at column {error.colno}: {excerpt}. {way_out}"
            ) from None
        except (RecursionError, ValueError) as error:
            raise DatasetError(f"{path}:{number}: cannot be read: {_why_unreadable(error)}") from None
        yield f"{path}:{number}", _as_row(row, f"{path}:{number}")


def _as_row(row: Any, where: str) -> dict[str, Any]:
    if isinstance(row, dict) and row:
        return row
    got = "an empty object" if row == {} else f"{type(row).__name__} {shorten(row)}"
    raise DatasetError(
        f'{where}: a row must be a JSON object, got {got}. Write it as {{"text": "…"}}, {{"messages": […]}} or {{"prompt": "…", "completion": "…"}}.'
    )


def _read_json(path: Path) -> Iterator[_Row]:
    _check_utf8(path)
    text = path.read_text(encoding="utf-8-sig")
    try:
        document = json.loads(text)
        if "\\u" in text:
            json.dumps(document, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # one object a line, under a name that is as usual
            yield from _read_json_lines(path)
            return
        line = text.split("\n")[error.lineno - 1]
        raise DatasetError(
            f"{path}:{error.lineno}: not valid JSON, {error.msg} at column {error.colno}: {line[max(0, error.colno - 41) : error.colno + 40]}. "
            "A .json file holds a list of objects, or one object a line."
        ) from None
    except (RecursionError, ValueError) as error:
        raise DatasetError(f"{path}: cannot be read: {_why_unreadable(error)}") from None
    rows = document.get("data", [document]) if isinstance(document, dict) else document
    if not isinstance(rows, list):
        raise DatasetError(
            f"{path}: a .json file must hold a list of objects, got {type(rows).__name__} {shorten(rows)}. Write [{{…}}, {{…}}]."
        )
    for number, row in enumerate(rows, start=1):
        where = f"{path}: row {number} (from 1)"
        yield where, _as_row(row, where)


def _check_utf8(path: Path) -> None:
    for _ in _lines(path):  # raises with the line, which a decoder of the whole file does not know
        pass


def _read_csv(path: Path) -> Iterator[_Row]:
    _check_utf8(path)
    csv.field_size_limit(2**31 - 1)  # its own limit of 128 KiB is less than a long document
    with path.open(encoding="utf-8-sig", newline="") as file:
        # Strictly: otherwise a quote that is never closed takes the rest of the file into one field.
        reader = csv.reader(file, strict=True)
        header = _next_fields(reader, path) or []
        if not any(header) or len(set(header)) < len(header):
            raise DatasetError(
                f"{path}:1: the first line must name the columns, each once; got {shorten(header)}. Add a line such as prompt,completion."
            )
        while True:
            start = reader.line_num + 1
            fields = _next_fields(reader, path)
            if fields is None:
                return
            if not fields:
                continue
            if len(fields) != len(header):
                raise DatasetError(
                    f"{path}:{start}: {len(fields)} fields where the header names {len(header)} columns ({', '.join(header)}): {shorten(fields)}. "
                    "Quote fields that hold commas or line breaks."
                )
            yield f"{path}:{start}", dict(zip(header, fields, strict=True))


def _next_fields(reader: Any, path: Path) -> list[str] | None:
    start = reader.line_num + 1
    try:
        return next(reader, None)
    except csv.Error as error:
        why = str(error)
        if "end of data" in why:
            why = "a quote is opened there and never closed"
        raise DatasetError(
            f"{path}:{start}: not valid CSV, {why}. Quote fields that hold commas, quotes or line breaks, and write a quote inside as two."
        ) from None


def _read_text(path: Path) -> Iterator[_Row]:
    for number, line in _lines(path):
        yield f"{path}:{number}", {"text": line}


def _learn_features(path: Path) -> Features:
    """The columns of a file and the type of each; every row is looked at.

    Raises:
        DatasetError: a row whose value is of another type than the same column's in an earlier row, or no row.
    """
    kinds: dict[str, tuple[str, str]] = {}
    count = 0
    for where, row in _read(path):
        count += 1
        for column, value in row.items():
            kind = _kind(value)
            if kind is None:
                kinds.setdefault(column, ("", where))
                continue
            known, first = kinds.get(column, ("", where))
            if known and _merge(known, kind) is None:
                raise DatasetError(
                    f"{where}: '{column}' is {_KIND_NAMES[kind.partition(' ')[0]]} here, {shorten(value, 40)}, but {_KIND_NAMES[known.partition(' ')[0]]} at {first}. "
                    "A column must be of one type in all rows of a file: change this row to the form of the others."
                )
            kinds[column] = ((_merge(known, kind) if known else kind) or kind, first)
    if not count:
        raise DatasetError(
            f"{path}: the file has no row, only {'a header' if path.suffix == '.csv' else 'blank lines or an empty list'}. Training needs at least one."
        )
    if SOURCE_COLUMN in kinds:
        raise DatasetError(f"{kinds[SOURCE_COLUMN][1]}: the column '{SOURCE_COLUMN}' is Trellium's own. Rename yours.")
    return Features({**{column: _feature(kind) for column, (kind, _) in kinds.items()}, SOURCE_COLUMN: Value("string")})


_KIND_NAMES = {
    "string": "a string",
    "boolean": "true or false",
    "integer": "a number",
    "number": "a number",
    "object": "an object",
    "list": "a list",
}


def _kind(value: Any) -> str | None:
    """The type of a JSON value by name; of a list, with that of its items; None for null."""
    if isinstance(value, list):
        inner = {_kind(item) for item in value}
        return "list " + (inner.pop() or "" if len(inner) == 1 else "" if not inner else "mixed").partition(" ")[0]
    if value is None:
        return None
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer" if -(2**63) <= value < 2**63 else "number"
    return {str: "string", float: "number", dict: "object"}[type(value)]


def _merge(a: str, b: str) -> str | None:
    """The one type of a column that has both; None if they are too different."""
    if a == b:
        return a
    if {a, b} == {"integer", "number"}:
        return "number"
    if a.startswith("list") and b.startswith("list"):
        if a == "list ":
            return b
        if b == "list ":
            return a
        return "list mixed"
    return None


def _feature(kind: str) -> Any:
    outer, _, inner = kind.partition(" ")
    if outer == "list":
        scalar = {
            "string": Value("string"),
            "integer": Value("int64"),
            "number": Value("float64"),
            "boolean": Value("bool"),
        }.get(inner)
        return List(scalar if scalar is not None else Json())
    scalars = {
        "": Value("string"),
        "string": Value("string"),
        "boolean": Value("bool"),
        "integer": Value("int64"),
        "number": Value("float64"),
    }
    return scalars[outer] if outer in scalars else Json()
