"""Parts of splits, as `datasets` writes them: `train[:90%]`, `train[100:200]`, `train+test`."""

from __future__ import annotations

import re
from collections.abc import Callable

from datasets import Dataset, ReadInstruction, concatenate_datasets

from trellium.errors import DatasetError


def rows_of_split(split: str, load: Callable[[str], Dataset], *, name: str) -> Dataset:
    """The rows that `split` asks for.

    Args:
        split: a split, parts of one in rows or per cent, or several of either with `+` between.
        load: from the name of a split to its rows.
        name: the dataset, for the error.

    Raises:
        DatasetError: no such part can be.
    """
    if not set(split) & set("[+"):
        return load(split)
    parts = {part: load(part) for part in dict.fromkeys(re.findall(r"(?:^|\+)\s*([\w.-]+)", split))}
    try:
        chosen = ReadInstruction.from_spec(split).to_absolute({part: len(rows) for part, rows in parts.items()})
    except (ValueError, AssertionError) as error:
        raise DatasetError(
            f"{name}: {split!r} is no part of its rows: {error} Write train[:90%], train[100:200] or train+test."
        ) from error
    rows = [parts[part.splitname].select(range(part.from_, part.to)) for part in chosen]
    return rows[0] if len(rows) == 1 else concatenate_datasets(rows)
