"""Tiny rows and trainers for methods that compare completions, with TRL's beside."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.tiny_tokenizer import tiny_tokenizer
from trellium import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trellium.models.tiny import tiny_model

VOCABULARY = 400
METHODS = {"dpo": (DPOConfig, DPOTrainer), "kto": (KTOConfig, KTOTrainer), "reward": (RewardConfig, RewardTrainer)}
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "saw",
    "one",
    "bird",
    "fly",
    "over",
    "the",
    "old",
    "house",
    "near",
    "it",
]


def sentence(draw: random.Random, most: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, most)))


def preference_rows(count: int = 16, *, seed: int = 0, margin: bool = False) -> Dataset:
    """Ragged preferences in plain text."""
    draw = random.Random(seed)
    rows = [
        {
            "prompt": sentence(draw, 6) + ":",
            "chosen": " " + sentence(draw, 7),
            "rejected": " " + sentence(draw, 4),
            **({"margin": draw.random()} if margin else {}),
        }
        for _ in range(count)
    ]
    return Dataset.from_list(rows)


def unpaired_rows(count: int = 16, *, seed: int = 0) -> Dataset:
    """Ragged judged completions in plain text."""
    draw = random.Random(seed)
    return Dataset.from_list(
        [
            {"prompt": sentence(draw, 6) + ":", "completion": " " + sentence(draw, 7), "label": draw.random() < 0.6}
            for _ in range(count)
        ]
    )


def rows_for(method: str, count: int = 16, *, seed: int = 0) -> Dataset:
    return unpaired_rows(count, seed=seed) if method == "kto" else preference_rows(count, seed=seed)


def model_for(method: str, kind: str = "llama") -> torch.nn.Module:
    """A tiny model, the same every time."""
    torch.manual_seed(1)
    model = tiny_model(kind, vocab_size=VOCABULARY)
    if method != "reward":
        return model
    config = AutoConfig.for_model(**{**model.config.to_dict(), "num_labels": 1, "pad_token_id": 0})
    return AutoModelForSequenceClassification.from_config(config)


def trainer_for(method: str, folder: Path, model: Any = None, library: Any = None, **options: Any) -> Any:
    """A trainer of ours, or of `library`'s; `train_dataset`, `eval_dataset`, `ref_model`, `peft_config` and `callbacks` are its arguments."""
    arguments = {
        name: options.pop(name)
        for name in ("train_dataset", "eval_dataset", "ref_model", "peft_config", "callbacks")
        if name in options
    }
    arguments.setdefault("train_dataset", rows_for(method))
    names = [f"{method.upper() if method != 'reward' else 'Reward'}{kind}" for kind in ("Config", "Trainer")]
    config_class, trainer_class = METHODS[method] if library is None else [getattr(library, name) for name in names]
    config = config_class(
        **{
            "output_dir": str(folder),
            "use_cpu": True,
            "bf16": False,
            "disable_tqdm": True,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "learning_rate": 1e-3,
            "per_device_train_batch_size": 4,
            "max_steps": 4,
            **options,
        }
    )
    model = model_for(method) if model is None else model
    return trainer_class(model, args=config, processing_class=tiny_tokenizer(), **arguments)


def logged(trainer: Any, name: str = "loss") -> list[float]:
    """What a trainer logged of a metric, step by step."""
    return [entry[name] for entry in trainer.state.log_history if name in entry and "train_runtime" not in entry]
