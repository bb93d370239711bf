"""What the training commands share: `trellium sft`, `dpo`, `kto` and `reward` differ in a `TrainingMethod`, a module each.

A command reads its config file and checks what it can before anything imports torch, then parses, builds its trainer, trains, saves and summarises.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trellium.cli.early_checks import check_early, flag_values
from trellium.errors import ConfigError
from trellium.trainers.config_file import read_config_file

if TYPE_CHECKING:
    from trellium.trainers.base import BaseTrainer
    from trellium.trainers.base_config import BaseConfig
    from trellium.trainers.dataset_mixture import DatasetMixtureConfig
    from trellium.trainers.script_options import ModelConfig, ScriptArguments


@dataclass(frozen=True)
class TrainingMethod:
    """One training command.

    Attributes:
        command: its name.
        about, examples: what its help says first.
        config, trainer: their classes, each as `module:name`.
        sources: the files, below `trellium`, and classes that define its options, the general ones first.
        metrics: what its summary says beside the loss, by the names of the log.
        adapter: the task type of its LoRA adapters.
        default_data: the dataset it takes where none is named; None where one must be.
    """

    command: str
    about: str
    examples: str
    config: str
    trainer: str
    sources: tuple[tuple[str, str], ...]
    metrics: tuple[str, ...]
    adapter: str = "CAUSAL_LM"
    default_data: str | None = None

    @property
    def defaults(self) -> dict[str, Any]:
        """Its options' defaults where they are the command's own."""
        data = {} if self.default_data is None else {"dataset_name": self.default_data}
        return {**data, "output_dir": f"runs/{self.command}", "lora_task_type": self.adapter}

    def load(self, what: str) -> Any:
        """The class that `config` or `trainer` names."""
        module, _, name = getattr(self, what).partition(":")
        return getattr(importlib.import_module(module), name)


def register(subparsers: Any, method: TrainingMethod) -> None:
    """Add a command; its options are read in `run`, because listing them imports torch."""
    parser: argparse.ArgumentParser = subparsers.add_parser(method.command, add_help=False)

    def take_all(args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        namespace = namespace or argparse.Namespace()
        arguments = list(args or [])
        namespace.debug = "--debug" in arguments
        namespace.arguments = [argument for argument in arguments if argument != "--debug"]
        return namespace, []

    parser.parse_known_args = take_all  # type: ignore[assignment, method-assign]


def run(args: argparse.Namespace, method: TrainingMethod) -> int:
    """Train as told, save, and print a summary; the exit code.

    Raises:
        TrelliumError: whatever the user can mend.
    """
    arguments: list[str] = args.arguments
    if {"-h", "--help", "--help-all"} & set(arguments):
        print(help_of(method, everything="--help-all" in arguments), end="")
        return 0
    flags, options, path = read_config_file(arguments)  # before anything imports torch
    check_early(flags, options, path, method.sources, method.defaults)
    # Read when torch is loaded. Threads that wait by spinning take the cores from each other on a machine that is not idle.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    print("Loading PyTorch, the model and the data ...", flush=True)
    from trellium.cli.training_options import parse_options

    chosen = parse_options(method.load("config"), method.defaults, flags, options, path)
    trainer = build_trainer(method, *chosen, asked_cpu=_asks_for_cpu(flags, options))
    return train(trainer, method, arguments)


def help_of(method: TrainingMethod, *, everything: bool) -> str:
    """The help of a command."""
    from trellium.cli.training_options import help_text

    return help_text(
        method.load("config"),
        method.command,
        method.about,
        method.examples,
        defaults=method.defaults,
        everything=everything,
    )


def train(trainer: BaseTrainer, method: TrainingMethod, arguments: list[str]) -> int:
    """Train, save and summarise; if Ctrl-C ends it, say how to go on. The exit code."""
    from trellium.cli.interruption import EXIT_CODE, stop_on_interrupt
    from trellium.cli.run_report import print_summary
    from trellium.trainers.checkpoints import resume_choice

    resume = resume_choice(trainer.args.resume_from_checkpoint)
    began = time.perf_counter()
    try:
        with stop_on_interrupt(trainer) as stop:
            result = trainer.train(resume_from_checkpoint=resume)
            stop.check(trainer)
            trainer.save_model(trainer.args.output_dir)
    except KeyboardInterrupt:
        print("\n" + stopped_message(trainer, ["trellium", method.command], arguments))
        return EXIT_CODE
    print_summary(trainer, result.metrics, time.perf_counter() - began, method.metrics)
    return 0


def _asks_for_cpu(flags: list[str], options: dict[str, Any]) -> bool:
    """Whether `use_cpu` was asked for, rather than found to be all there is."""
    return str({**options, **flag_values(flags)}.get("use_cpu", "")).lower() in ("true", "1", "yes", "y", "t", "on")


def build_trainer(
    method: TrainingMethod,
    data: ScriptArguments,
    mixture: DatasetMixtureConfig,
    model: ModelConfig,
    config: BaseConfig,
    *,
    asked_cpu: bool,
) -> BaseTrainer:
    """The trainer that the options describe; errors as in `run`."""
    from trellium.cli.devices import device_sentence, refuse_a_missing_neuron
    from trellium.cli.run_report import PlanPrinter
    from trellium.cli.training_options import model_init_kwargs
    from trellium.models.places import BUNDLED_MODEL
    from trellium.trainers.script_options import get_peft_config

    if not asked_cpu:
        refuse_a_missing_neuron()

    called, train_dataset, eval_dataset = load_rows(data, mixture, evaluates=config.eval_strategy != "no")
    config.model_init_kwargs = model_init_kwargs(model, config)
    plan = PlanPrinter(
        model=model.model_name_or_path or BUNDLED_MODEL,
        data=called,
        device=device_sentence(str(config.device), asked=asked_cpu),
    )
    return method.load("trainer")(
        model.model_name_or_path,
        args=config,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=get_peft_config(model),
        callbacks=[plan],
    )


def load_rows(data: ScriptArguments, mixture: DatasetMixtureConfig, *, evaluates: bool) -> tuple[str, Any, Any]:
    """What to call the rows, those to train on, and those held out (None unless the run `evaluates`).

    Raises:
        ConfigError: an evaluation, but a mixture of which nothing is held out.
        DatasetError: no such rows.
    """
    from trellium.data.files import load_dataset_from
    from trellium.trainers.dataset_mixture import get_dataset

    if mixture.datasets:
        if evaluates and mixture.test_split_size is None:
            raise ConfigError(
                "eval_strategy asks for an evaluation, but of the mixture in 'datasets' nothing is held out. Set test_split_size, e.g. 0.1."
            )
        splits = get_dataset(mixture)
        return mixture.called, splits["train"], splits["test"] if evaluates else None
    name = data.dataset_name or ""

    def rows(split: str) -> Any:
        return load_dataset_from(name, split, config=data.dataset_config, streaming=data.dataset_streaming)

    return name, rows(data.dataset_train_split), rows(data.dataset_test_split) if evaluates else None


def stopped_message(trainer: BaseTrainer, command: list[str], arguments: list[str]) -> str:
    """Where an interrupted run stands, and the command that goes on from there: its own last checkpoint, never an earlier run's."""
    stands = f"Stopped after step {trainer.state.global_step} of {trainer.state.max_steps}"
    if trainer.resume_point is None:
        return f"{stands}, before its first checkpoint: save_steps is {trainer.args.save_steps}. Nothing was saved."
    again = shlex.join([*command, *_without_resume(arguments), "--resume_from_checkpoint", trainer.resume_point])
    return f"{stands}. The last checkpoint of this run is {trainer.resume_point}. Go on with:\n  {again}"


def _without_resume(arguments: list[str]) -> list[str]:
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument.replace("-", "_") == "__resume_from_checkpoint":
            skip = True
        elif not argument.replace("-", "_").startswith("__resume_from_checkpoint="):
            kept.append(argument)
    return kept
