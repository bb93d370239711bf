"""What can be said against a command's options before torch and transformers, which take seconds, are imported.

The names of the options are read from the sources of the dataclasses that define them: a tenth of a second. Values are looked at where a slip is
likely and costs a wait: paths, and names of types. Everything is checked again, and completely, by the parser and the trainer.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from trellium.data.places import check_dataset_name
from trellium.errors import ConfigError, unknown_name
from trellium.models.places import model_place
from trellium.trainers.checkpoints import resumable_checkpoint, resume_choice
from trellium.trainers.dataset_mixture import DatasetMixtureConfig
from trellium.trainers.script_options import DTYPES, ModelConfig, ScriptArguments

BASE_SOURCES = (("trainers/base_config.py", "BaseConfig"),)
"""Where the options are defined that every trainer has, beside transformers' own."""

Sources = Sequence[tuple[str, str]]
"""Files below `trellium`, and the dataclass in each."""


def check_early(
    flags: Sequence[str], options: dict[str, Any], path: str, sources: Sources, defaults: dict[str, Any]
) -> None:
    """Raise for an option nobody knows and for a value that is seen to be wrong; what is not seen to be is left to later.

    Args:
        flags: the command line's, which win.
        options: the config file's keys and values.
        path: the config file's name, for messages.
        sources: where the command's options are defined.
        defaults: what the command takes where its user says nothing.

    Raises:
        TrelliumError: what came, the rule, and the way out.
    """
    given = flag_values(flags)
    known = option_names(sources)
    for where, names in ((f"{path}: ", options), ("", given)):
        for name in names:
            positive = name.removeprefix("no_") if name.startswith("no_") else name
            if name not in known and positive not in known:
                raise ConfigError(f"{where}{unknown_name('there is no option', name, known)} --help lists them.")
    values = {**defaults, **options, **given}
    _check_rows(values, named="dataset_name" in {**options, **given}, path=path)
    model_place(_text(values.get("model_name_or_path")))
    output_dir = _text(values["output_dir"]) or defaults["output_dir"]
    _check_output_dir(output_dir)
    resume = resume_choice(values.get("resume_from_checkpoint"))
    if isinstance(resume, str):  # which is the last one is looked up when training begins
        resumable_checkpoint(resume, output_dir)
    dtype = _text(values.get("dtype", "float32"))
    if dtype and dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    task = _text(values["lora_task_type"])
    if task != defaults["lora_task_type"]:
        raise ConfigError(
            f"lora_task_type must be {defaults['lora_task_type']} for what this command trains, got {task!r}. Leave it out."
        )


def _check_rows(values: dict[str, Any], *, named: bool, path: str) -> None:
    """Raise if there is no dataset, or two ways to say which: `named` by dataset_name, and a mixture."""
    if mixture := values.get("datasets"):
        if named:
            raise ConfigError(
                "dataset_name is one dataset and datasets are several: give one of the two. In datasets, each can have its fraction."
            )
        try:
            given: Any = [mixture] if isinstance(mixture, str) else mixture
            parts = DatasetMixtureConfig(given).datasets
        except ConfigError as error:
            raise ConfigError(f"{path + ': ' if path else ''}datasets: {error}") from error
        for part in parts:
            part.check()
    elif "dataset_name" in values:
        check_dataset_name(_text(values["dataset_name"]))
    else:
        raise ConfigError(
            "there are no rows to train on: give --dataset_name, a file (.jsonl, .json, .csv, .parquet), a folder of them, or a Hub name. "
            "--help shows what a row must hold."
        )


def option_names(sources: Sources) -> set[str]:
    """The options of a training command, with those of TRL that are answered by name."""
    names = {entry.name for one in (ScriptArguments, DatasetMixtureConfig, ModelConfig) for entry in fields(one)}
    names |= {*ScriptArguments.not_yet, *ModelConfig.not_yet}
    places = [("transformers", "training_args.py", "TrainingArguments")]
    for package, file, class_name in [*places, *(("trellium", *source) for source in sources)]:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError(f"the package {package} is not installed, and training needs it: pip install {package}")
        names |= _names_in(Path(spec.submodule_search_locations[0]) / file, class_name)
    return names


def flag_values(flags: Sequence[str]) -> dict[str, str]:
    """The value of each `--name value` or `--name=value`, with `_` for `-`; of several values the first, `true` for none."""
    given: dict[str, str] = {}
    for index, flag in enumerate(flags):
        if not flag.startswith("--"):
            continue
        name, equals, value = flag.removeprefix("--").partition("=")
        following = flags[index + 1] if index + 1 < len(flags) else "--"
        given[name.replace("-", "_")] = value if equals else "true" if following.startswith("--") else following
    return given


def _names_in(source: Path, class_name: str) -> set[str]:
    """The fields of a dataclass, and the keys of its `not_yet`, from its source."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name).body
    names: set[str] = set()
    for node in body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if node.target.id == "not_yet" and isinstance(node.value, ast.Dict):
            names |= {
                key.value for key in node.value.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)
            }
        elif "ClassVar" not in ast.unparse(node.annotation) and not node.target.id.startswith("_"):
            names.add(node.target.id)
    return names


def _check_output_dir(output_dir: str) -> None:
    folder = Path(output_dir)
    file = next((place for place in (folder, *folder.parents) if place.is_file()), None)
    if file is not None:
        raise ConfigError(
            f"output_dir {output_dir}: {file} is a file, so no folder can be there. Choose another output_dir."
        )


def _text(value: Any) -> str:
    return "" if value is None else str(value)
