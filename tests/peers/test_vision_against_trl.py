"""Rows with images train here as with TRL 1.16: five steps of four families, from the same weights, rows and seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

import trellium
from tests.tiny_vision import (
    FAMILIES,
    compared_rows,
    completion_rows,
    judged_rows,
    message_rows,
    tiny_processor,
    tiny_vision_model,
)

pytestmark = pytest.mark.peers
trl = pytest.importorskip("trl", reason="install the bench extra")

STEPS = 5


def curve(
    library: Any, method: str, family: str, folder: Path, rows: Dataset, **options: Any
) -> list[dict[str, float]]:
    """What a trainer of ours or of TRL's logged, step by step; TRL's gets a reference made as the model is, which it would else load by a name."""
    given = {}
    if library is trl and method != "SFT":
        given["ref_model"] = tiny_vision_model(family)
    config = getattr(library, f"{method}Config")(
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
            "gradient_checkpointing": False,
            "max_steps": STEPS,
            **options,
        }
    )
    trainer = getattr(library, f"{method}Trainer")(
        tiny_vision_model(family), args=config, train_dataset=rows, processing_class=tiny_processor(family), **given
    )
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def assert_alike(
    method: str, family: str, folder: Path, rows: Dataset, without: tuple[str, ...] = (), **options: Any
) -> None:
    ours, theirs = (curve(library, method, family, folder, rows, **options) for library in (trellium, trl))
    assert len(ours) == len(theirs) == STEPS
    for step, (mine, their) in enumerate(zip(ours, theirs, strict=True)):
        for name, value in their.items():
            if name not in without:
                assert mine[name] == pytest.approx(value, rel=1e-4, abs=2e-5), f"{name} of step {step}"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [message_rows, completion_rows])
def test_supervised_fine_tuning_with_images_is_trls(tmp_path, family, rows):
    assert_alike("SFT", family, tmp_path, rows())


@pytest.mark.parametrize("family", FAMILIES)
def test_training_what_the_assistant_says_of_images_is_trls(tmp_path, family):
    assert_alike("SFT", family, tmp_path, message_rows(), assistant_only_loss=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_direct_preference_optimization_with_images_is_trls(tmp_path, family):
    assert_alike("DPO", family, tmp_path, compared_rows())


def test_judged_answers_with_images_are_trls(tmp_path):
    assert_alike("KTO", "llava", tmp_path, judged_rows())
