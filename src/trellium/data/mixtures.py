"""Several datasets as one, each with its share.

The mixture is as large as it can be without taking a row twice: the dataset that is shortest for its share gives all it has, the others as many rows
as go with that. Nothing is copied but indices.

Source: the shares and their rounding are those of TRL 1.16's `DatasetMixtureConfig`, which takes the first rows of each; a seed takes any.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from datasets import Dataset, IterableDataset, Value, concatenate_datasets

from trellium.data.rows import SOURCE_COLUMN
from trellium.errors import ConfigError, DatasetError


@dataclass(frozen=True)
class MixturePart:
    """One dataset of a mixture.

    Attributes:
        dataset: its rows.
        fraction: its share of the mixture, in proportion to those of the others; None for all its rows, then of every part.
        name: what to call it in errors.
    """

    dataset: Dataset | IterableDataset
    fraction: float | None = None
    name: str = "dataset"


def mix_datasets(parts: Sequence[MixturePart], *, seed: int | None = None) -> Dataset | IterableDataset:
    """The rows of several datasets as one.

    Args:
        parts: the datasets, with the same columns each (where a row was read, `_source`, may be missing), and their shares.
        seed: takes each part's rows at random and shuffles the mixture; None takes the first of each, one part after the other.

    Returns:
        A `Dataset`; of streams an `IterableDataset`, one after the other.

    Raises:
        ConfigError: no parts, shares that cannot be, or shares or a seed for streams, whose length nobody knows.
        DatasetError: parts whose columns differ, or an empty one that has a share.
    """
    if not parts:
        raise ConfigError("a mixture needs at least one dataset, got none.")
    streams = [part.name for part in parts if isinstance(part.dataset, IterableDataset)]
    fractions = _fractions(parts)
    if streams and (fractions or seed is not None or len(streams) < len(parts)):
        raise ConfigError(
            f"{', '.join(streams)}: a stream's length is not known, so it can be mixed with other streams only, without fractions and without a seed."
        )
    _check_columns(parts)
    if streams:
        return concatenate_datasets([part.dataset for part in parts])
    counts = rows_by_fraction([(part.name, len(part.dataset)) for part in parts], fractions) if fractions else None
    generator = np.random.default_rng(seed)
    taken = []
    for at, part in enumerate(parts):
        rows, count = part.dataset, len(part.dataset) if counts is None else counts[at]
        if seed is not None:
            taken.append(rows.select(np.sort(generator.permutation(len(rows))[:count])))
        else:
            taken.append(rows.select(range(count)))
    mixture = concatenate_datasets(taken)
    return mixture if seed is None else mixture.select(generator.permutation(len(mixture)))


def rows_by_fraction(sizes: Sequence[tuple[str, int]], fractions: Sequence[float]) -> list[int]:
    """How many rows each dataset gives to the largest mixture with these shares in which none is taken twice.

    Args:
        sizes: name and number of rows of each.
        fractions: its share; they need not add up to one.

    Raises:
        DatasetError: a dataset without rows that has a share.
    """
    for (name, size), fraction in zip(sizes, fractions, strict=True):
        if fraction and not size:
            raise DatasetError(f"{name}: has no rows, but the fraction {fraction} of the mixture. Leave it out.")
    weights = [fraction / math.fsum(fractions) for fraction in fractions]
    total = min(size / weight for (_, size), weight in zip(sizes, weights, strict=True) if weight > 0)
    return [min(size, round(weight * total)) for (_, size), weight in zip(sizes, weights, strict=True)]


def _fractions(parts: Sequence[MixturePart]) -> list[float]:
    """Of every part, or none."""
    given = [part.fraction for part in parts if part.fraction is not None]
    if not given:
        return []
    if len(given) < len(parts):
        missing = ", ".join(part.name for part in parts if part.fraction is None)
        raise ConfigError(
            f"{missing}: has no fraction, but others of the mixture have. Give one to every dataset, or to none."
        )
    if not all(math.isfinite(fraction) and fraction >= 0 for fraction in given) or not any(given):
        raise ConfigError(
            f"the fractions of a mixture must be shares, 0 or more and not all 0, got {', '.join(map(str, given))}."
        )
    return given


def _check_columns(parts: Sequence[MixturePart]) -> None:
    """Otherwise `datasets` would fill what is missing with None."""
    columns = [set(part.dataset.column_names or []) - {SOURCE_COLUMN} for part in parts]
    features = [part.dataset.features or {} for part in parts]
    for part, have, types in zip(parts, columns, features, strict=True):
        if have != columns[0]:
            raise DatasetError(
                f"{part.name}: has the columns {', '.join(sorted(have))}, but {parts[0].name} has {', '.join(sorted(columns[0]))}. "
                "Datasets of one mixture must have the same: select or rename columns."
            )
        for column in sorted(have & set(types) & set(features[0])):
            if types[column] != features[0][column] and Value("null") not in (types[column], features[0][column]):
                raise DatasetError(
                    f"{part.name}: '{column}' is {types[column]}, but {features[0][column]} in {parts[0].name}. "
                    "Cast one of them: dataset.cast_column(…)."
                )
