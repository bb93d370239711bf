"""Tiny rows, models and trainers that the tests of this folder share, and the plainest possible training to compare with."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from tests.tiny_tokenizer import tiny_tokenizer
from trellium import SFTConfig, SFTTrainer
from trellium.models.tiny import tiny_model

VOCABULARY = 64


def token_rows(count: int, *, seed: int = 0, shortest: int = 3, longest: int = 17) -> Dataset:
    """Pre-tokenized rows of ragged length, in which about a third of the tokens is no target."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        ids = [draw.randrange(2, VOCABULARY) for _ in range(draw.randint(shortest, longest))]
        labels = [-100 if draw.random() < 0.3 else token for token in ids]
        labels[-1] = ids[-1]
        rows.append({"input_ids": ids, "labels": labels})
    return Dataset.from_list(rows)


def tiny_trainer(folder: Path, model: Any = None, **options: Any) -> SFTTrainer:
    """A trainer of a tiny model; `train_dataset`, `eval_dataset`, `peft_config` and `callbacks` are its arguments, the rest is its config's."""
    arguments = {
        name: options.pop(name)
        for name in ("train_dataset", "eval_dataset", "peft_config", "callbacks", "formatting_func", "data_collator")
        if name in options
    }
    config = SFTConfig(
        **{
            "output_dir": str(folder),
            "use_cpu": True,
            "disable_tqdm": True,
            "logging_steps": 1,
            "save_strategy": "no",
            "learning_rate": 1e-2,
            "per_device_train_batch_size": 4,
            "max_steps": 3,
            **options,
        }
    )
    tokenizer = tiny_tokenizer()
    model = tiny_model(vocab_size=VOCABULARY) if model is None else model
    return SFTTrainer(model, args=config, processing_class=tokenizer, **arguments)


def padded_nll_sum(model: torch.nn.Module, rows: list[dict]) -> tuple[torch.Tensor, int]:
    """The negative log-likelihood of the targets of `rows` from full logits of the plain padded batch, summed; and their number."""
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    labels = torch.full((len(rows), width), -100)
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    for index, row in enumerate(rows):
        length = len(row["input_ids"])
        ids[index, :length] = torch.tensor(row["input_ids"])
        labels[index, :length] = torch.tensor(row["labels"])
        mask[index, :length] = 1
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
    targets = labels[:, 1:]
    total = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )
    return total, int((targets != -100).sum())


def losses(trainer: SFTTrainer) -> list[float]:
    """The losses that a trainer logged, step by step."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
