"""The trainer on an accelerator against the trainer on the host; skipped where there is no accelerator."""

from __future__ import annotations

import pytest
import torch

from tests.trainers.tiny_runs import losses, tiny_trainer, token_rows
from trellium.capabilities import capabilities
from trellium.models.tiny import tiny_model
from trellium.trainers.random_state import load_accelerator_random_state, save_accelerator_random_state

pytestmark = pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator, emulated or not")


def accelerator() -> torch.device:
    return torch.device(torch.accelerator.current_accelerator().type, 0)


def test_losses_are_those_of_the_host(tmp_path):
    options = {"train_dataset": token_rows(12), "bf16": False, "pad_to_multiple_of": 16}
    curves = []
    for use_cpu in (True, False):  # one after the other: accelerate knows one device a process at a time
        trainer = tiny_trainer(tmp_path, use_cpu=use_cpu, **options)
        trainer.train()
        curves.append(losses(trainer))
    assert trainer.args.device.type == accelerator().type
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)


def test_rows_are_rounded_up_where_every_new_shape_is_compiled(tmp_path):
    trainer = tiny_trainer(tmp_path, use_cpu=False, bf16=False, train_dataset=token_rows(4))
    expected = 128 if capabilities(accelerator()).static_shapes else None
    assert trainer.args.pad_to_multiple_of == expected
    batch = next(iter(trainer.get_train_dataloader()))
    assert expected is None or batch["input_ids"].shape[1] == batch["edge_target"].shape[0] == expected


def test_random_numbers_go_on_where_a_checkpoint_left_them(tmp_path):
    device = accelerator()
    torch.rand(3, device=device)
    save_accelerator_random_state(tmp_path, device, 0)
    expected = torch.rand(5, device=device).cpu()
    torch.rand(7, device=device)
    load_accelerator_random_state(tmp_path, device, 0)
    assert torch.equal(torch.rand(5, device=device).cpu(), expected)


def test_a_resumed_run_with_dropout_repeats_the_uninterrupted_one(tmp_path):
    def run(folder, **more):
        model = tiny_model(vocab_size=64, attention_dropout=0.3)
        return tiny_trainer(
            tmp_path / folder, model, use_cpu=False, bf16=False, train_dataset=token_rows(24), max_steps=4, **more
        )

    whole = run("whole", save_strategy="steps", save_steps=2)
    whole.train()
    resumed = run("resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert losses(resumed) == losses(whole)
    logged = [entry["peak_memory_gib"] for entry in whole.state.log_history if "peak_memory_gib" in entry]
    assert len(logged) == 4
