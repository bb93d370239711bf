"""`trellium reward`: a reward model from the command line."""

from __future__ import annotations

import argparse
from typing import Any

from trellium.cli import training
from trellium.cli.early_checks import BASE_SOURCES
from trellium.cli.training import TrainingMethod

METHOD = TrainingMethod(
    command="reward",
    about="""\
A reward model: one number for a conversation, higher for the better of two answers. A row is a 'prompt' with a 'chosen' and a 'rejected' completion, as text
or as messages, and perhaps a 'margin' between them. A language model gets a new 'score' layer; with an adapter, that layer is trained too.""",
    examples="""\
  trellium reward --dataset_name examples/preferences.jsonl --use_peft true --max_steps 20
  trellium reward --dataset_name pairs.jsonl --model_name_or_path path/to/model --center_rewards_coefficient 0.01
  trellium reward --config reward.yaml --resume_from_checkpoint last""",
    config="trellium.trainers.reward_config:RewardConfig",
    trainer="trellium.trainers.reward:RewardTrainer",
    sources=(*BASE_SOURCES, ("trainers/reward_config.py", "RewardConfig")),
    metrics=("accuracy", "margin"),
    adapter="SEQ_CLS",
)


def register(subparsers: Any) -> None:
    """Add the command."""
    training.register(subparsers, METHOD)


def run(args: argparse.Namespace) -> int:
    """Train as told, save, and print a summary; the exit code."""
    return training.run(args, METHOD)
