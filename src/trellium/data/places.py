"""Whether a dataset's name can be one, before anything that could read it is imported."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from trellium.errors import ConfigError, DatasetError

PYTHON_DOCS = "python-docs"
"""The bundled dataset: the docstrings of the standard library."""

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".txt")
"""Of the files that are datasets."""


def check_dataset_name(path_or_name: str | os.PathLike | None) -> None:
    """Hold a name to what can be looked for: a file or folder that is there, `python-docs`, or a name on the Hub.

    Raises:
        ConfigError: no name.
        DatasetError: a path at which there is nothing; names what is near.
    """
    name = "" if path_or_name is None else os.fspath(path_or_name)
    if not name.strip():
        raise ConfigError(
            f"dataset_name is empty. Give a file ({', '.join(SUFFIXES)}), a folder, '{PYTHON_DOCS}', which is bundled, or a name on the Hub."
        )
    path = Path(name).expanduser()
    if name == PYTHON_DOCS or path.exists():
        return
    if path.suffix in SUFFIXES or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise _no_such_file(path)


def _no_such_file(path: Path) -> DatasetError:
    folder = path.parent
    if not folder.is_dir():
        return DatasetError(
            f"{path}: no such file, and no such folder {folder}. Check the path; relative ones start at {Path.cwd()}."
        )
    there = sorted(entry.name for entry in folder.iterdir() if entry.suffix in SUFFIXES)
    near = difflib.get_close_matches(path.name, there, n=1) or there[:3]
    hint = f"In that folder there is {', '.join(near)}." if near else "There is no dataset file in that folder."
    return DatasetError(f"{path}: no such file. {hint} Check the path; relative ones start at {Path.cwd()}.")
