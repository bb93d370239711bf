"""`trellium sft`: supervised fine-tuning from the command line."""

from __future__ import annotations

import argparse
from typing import Any

from trellium.cli import training
from trellium.cli.early_checks import BASE_SOURCES
from trellium.cli.training import TrainingMethod
from trellium.data.places import PYTHON_DOCS

METHOD = TrainingMethod(
    command="sft",
    about="""\
Supervised fine-tuning: the model learns to say what the rows of a dataset say. A row is a text, a conversation ('messages'), or a 'prompt' and its
'completion', of which only the completion is trained. Without options: the bundled SmolLM2-135M-Instruct on the docstrings of this Python.""",
    examples="""\
  trellium sft --use_peft true --max_steps 50
  trellium sft --dataset_name rows.jsonl --model_name_or_path path/to/model --output_dir out
  trellium sft --config sft.yaml --learning_rate 1e-4
  trellium sft --config sft.yaml --resume_from_checkpoint last""",
    config="trellium.trainers.sft_config:SFTConfig",
    trainer="trellium.trainers.sft:SFTTrainer",
    sources=(*BASE_SOURCES, ("trainers/sft_config.py", "SFTConfig")),
    metrics=("mean_token_accuracy",),
    default_data=PYTHON_DOCS,
)


def register(subparsers: Any) -> None:
    """Add the command."""
    training.register(subparsers, METHOD)


def run(args: argparse.Namespace) -> int:
    """Train as told, save, and print a summary; the exit code."""
    return training.run(args, METHOD)
