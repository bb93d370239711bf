"""A mixture of datasets by name, under TRL's names: `DatasetMixtureConfig` says which, `get_dataset` loads it.

Imports nothing heavy, so that a command can check a mixture before torch is loaded.
"""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from trellium.data.places import check_dataset_name
from trellium.errors import ConfigError, DatasetError
from trellium.trainers.config_file import yaml_value
from trellium.trainers.known_options import KnownOptions, NotYet

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

FORMATS = ("json", "csv", "parquet", "text")
"""What `path` may be where `data_files` or `data_dir` say which files; here it makes no difference which."""

_SPLIT_SEED = 42
"""Which rows are held out is the same in every run, so that a run which is resumed does not train on what was held out before."""


@dataclass
class DatasetConfig(metaclass=KnownOptions):
    """One dataset of a mixture, with the arguments of `datasets.load_dataset`.

    Attributes:
        path: a file, a folder, `python-docs`, a name on the Hub, or one of `FORMATS`.
        name: the configuration of a Hub dataset.
        data_dir: the folder below `path`, or of the files of a format.
        data_files: files or patterns below that; a mapping has those of each split.
        split: which one.
        columns: those to keep; None for all.
        fraction: its share of the mixture, in proportion to the others'; None for all its rows.

    Raises:
        ConfigError: a name nobody knows, or a value that cannot be.
    """

    not_yet: ClassVar[dict[str, NotYet]] = {}

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: str | list[str] | dict[str, Any] | None = None
    split: str = "train"
    columns: list[str] | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise ConfigError(f"a dataset of a mixture needs a path, a file, a folder or a name; got {self.path!r}")
        if isinstance(self.columns, str):
            raise ConfigError(f"{self.path}: columns must be a list, like [prompt, completion]; got {self.columns!r}")
        fraction = self.fraction
        if fraction is not None and (isinstance(fraction, bool) or not isinstance(fraction, int | float)):
            raise ConfigError(f"{self.path}: fraction must be a number, its share of the mixture; got {fraction!r}")
        if self.path in FORMATS and self.data_dir is None and self.data_files is None:
            raise ConfigError(f"{self.path}: a format needs data_files or data_dir. Or give the file as path.")

    @classmethod
    def of(cls, item: Any) -> DatasetConfig:
        """From what stands in a list of datasets: a mapping of the above, the same as JSON, or a path."""
        if isinstance(item, cls):
            return item
        if isinstance(item, str):
            item = yaml_value(item) if item.lstrip().startswith("{") else {"path": item}
        if not isinstance(item, dict):
            raise ConfigError(f"a dataset of a mixture is a path or a mapping with one; got {item!r:.80}")
        return cls(**{"path": "", **item})

    def check(self) -> None:
        """Raise a `TrelliumError` if it is seen that there is no such dataset."""
        if self.path not in FORMATS:
            check_dataset_name(self.path)


@dataclass
class DatasetMixtureConfig(metaclass=KnownOptions):
    """Several datasets as one, each with its share.

    Raises:
        ConfigError: a dataset that cannot be, or a held-out share that is none.
    """

    not_yet: ClassVar[dict[str, NotYet]] = {}

    datasets: list[DatasetConfig] = field(
        default_factory=list,
        metadata={
            "help": "Several datasets instead of dataset_name: paths, or in a config file mappings with path, name, data_dir, data_files, split, columns and fraction."
        },
    )
    streaming: bool = field(default=False, metadata={"help": "Read those datasets row by row; needs max_steps."})
    test_split_size: float | None = field(
        default=None,
        metadata={
            "help": "Of those datasets, hold out this share of the rows, or with 1 or more so many, to evaluate on."
        },
    )

    def __post_init__(self) -> None:
        if not isinstance(self.datasets, list):
            raise ConfigError(f"datasets must be a list, a dataset each; got {type(self.datasets).__name__}")
        self.datasets = [DatasetConfig.of(item) for item in self.datasets]
        size = self.test_split_size
        if size is not None and not (0 < size < 1 or (size >= 1 and size == int(size))):
            raise ConfigError(f"test_split_size must be a share between 0 and 1 or a number of rows, got {size!r}")
        if size is not None and self.streaming:
            raise ConfigError("streaming=True and test_split_size exclude each other: a stream's length is not known.")

    @property
    def called(self) -> str:
        """What to call the mixture."""
        return " + ".join(part.path for part in self.datasets)


