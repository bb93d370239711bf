"""The options of the training commands: a YAML file and flags, with the names of the trainer's config and of TRL's scripts.

In two halves. `read_config_file` is plain Python and runs first, so that the variables of the file's `env:` block are exported before torch, which reads
many of them when it is imported, is. `parse_options` then imports the trainer and turns the file's other keys into flags that come before the command
line's, so the same parser checks both and the command line wins.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from trellium.errors import ConfigError, TrelliumError


@dataclass
class DataOptions:
    """Which rows."""

    dataset_name: str = field(
        default="python-docs",
        metadata={
            "help": "A .jsonl, .json, .csv, .parquet or .txt file, a folder of them, a Hub name, or python-docs: the docstrings of this Python."
        },
    )
    dataset_config: str | None = field(default=None, metadata={"help": "The configuration of a Hub dataset."})
    dataset_train_split: str = field(default="train", metadata={"help": "The split to train on."})
    dataset_test_split: str = field(
        default="test", metadata={"help": "The split to evaluate on, where eval_strategy asks for it."}
    )
    dataset_streaming: bool = field(
        default=False, metadata={"help": "Read a Hub dataset while it downloads; needs max_steps."}
    )


@dataclass
class ModelOptions:
    """Which model, and which adapter."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "A folder, a Hub name, or unset for the bundled smollm2-135m-instruct."}
    )
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit of a Hub model."})
    dtype: str = field(
        default="float32", metadata={"help": "What the weights are loaded in: float32, bfloat16, float16, or auto."}
    )
    attn_implementation: str | None = field(
        default=None, metadata={"help": "Attention of transformers: sdpa, eager, flex_attention…"}
    )
    use_peft: bool = field(default=False, metadata={"help": "Train a LoRA adapter instead of the model."})
    lora_r: int = field(default=16, metadata={"help": "Rank of the adapter."})
    lora_alpha: int = field(default=32, metadata={"help": "Its scale is lora_alpha / lora_r."})
    lora_dropout: float = field(default=0.05, metadata={"help": "Dropout before the adapter."})
    lora_target_modules: list[str] | None = field(
        default=None,
        metadata={"help": "Modules that get one, or all-linear. Unset: PEFT's choice for the architecture."},
    )
    lora_target_parameters: list[str] | None = field(
        default=None, metadata={"help": "Parameters, e.g. of experts, that get one."}
    )
    lora_modules_to_save: list[str] | None = field(
        default=None, metadata={"help": "Modules trained whole beside the adapter."}
    )
    use_rslora: bool = field(default=False, metadata={"help": "Scale by lora_alpha / sqrt(lora_r)."})
    use_dora: bool = field(default=False, metadata={"help": "Train magnitude and direction apart."})


_FOLLOWS_TRL = {
    "ignore_bias_buffers": (False, "It changes nothing here: leave it out."),
    "lora_task_type": ("CAUSAL_LM", "Only causal language models are trained."),
    "load_in_8bit": (False, "Quantized base models are not supported yet; dtype: bfloat16 halves the weights."),
    "load_in_4bit": (False, "Quantized base models are not supported yet; dtype: bfloat16 halves the weights."),
    "bnb_4bit_quant_type": ("nf4", "Quantized base models are not supported yet."),
    "use_bnb_nested_quant": (False, "Quantized base models are not supported yet."),
    "bnb_4bit_quant_storage": (None, "Quantized base models are not supported yet."),
}
"""Flags of TRL's scripts that are not here: the value that asks for nothing more, and what to say to others."""


