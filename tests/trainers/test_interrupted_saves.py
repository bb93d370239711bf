"""A checkpoint that is being overwritten is not whole, and a streamed evaluation set works beside any training set."""

from __future__ import annotations

import pytest
from transformers import Trainer

from tests.trainers.tiny_runs import tiny_trainer, token_rows


def test_a_checkpoint_overwritten_in_part_is_not_resumed_from(tmp_path, monkeypatch):
    options = {"train_dataset": token_rows(8), "save_strategy": "steps", "save_steps": 3}
    tiny_trainer(tmp_path, **options).train()
    assert (tmp_path / "checkpoint-3" / "trainer_state.json").is_file()

    def killed(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "_save_optimizer_and_scheduler", killed)
    with pytest.raises(KeyboardInterrupt):
        tiny_trainer(tmp_path, **options).train()
    assert not (tmp_path / "checkpoint-3" / "trainer_state.json").exists()


def test_a_streamed_evaluation_set_works_beside_a_plain_training_set(tmp_path):
    rows = token_rows(6)
    trainer = tiny_trainer(
        tmp_path, train_dataset=rows, eval_dataset=rows.to_iterable_dataset(), eval_strategy="steps", eval_steps=2
    )
    trainer.train()
    assert any("eval_loss" in entry for entry in trainer.state.log_history)