def get_dataset(mixture_config: DatasetMixtureConfig) -> DatasetDict | IterableDatasetDict:
    """The mixture that `mixture_config` describes: `train`, and `test` where it holds rows out.

    Without fractions it is all rows of each; with them see `trellium.data.mixtures`.

    Raises:
        ConfigError: no datasets, or shares that cannot be.
        DatasetError: no such dataset, a row that is none, or datasets whose columns differ.
    """
    from datasets import DatasetDict, IterableDataset, IterableDatasetDict

    from trellium.data.mixtures import MixturePart, mix_datasets

    parts = [
        MixturePart(_load(part, streaming=mixture_config.streaming), part.fraction, part.path)
        for part in mixture_config.datasets
    ]
    mixture = mix_datasets(parts)
    if isinstance(mixture, IterableDataset):
        return IterableDatasetDict({"train": mixture})
    size = mixture_config.test_split_size
    if size is None:
        return DatasetDict({"train": mixture})
    if size >= len(mixture):
        raise DatasetError(
            f"{mixture_config.called}: of {len(mixture)} rows, test_split_size={size:g} leaves none to train on. Set it lower."
        )
    return mixture.train_test_split(test_size=size if size < 1 else int(size), seed=_SPLIT_SEED)


def _load(part: DatasetConfig, *, streaming: bool) -> Dataset | IterableDataset:
    from datasets import Dataset

    from trellium.data.files import load_dataset_from
    from trellium.data.rows import SOURCE_COLUMN
    from trellium.data.splits import rows_of_split

    chosen = {"data_dir": part.data_dir, "data_files": part.data_files}
    given: dict[str, Any] = {key: value for key, value in chosen.items() if value is not None}
    if not given or not (part.path in FORMATS or os.path.exists(part.path)):
        rows = load_dataset_from(part.path, part.split, config=part.name, streaming=streaming, **given)
    elif part.data_files is None:
        rows = load_dataset_from(os.path.join(_folder(part), part.data_dir or ""), part.split)
    else:
        rows = rows_of_split(part.split, lambda split: _from_files(part, split), name=part.path)
    if part.columns is not None:
        missing = [name for name in part.columns if name not in (rows.column_names or part.columns)]
        if missing:
            raise DatasetError(
                f"{part.path}: there is no column {', '.join(map(repr, missing))} to keep. It has {', '.join(rows.column_names or ())}."
            )
        source = [SOURCE_COLUMN] if SOURCE_COLUMN in (rows.column_names or ()) else []
        rows = rows.select_columns([*part.columns, *source])
    return rows.to_iterable_dataset() if streaming and isinstance(rows, Dataset) else rows


def _folder(part: DatasetConfig) -> str:
    """Where the files of a part on this machine lie."""
    if part.path in FORMATS:
        return ""
    if not os.path.isdir(part.path):
        raise ConfigError(
            f"{part.path}: data_dir and data_files choose among the files of a folder, and this is a file. Leave them out."
        )
    return part.path


def _from_files(part: DatasetConfig, split: str) -> Dataset:
    """The rows of the files that `data_files` has for a split."""
    from datasets import Dataset

    from trellium.data.files import load_dataset_from
    from trellium.data.mixtures import MixturePart, mix_datasets

    rows = mix_datasets([MixturePart(load_dataset_from(file), name=file) for file in _files(part, split)])
    assert isinstance(rows, Dataset)
    return rows


def _files(part: DatasetConfig, split: str) -> list[str]:
    chosen: Any = part.data_files
    if isinstance(chosen, dict):
        if split not in chosen:
            raise ConfigError(f"{part.path}: data_files has no split {split!r}, but {', '.join(chosen)}.")
        chosen = chosen[split]
    elif split != "train":
        raise ConfigError(
            f"{part.path}: files without a split are 'train', {split!r} was asked for. Map it in data_files."
        )
    folder = os.path.join(_folder(part), part.data_dir or "")
    files = []
    for name in [chosen] if isinstance(chosen, str) else chosen:
        pattern = os.path.join(folder, name)
        files += sorted(glob.glob(pattern, recursive=True)) if glob.has_magic(pattern) else [pattern]
    if not files:
        raise DatasetError(f"{part.path}: no file fits data_files={part.data_files!r}. Check the pattern.")
    return files