@contextlib.contextmanager
def setting_up(what: str) -> Iterator[None]:
    """Before training starts, what a library objects to comes from what it was given: say so without a traceback.

    Raises:
        ConfigError: in place of any such objection, with its text.
    """
    try:
        yield
    except TrelliumError:
        raise
    except (ValueError, TypeError, AttributeError, ArithmeticError, ImportError, OSError, RuntimeError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(f"{what}: {type(error).__name__}: {text} (--debug shows where)") from error


def read_config_file(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any], str]:
    """Take `--config file.yaml` out of the arguments, read it, and export its `env:` block.

    Returns:
        The other arguments; the file's other keys; the file's name, empty if none was given.

    Raises:
        ConfigError: no such file, not YAML, not a mapping, or an `env:` that is not one of names to values.
    """
    rest: list[str] = []
    path = ""
    queue = list(arguments)
    while queue:
        argument = queue.pop(0)
        if argument == "--config":
            if not queue or queue[0].startswith("--"):
                raise ConfigError("--config needs a YAML file after it")
            path = queue.pop(0)
        elif argument.startswith("--config="):
            path = argument.removeprefix("--config=")
        else:
            rest.append(argument)
    if not path:
        return rest, {}, ""
    options = _read_yaml(Path(path).expanduser())
    variables = options.pop("env", None) or {}
    if not isinstance(variables, dict):
        raise ConfigError(
            f"{path}: env must map names of environment variables to values, got {type(variables).__name__}"
        )
    if variables and "torch" in sys.modules:
        raise RuntimeError("torch was imported before the config file's env block was exported")
    os.environ.update({str(name): "" if value is None else str(value) for name, value in variables.items()})
    return rest, options, path


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise ConfigError(f"there is no config file {path} (looked for {path.absolute()})") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not YAML: {getattr(error, 'problem', None) or error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path}: a config file is a mapping of options to values, like 'max_steps: 100'; got {type(content).__name__}"
        )
    return content


def parse_options(
    config_class: type, arguments: Sequence[str], options: dict[str, Any], path: str
) -> tuple[DataOptions, ModelOptions, Any]:
    """The options of a training command.

    Args:
        config_class: the trainer's config, e.g. `SFTConfig`.
        arguments: the command line's flags, which win.
        options: the config file's keys and values.
        path: the config file's name, for messages.

    Raises:
        ConfigError: an option nobody knows (with the nearest known one), one of TRL's that is not here yet, or a value that cannot be.
    """
    parser = option_parser(config_class)
    known = {action.dest for action in parser._actions}
    flags: list[str] = []
    for key, value in options.items():
        name = str(key).replace("-", "_")
        if name not in known:
            _unknown_option(config_class, name, value, known, f"{path}: ")
        elif value is None:
            parser.set_defaults(**{name: None})
        else:
            flags += [f"--{name}", *_as_flag_values(value)]
    try:
        *parsed, left = parser.parse_args_into_dataclasses(
            [*flags, *arguments], return_remaining_strings=True, look_for_args_file=False
        )
    except ConfigError:
        raise
    except (ValueError, NotImplementedError) as error:  # what TrainingArguments and its kin find wrong
        raise ConfigError(str(error)) from error
    _check_left(config_class, left, known)
    data, model, config = parsed
    return data, model, config


def option_parser(config_class: type) -> Any:
    """An `HfArgumentParser` of data, model and trainer options that raises instead of exiting."""
    from transformers import HfArgumentParser

    class OptionParser(HfArgumentParser):
        def error(self, message: str) -> Any:
            raise ConfigError(message)

    parser = OptionParser([DataOptions, ModelOptions, config_class], add_help=False, allow_abbrev=False)
    parser.set_defaults(output_dir="runs/sft")
    return parser


def _as_flag_values(value: Any) -> list[str]:
    if isinstance(value, list):
        return [str(item) for item in value]
    return [json.dumps(value) if isinstance(value, dict) else str(value)]


def _check_left(config_class: type, left: list[str], known: set[str]) -> None:
    """Raise for the first argument that the parser did not take."""
    while left:
        flag = left.pop(0)
        if not flag.startswith("--"):
            raise ConfigError(f"unexpected argument {flag!r}: options look like --max_steps 100")
        name, _, value = flag.removeprefix("--").partition("=")
        if not value and left and not left[0].startswith("--"):
            value = left.pop(0)
        _unknown_option(config_class, name.replace("-", "_"), value or "true", known, "")


