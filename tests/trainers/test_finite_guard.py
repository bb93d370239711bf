"""A step that is not finite changes nothing, is told by its rows, and a streak of them ends the run before anything poisoned is saved."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from tests.trainers.tiny_runs import VOCABULARY, losses, tiny_trainer
from trellium.errors import ConfigError, ModelError
from trellium.models.tiny import tiny_model

POISON = VOCABULARY - 1
"""A token whose embedding is not finite in the tests."""


def rows(poisoned: set[int], count: int) -> Dataset:
    """One row a step; those of the poisoned steps, from 1, hold the token."""
    return Dataset.from_list(
        [
            {"input_ids": (ids := [2 + step, 5, POISON if step in poisoned else 6, 7]), "labels": ids}
            for step in range(1, count + 1)
        ]
    )


def poison(model: torch.nn.Module, value: float = math.nan) -> None:
    def spoil(module, args, output):
        return output + torch.zeros_like(output).masked_fill((args[0] == POISON)[..., None], value)

    model.get_input_embeddings().register_forward_hook(spoil)


class Snapshots(TrainerCallback):
    """Weights, optimizer state and learning rate after every step."""

    def __init__(self) -> None:
        self.after: dict[int, tuple] = {}

    def on_step_end(self, args, state, control, **given):
        self.after[state.global_step] = copy.deepcopy(
            (
                given["model"].state_dict(),
                given["optimizer"].state_dict()["state"],
                given["lr_scheduler"].state_dict()["_last_lr"],
            )
        )


def run(folder, poisoned: set[int], steps: int = 6, value: float = math.nan, **options):
    batches = options.get("gradient_accumulation_steps", 1) * options.get("per_device_train_batch_size", 1)
    model = tiny_model(vocab_size=VOCABULARY)
    poison(model, value)
    snapshots = Snapshots()
    trainer = tiny_trainer(
        folder,
        model,
        **{
            "train_dataset": rows(poisoned, steps * batches),
            "train_sampling_strategy": "sequential",
            "per_device_train_batch_size": 1,
            "max_steps": steps,
            "callbacks": [snapshots],
            **options,
        },
    )
    return trainer, snapshots.after


def equal(one, other) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}


@pytest.mark.parametrize(
    "options",
    [{}, {"max_grad_norm": 0.0}, {"optim": "adafactor"}, {"value": math.inf}, COMPILED, {"layout": "shared"}],
    ids=str,
)
def test_a_refused_step_leaves_weights_optimizer_and_schedule_bit_for_bit(tmp_path, options):
    trainer, after = run(tmp_path, {3, 5}, **options)
    trainer.train()
    for step in (3, 5):
        assert equal(after[step][0], after[step - 1][0])
        assert equal(after[step][1], after[step - 1][1])
        assert after[step][2] == after[step - 1][2]
    for step in (2, 4, 6):
        assert not equal(after[step][0], after[step - 1][0])
        assert after[step][2] < after[step - 1][2]


def test_a_run_with_a_refused_step_learns_what_a_run_without_its_rows_learns(tmp_path):
    schedule = {"lr_scheduler_type": "constant"}
    trainer, after = run(tmp_path / "refused", {3}, **schedule)
    trainer.train()
    good = trainer.train_dataset.select([0, 1, 3, 4, 5])
    without, alone = run(tmp_path / "without", set(), steps=5, train_dataset=good, **schedule)
    without.train()
    assert equal(after[6][0], alone[5][0])
    assert [loss for loss in losses(trainer) if math.isfinite(loss)] == losses(without)


def test_a_first_step_that_is_refused_makes_no_optimizer_state(tmp_path):
    trainer, after = run(tmp_path, {1}, steps=2)
    trainer.train()
    assert after[1][1] == {}
    assert after[2][1]


def test_one_poisoned_micro_batch_refuses_the_whole_step_and_is_named(tmp_path, caplog):
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "layout": "padded"}
    trainer, after = run(tmp_path, {5, 6}, steps=3, **options)
    trainer.train()
    assert equal(after[2][0], after[1][0])
    assert "step 2 is not finite: loss nan, gradient norm nan" in caplog.text
    assert "micro-batch 0, row 0: " in caplog.text
    assert "micro-batch 0, row 1: " in caplog.text
    assert "micro-batch 1" not in caplog.text
    decoded = trainer.processing_class.decode([2 + 5, 5, POISON, 7])
    assert repr(decoded) in caplog.text


def test_sequences_of_one_row_are_told_by_their_places(tmp_path, caplog):
    trainer, _ = run(tmp_path, {1}, steps=1, per_device_train_batch_size=2, layout="packed")
    trainer.train()
    first, second = (repr(trainer.processing_class.decode(row["input_ids"])) for row in trainer.train_dataset)
    assert f"row 0, token 0: {first}\n  micro-batch 0, row 0, token 4: {second}" in caplog.text


def test_rows_that_only_fill_a_planned_shape_are_not_told(tmp_path, caplog):
    batches = {"per_device_train_batch_size": 2, "max_steps": 2, "layout": "padded", "shapes": ["8"]}
    trainer, _ = run(tmp_path, set(), train_dataset=rows({3}, 3), **batches)
    trainer.train()
    assert "micro-batch 0, row 0: " in caplog.text
    assert "row 1: " not in caplog.text


def test_many_rows_are_told_by_a_few(tmp_path, caplog):
    trainer, _ = run(tmp_path, {1}, steps=1, per_device_train_batch_size=11)
    trainer.train()
    assert caplog.text.count("micro-batch 0, row") == 8
    assert "and 3 more" in caplog.text


def test_a_gradient_that_is_not_finite_is_refused_where_the_loss_is(tmp_path, caplog):
    trainer, after = run(tmp_path, set(), steps=3)
    seen = []

    def spoil(gradient):
        seen.append(gradient)
        return gradient * math.inf if len(seen) == 2 else gradient

    next(trainer.model.parameters()).register_hook(spoil)
    trainer.train()
    assert equal(after[2][0], after[1][0])
    assert re.search(r"step 2 is not finite: loss \d\.\d+, gradient norm (nan|inf)\.", caplog.text)
    assert "micro-batch 0, row 0: " in caplog.text


def test_refused_steps_are_counted_and_left_out_of_the_logged_means(tmp_path):
    trainer, _ = run(tmp_path / "refused", {2, 3}, steps=6, logging_steps=3, lr_scheduler_type="constant")
    result = trainer.train()
    first, second = (entry for entry in trainer.state.log_history if "loss" in entry)
    good = trainer.train_dataset.select([0, 3, 4, 5])
    plain, _ = run(tmp_path / "plain", set(), steps=4, train_dataset=good, lr_scheduler_type="constant")
    expected = losses(plain) if plain.train() else []
    assert first["loss"] == pytest.approx(expected[0])
    assert second["loss"] == pytest.approx(sum(expected[1:]) / 3)
    assert result.training_loss == pytest.approx(sum(expected) / 4)
    assert (first["skipped_steps"], second["skipped_steps"]) == (2, 2)
    assert math.isfinite(first["entropy"])
    assert not any("skipped_steps" in entry for entry in plain.state.log_history)


def test_a_window_of_refused_steps_alone_has_no_loss_and_the_next_has(tmp_path):
    trainer, _ = run(tmp_path, {2}, steps=3)
    trainer.train()
    assert [math.isfinite(loss) for loss in losses(trainer)] == [True, False, True]


SAVES = {"save_strategy": "steps", "save_steps": 1}


def checkpoints(folder) -> set[str]:
    return {found.name for found in folder.glob("checkpoint-*")}


def test_a_streak_stops_the_run_and_leaves_no_checkpoint_of_it(tmp_path):
    trainer, after = run(tmp_path, {3, 4, 5}, max_nonfinite_steps=3, **SAVES)
    told = (
        r"(?s)step 5 is not finite.* 3 in a row.*row 0: .*max_nonfinite_steps=3 .*last checkpoint is .*checkpoint-2\."
    )
    with pytest.raises(ModelError, match=told):
        trainer.train()
    assert checkpoints(tmp_path) == {"checkpoint-1", "checkpoint-2"}
    assert equal(trainer.model.state_dict(), after[2][0])


def test_refusals_with_a_good_step_between_are_no_streak(tmp_path):
    trainer, _ = run(tmp_path, {1, 2, 4, 5}, max_nonfinite_steps=3)
    trainer.train()
    assert trainer.state.global_step == 6


def test_a_checkpoint_that_is_due_at_a_refused_step_waits_for_the_next_that_is_taken(tmp_path, caplog):
    trainer, _ = run(tmp_path, {2, 3}, steps=5, save_strategy="steps", save_steps=2)
    trainer.train()
    assert checkpoints(tmp_path) == {"checkpoint-4", "checkpoint-5"}
    assert "No checkpoint is written after step 2" in caplog.text


def test_a_run_that_ends_with_refused_steps_still_leaves_its_last_checkpoint(tmp_path):
    trainer, after = run(tmp_path, {3, 4}, steps=4, save_strategy="steps", save_steps=4)
    trainer.train()
    assert checkpoints(tmp_path) == {"checkpoint-4"}
    assert trainer.resume_point == str(tmp_path / "checkpoint-4")
    saved = type(trainer.model).from_pretrained(tmp_path / "checkpoint-4")
    assert equal(saved.state_dict(), after[2][0])


def test_the_schedule_of_a_second_run_moves_where_the_first_ended_with_a_refused_step(tmp_path):
    trainer, after = run(tmp_path, {3}, steps=3)
    trainer.train()
    assert after[3][2] == after[2][2]
    trainer.train()
    assert after[2][2] < after[1][2]


def test_the_best_evaluation_is_kept_where_its_step_was_refused(tmp_path):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "learning_rate": 10.0}
    trainer, after = run(
        tmp_path,
        {1},
        steps=2,
        eval_dataset=rows(set(), 2),
        eval_strategy="steps",
        eval_steps=1,
        **SAVES,
        **best,
    )
    trainer.train()  # the second step makes it worse
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    assert equal(trainer.model.state_dict(), after[1][0])


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    class Overflow(TrainerCallback):
        def on_step_end(self, args, state, control, model, **_):
            if state.global_step == 3:
                list(model.parameters())[-1].data.view(-1)[0] = math.inf

    trainer, _ = run(tmp_path, set(), steps=4, callbacks=[Overflow()], **SAVES)
    with pytest.raises(
        ModelError,
        match=r"no checkpoint is written after step 3: 1 of \d+ trained weights .* Go on from .*checkpoint-2",
    ):
        trainer.train()
    assert checkpoints(tmp_path) == {"checkpoint-1", "checkpoint-2"}


def test_a_resumed_run_goes_on_counting_and_ends_where_the_whole_one_does(tmp_path):
    whole, after = run(tmp_path, {2, 5}, **SAVES)
    whole.train()
    resumed, again = run(tmp_path, {2, 5}, **SAVES)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    logged = [[entry for entry in one.state.log_history if "loss" in entry][-1] for one in (whole, resumed)]
    assert logged[0]["skipped_steps"] == logged[1]["skipped_steps"] == 2
    assert equal(again[6][0], after[6][0])
    assert again[6][2] == after[6][2]


def scaled(folder, monkeypatch, poisoned: set[int], *, scale: float, **options):
    """A run with a `GradScaler` on the cpu, in float32: `fp16=True` itself is refused there."""
    trainer, after = run(folder, poisoned, lr_scheduler_type="constant", **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    monkeypatch.setattr(trainer.accelerator, "scaler", scaler)
    monkeypatch.setattr(
        trainer.accelerator,
        "unscale_gradients",
        lambda optimizer=None: scaler.unscale_(trainer.optimizer.optimizer),
    )
    return trainer, after


def test_a_gradient_that_overflows_its_scale_is_no_fault(tmp_path, monkeypatch, caplog):
    trainer, after = scaled(tmp_path, monkeypatch, set(), scale=2.0**127, max_nonfinite_steps=1)
    trainer.train()
    assert trainer.accelerator.scaler.get_scale() < 2.0**127
    assert not equal(after[1][0], after[6][0])
    assert "not finite" not in caplog.text
    assert not any("skipped_steps" in entry for entry in trainer.state.log_history)


def test_a_loss_that_is_not_finite_is_a_fault_whatever_the_scale(tmp_path, monkeypatch, caplog):
    trainer, after = scaled(tmp_path, monkeypatch, {3}, scale=1024.0)
    trainer.train()
    assert equal(after[3][0], after[2][0])
    assert equal(after[3][1], after[2][1])
    assert not equal(after[4][0], after[3][0])
    assert "step 3 is not finite" in caplog.text


def test_a_gradient_that_no_scale_makes_finite_is_a_fault(tmp_path, monkeypatch):
    trainer, _ = scaled(tmp_path, monkeypatch, set(), scale=2.0, steps=8, max_nonfinite_steps=2)
    next(trainer.model.parameters()).register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(ModelError, match="step 4 is not finite"):  # the scale is 2, 1, 0.5, 0.25
        trainer.train()


@pytest.mark.skipif(not hasattr(torch, "neuron"), reason="no neuron device")
def test_a_step_on_neuron_is_refused_as_elsewhere(tmp_path):
    trainer, after = run(tmp_path, {2}, steps=3, use_cpu=False)
    trainer.train()
    assert equal(after[2][0], after[1][0])
    assert not equal(after[3][0], after[2][0])


def test_a_limit_below_one_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="max_nonfinite_steps must be a number from 1, got 0"):
        tiny_trainer(tmp_path, max_nonfinite_steps=0)
