"""`trellium dpo`: direct preference optimization from the command line."""

from __future__ import annotations

import argparse
from typing import Any

from trellium.cli import training
from trellium.cli.early_checks import BASE_SOURCES
from trellium.cli.training import TrainingMethod

METHOD = TrainingMethod(
    command="dpo",
    about="""\
Direct preference optimization: the model learns to prefer one answer over another, without a reward model. A row is a 'prompt' with a 'chosen' and a
'rejected' completion, as text or as messages; without a prompt, what both begin with is it. The reference is the model as it is when training starts.""",
    examples="""\
  trellium dpo --dataset_name examples/preferences.jsonl --use_peft true --max_steps 20
  trellium dpo --dataset_name pairs.jsonl --model_name_or_path path/to/model --beta 0.05 --loss_type sigmoid sft --loss_weights 1.0 0.5
  trellium dpo --config dpo.yaml --resume_from_checkpoint last""",
    config="trellium.trainers.dpo_config:DPOConfig",
    trainer="trellium.trainers.dpo:DPOTrainer",
    sources=(
        *BASE_SOURCES,
        ("trainers/reference_config.py", "ReferenceConfig"),
        ("trainers/dpo_config.py", "DPOConfig"),
    ),
    metrics=("rewards/accuracies", "rewards/margins"),
)


def register(subparsers: Any) -> None:
    """Add the command."""
    training.register(subparsers, METHOD)


def run(args: argparse.Namespace) -> int:
    """Train as told, save, and print a summary; the exit code."""
    return training.run(args, METHOD)
