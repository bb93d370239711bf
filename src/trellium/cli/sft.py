"""`trellium sft`: supervised fine-tuning from the command line."""

from __future__ import annotations

import argparse
import os
import shlex
import time
from typing import TYPE_CHECKING, Any

from trellium.cli.early_checks import check_early, flag_values
from trellium.trainers.config_file import read_config_file

if TYPE_CHECKING:
    from trellium.trainers.script_options import ModelConfig, ScriptArguments
    from trellium.trainers.sft import SFTTrainer
    from trellium.trainers.sft_config import SFTConfig

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
        print(help_of(everything="--help-all" in arguments), end="")
        return 0
    flags, options, path = read_config_file(arguments)  # before anything imports torch
    check_early(flags, options, path)
    # Read when torch is loaded. Threads that wait by spinning take the cores from each other on a machine that is not idle.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    print("Loading PyTorch, the model and the data ...", flush=True)
    from trellium.cli.training_options import parse_options
    from trellium.trainers.sft_config import SFTConfig

    data, model, config = parse_options(SFTConfig, flags, options, path)
    return train(build_trainer(data, model, config, asked_cpu=_asks_for_cpu(flags, options)), arguments)


def help_of(*, everything: bool) -> str:
    """The help of the command."""
    from trellium.cli.training_options import help_text
    from trellium.trainers.sft_config import SFTConfig

    return help_text(SFTConfig, "sft", ABOUT, EXAMPLES, everything=everything)


def train(trainer: SFTTrainer, arguments: list[str]) -> int:
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
        print("\n" + stopped_message(trainer, arguments))
        return EXIT_CODE
    print_summary(trainer, result.metrics, time.perf_counter() - began)
    return 0


def _asks_for_cpu(flags: list[str], options: dict[str, Any]) -> bool:
    """Whether `use_cpu` was asked for, rather than found to be all there is."""
    return str({**options, **flag_values(flags)}.get("use_cpu", "")).lower() in ("true", "1", "yes", "y", "t", "on")


def build_trainer(data: ScriptArguments, model: ModelConfig, config: SFTConfig, *, asked_cpu: bool) -> SFTTrainer:
    """The trainer that the options describe; errors as in `run`."""
    from trellium.cli.devices import device_sentence, refuse_a_missing_neuron
    from trellium.cli.run_report import PlanPrinter
    from trellium.cli.training_options import model_init_kwargs
    from trellium.data.files import load_dataset_from
    from trellium.models.places import BUNDLED_MODEL
    from trellium.trainers.script_options import get_peft_config
    from trellium.trainers.sft import SFTTrainer

    if not asked_cpu:
        refuse_a_missing_neuron()

    dataset = data.dataset_name or ""

    def rows(split: str) -> Any:
        return load_dataset_from(dataset, split, config=data.dataset_config, streaming=data.dataset_streaming)

    train_dataset = rows(data.dataset_train_split)
    eval_dataset = rows(data.dataset_test_split) if config.eval_strategy != "no" else None
    config.model_init_kwargs = model_init_kwargs(model, config)
    plan = PlanPrinter(
        model=model.model_name_or_path or BUNDLED_MODEL,
        data=dataset,
        device=device_sentence(str(config.device), asked=asked_cpu),
    )
    return SFTTrainer(
        model.model_name_or_path,
        args=config,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=get_peft_config(model),
        callbacks=[plan],
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
