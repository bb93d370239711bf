"""The options of the training commands: the parser of their dataclasses, and a help that teaches.

Imports transformers, so a command reads its config file and checks what it can (`trellium.cli.early_checks`) before it imports this.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from transformers import TrainingArguments

from trellium.trainers.base_config import BaseConfig
from trellium.trainers.dataset_mixture import DatasetMixtureConfig
from trellium.trainers.script_options import ModelConfig, ScriptArguments
from trellium.trainers.script_parser import TrlParser


def parse_options(
    config_class: type, defaults: dict[str, Any], flags: Sequence[str], options: dict[str, Any], path: str
) -> tuple[ScriptArguments, DatasetMixtureConfig, ModelConfig, Any]:
    """The options of a training command: rows, a mixture of rows, model, and the trainer's config.

    Args:
        config_class: the trainer's config, e.g. `SFTConfig`.
        defaults: the command's own.
        flags: the command line's, which win.
        options: the config file's keys and values.
        path: the config file's name, for messages.

    Raises:
        ConfigError: an option nobody knows (with the nearest known one), one of TRL's that is not here yet, or a value that cannot be.
    """
    data, mixture, model, config = option_parser(config_class, defaults).parse_options(flags, options, path)
    return data, mixture, model, config


def option_parser(config_class: type, defaults: dict[str, Any]) -> TrlParser:
    """The parser of data, model and trainer options, with a command's defaults."""
    parser = TrlParser([ScriptArguments, DatasetMixtureConfig, ModelConfig, config_class], add_help=False)
    parser.set_defaults(**defaults)
    return parser


def model_init_kwargs(model: ModelConfig, config: Any) -> dict[str, Any]:
    """What `load_model` is told: the model options, and over them the config's `model_init_kwargs`."""
    options: dict[str, Any] = {"dtype": model.dtype or "auto", "revision": model.model_revision}
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


_METHOD_FIRST = ("loss_type", "loss_weights", "beta")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def _format_action_invocation(self, action: argparse.Action) -> str:
        # HfArgumentParser gives every flag a twin with hyphens; one of them is enough to read.
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{action.option_strings[0]} {value}".strip()

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        kind = getattr(action.type, "__name__", "")
        return kind.upper() if kind in ("int", "float", "str") else "VALUE"


def _own_options(config_class: type) -> list[str]:
    """What a trainer's config says itself: its own options first, then those of what it is made of."""
    makers = config_class.__mro__[: config_class.__mro__.index(BaseConfig)]
    names = {entry.name for entry in fields(config_class)} - set(_RUN_FIRST)
    written = [name for one in makers for name in one.__annotations__]
    return [name for name in dict.fromkeys([*_METHOD_FIRST, *written]) if name in names]


def help_text(
    config_class: Any, command: str, about: str, examples: str, *, defaults: dict[str, Any], everything: bool
) -> str:
    """The help of a training command: ours first, in groups; all of transformers' options only if `everything`."""
    actions: dict[str, argparse.Action] = {}
    for action in option_parser(config_class, defaults)._actions:
        actions.setdefault(action.dest, action)  # a flag that is on by default has a --no_ twin after it
    method = _own_options(config_class)
    inherited = {*(entry.name for entry in fields(TrainingArguments)), *method}
    groups = {
        "the method": method,
        "the run": _RUN_FIRST,
        "the data": [entry.name for one in (ScriptArguments, DatasetMixtureConfig) for entry in fields(one)],
        "the model and its adapter": [entry.name for entry in fields(ModelConfig)],
        "rows, batches and graphs": [entry.name for entry in fields(BaseConfig) if entry.name not in inherited],
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
