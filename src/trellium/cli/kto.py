"""`trellium kto`: Kahneman-Tversky optimization from the command line."""

from __future__ import annotations

import argparse
from typing import Any

from trellium.cli import training
from trellium.cli.early_checks import BASE_SOURCES
from trellium.cli.training import TrainingMethod

METHOD = TrainingMethod(
    command="kto",
    about="""\
Kahneman-Tversky optimization: the model learns from answers that are marked good or bad one by one. A row is a 'prompt', a 'completion' and a 'label', true
where the completion is good; rows with 'chosen' and 'rejected' are taken as two. The reference is the model as it is when training starts.""",
    examples="""\
  trellium kto --dataset_name examples/labelled.jsonl --use_peft true --max_steps 20
  trellium kto --dataset_name rows.jsonl --model_name_or_path path/to/model --desirable_weight 1.5
  trellium kto --config kto.yaml --resume_from_checkpoint last""",
    config="trellium.trainers.kto_config:KTOConfig",
    trainer="trellium.trainers.kto:KTOTrainer",
    sources=(
        *BASE_SOURCES,
        ("trainers/reference_config.py", "ReferenceConfig"),
        ("trainers/kto_config.py", "KTOConfig"),
    ),
    metrics=("rewards/margins", "kl"),
)


def register(subparsers: Any) -> None:
    """Add the command."""
    training.register(subparsers, METHOD)


def run(args: argparse.Namespace) -> int:
    """Train as told, save, and print a summary; the exit code."""
    return training.run(args, METHOD)