def _unknown_option(config_class: Any, name: str, value: Any, known: set[str], where: str) -> None:
    """Raise for an option that is not here, unless it asks for what happens anyway."""
    import yaml

    from trellium.trainers.base_config import unknown_name

    not_yet = {key: (entry.nothing, entry.instead) for key, entry in config_class.not_yet.items()} | _FOLLOWS_TRL
    if name not in not_yet:
        raise ConfigError(f"{where}{unknown_name('there is no option', name, known)} --help lists them.")
    nothing, instead = not_yet[name]
    if (yaml.safe_load(value) if isinstance(value, str) else value) != nothing:
        raise ConfigError(f"{where}{name}: {value} is not supported. {instead}")


def adapter_config(model: ModelOptions) -> Any:
    """The `peft.LoraConfig` that the options describe, or None without `use_peft`."""
    if not model.use_peft:
        return None
    from peft import LoraConfig

    targets: Any = model.lora_target_modules
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=model.lora_r,
        lora_alpha=model.lora_alpha,
        lora_dropout=model.lora_dropout,
        target_modules=targets[0] if targets and len(targets) == 1 else targets,
        target_parameters=model.lora_target_parameters,
        modules_to_save=model.lora_modules_to_save,
        use_rslora=model.use_rslora,
        use_dora=model.use_dora,
    )


def model_init_kwargs(model: ModelOptions, config: Any) -> dict[str, Any]:
    """What `load_model` is told: the model options, and over them the config's `model_init_kwargs`."""
    options: dict[str, Any] = {"dtype": model.dtype, "revision": model.model_revision}
    if model.attn_implementation is not None:
        options["attn_implementation"] = model.attn_implementation
    return {**options, **config.model_options}


_RUN_FIRST = (
    "output_dir",
    "max_steps",
    "num_train_epochs",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "weight_decay",
    "seed",
    "bf16",
    "use_cpu",
    "gradient_checkpointing",
    "logging_steps",
    "save_steps",
    "eval_strategy",
    "eval_steps",
    "resume_from_checkpoint",
)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def _format_action_invocation(self, action: argparse.Action) -> str:
        # HfArgumentParser gives every flag a twin with hyphens; one of them is enough to read.
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{action.option_strings[0]} {value}".strip()

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        kind = getattr(action.type, "__name__", "")
        return kind.upper() if kind in ("int", "float", "str") else "VALUE"


def help_text(config_class: Any, command: str, about: str, examples: str, *, everything: bool) -> str:
    """The help of a training command: ours first, in groups; all of transformers' options only if `everything`."""
    from transformers import TrainingArguments

    actions: dict[str, argparse.Action] = {}
    for action in option_parser(config_class)._actions:
        actions.setdefault(action.dest, action)  # a flag that is on by default has a --no_ twin after it
    inherited = {entry.name for entry in fields(TrainingArguments)}
    method = [entry.name for entry in fields(config_class) if entry.name not in inherited]
    groups = {
        "the run": _RUN_FIRST,
        "the data": [entry.name for entry in fields(DataOptions)],
        "the model and its adapter": [entry.name for entry in fields(ModelOptions)],
        "the method": method,
    }
    shown = {name for names in groups.values() for name in names}
    others = [name for name in actions if name not in shown]
    if everything:
        groups["all others of transformers.TrainingArguments"] = others
    formatter = _Formatter(prog=f"trellium {command}", max_help_position=36, width=110)
    formatter.add_text(f"usage: trellium {command} [--config file.yaml] [--option value ...]\n\n{about}")
    formatter.add_text(f"examples:\n{examples}")
    for title, names in groups.items():
        formatter.start_section(title)
        formatter.add_arguments([actions[name] for name in names if name in actions])
        formatter.end_section()
    if not everything:
        formatter.add_text(
            f"{len(others)} more options of transformers.TrainingArguments: trellium {command} --help-all. In a config file every option is a key: "
            "'max_steps: 100', and 'env:' maps environment variables to values. Flags win over the file."
        )
    return formatter.format_help()
