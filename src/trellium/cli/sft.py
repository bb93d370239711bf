"""`trellium sft`: supervised fine-tuning from the command line."""

from __future__ import annotations

import argparse
import os
import shlex
import time
from typing import TYPE_CHECKING, Any

from trellium.cli.training_options import (
    adapter_config,
    help_text,
    model_init_kwargs,
    parse_options,
    read_config_file,
    setting_up,
)

if TYPE_CHECKING:
    from trellium.trainers.sft import SFTTrainer

ABOUT = """\
Supervised fine-tuning: the model learns to say what the rows of a dataset say. A row is a text, a conversation ('messages'), or a 'prompt' and its
'completion', of which only the completion is trained. Without options: the bundled SmolLM2-135M-Instruct on the docstrings of this Python."""

EXAMPLES = """\
  trellium sft --use_peft true --max_steps 50
  trellium sft --dataset_name rows.jsonl --model_name_or_path path/to/model --output_dir out
  trellium sft --config sft.yaml --learning_rate 1e-4
  trellium sft --config sft.yaml --resume_from_checkpoint last"""


def register(subparsers: Any) -> None:
    """Add the command; its options are read in `run`, because listing them imports torch."""
    parser: argparse.ArgumentParser = subparsers.add_parser("sft", help="supervised fine-tuning", add_help=False)

    def take_all(args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        namespace = namespace or argparse.Namespace()
        arguments = list(args or [])
        namespace.debug = "--debug" in arguments
        namespace.arguments = [argument for argument in arguments if argument != "--debug"]
        namespace.run = run
        return namespace, []

    parser.parse_known_args = take_all  # type: ignore[assignment, method-assign]


def run(args: argparse.Namespace) -> int:
    """Train as told, save, and print a summary; the exit code.

    Raises:
        TrelliumError: whatever the user can mend.
    """
    arguments: list[str] = args.arguments
    if {"-h", "--help", "--help-all"} & set(arguments):
        from trellium.trainers.sft_config import SFTConfig

        print(help_text(SFTConfig, "sft", ABOUT, EXAMPLES, everything="--help-all" in arguments), end="")
        return 0
    with setting_up("the config file cannot be used"):
        flags, options, path = read_config_file(arguments)  # before anything imports torch
    # Read when torch is loaded. Threads that wait by spinning take the cores from each other on a machine that is not idle.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from trellium.trainers.sft_config import SFTConfig

    with setting_up("these options cannot be used"):
        data, model, config = parse_options(SFTConfig, flags, options, path)
    from trellium.cli.interruption import EXIT_CODE, stop_on_interrupt

    with setting_up("the trainer cannot be made of these options"):
        trainer = build_trainer(data, model, config)
    resume = config.resume_from_checkpoint
    began = time.perf_counter()
    try:
        with stop_on_interrupt(trainer) as stop:
            result = trainer.train(
                resume_from_checkpoint=(resume not in ("true", "True", "last") and resume) or bool(resume)
            )
            stop.check(trainer)
            trainer.save_model(config.output_dir)
    except KeyboardInterrupt:
        print("\n" + stopped_message(trainer, arguments))
        return EXIT_CODE
    print_summary(trainer, result.metrics, time.perf_counter() - began)
    return 0


def build_trainer(data: Any, model: Any, config: Any) -> SFTTrainer:
    """The trainer that the options describe; errors as in `run`."""
    from trellium.data.files import load_dataset_from
    from trellium.trainers.sft import SFTTrainer

    def rows(split: str) -> Any:
        return load_dataset_from(data.dataset_name, split, config=data.dataset_config, streaming=data.dataset_streaming)

    train_dataset = rows(data.dataset_train_split)
    eval_dataset = rows(data.dataset_test_split) if config.eval_strategy != "no" else None
    config.model_init_kwargs = model_init_kwargs(model, config)
    return SFTTrainer(
        model.model_name_or_path,
        args=config,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=adapter_config(model),
    )


def stopped_message(trainer: SFTTrainer, arguments: list[str]) -> str:
    """Where an interrupted run stands, and the command that goes on from there: its own last checkpoint, never an earlier run's."""
    stands = f"Stopped after step {trainer.state.global_step} of {trainer.state.max_steps}"
    if trainer.resume_point is None:
        return f"{stands}, before its first checkpoint: save_steps is {trainer.args.save_steps}. Nothing was saved."
    command = shlex.join(
        ["trellium", "sft", *_without_resume(arguments), "--resume_from_checkpoint", trainer.resume_point]
    )
    return f"{stands}. The last checkpoint of this run is {trainer.resume_point}. Go on with:\n  {command}"


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


def print_summary(trainer: SFTTrainer, metrics: dict[str, float], seconds: float) -> None:
    """What the run did, in a few lines."""
    from rich.console import Console
    from rich.table import Table

    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    table = Table(title="Run summary", show_header=False)
    table.add_row("steps", f"{trainer.state.global_step}")
    table.add_row("seconds", f"{seconds:.1f}")
    table.add_row("mean training loss", f"{metrics['train_loss']:.4f}")
    if steps:
        table.add_row("first and last logged loss", f"{steps[0]['loss']:.4f} → {steps[-1]['loss']:.4f}")
        table.add_row("tokens", f"{steps[-1]['num_tokens']:,}")
        table.add_row("tokens per second, last logged", f"{steps[-1]['tokens_per_second']:,.0f}")
        table.add_row("peak memory", f"{steps[-1]['peak_memory_gib']:.2f} GiB ({trainer.args.device})")
    if evaluations:
        table.add_row("held-out loss", f"{evaluations[-1]['eval_loss']:.4f}")
    table.add_row("saved in", trainer.args.output_dir)
    Console().print(table)
