"""Callbacks of TRL's names: what they show and write, and that they change nothing."""

from __future__ import annotations

import io
import json

import pytest
import torch
from peft import LoraConfig
from rich.console import Console
from transformers import GenerationConfig

from tests.trainers.preference_runs import logged, rows_for, trainer_for
from tests.trainers.tiny_runs import losses, tiny_trainer, token_rows
from trellium import LogCompletionsCallback, RichProgressCallback
from trellium.errors import ConfigError
from trellium.trainers.callbacks import COMPLETIONS_FILE, generate_completions, held_out_prompts, metrics_table

SHORT = GenerationConfig(max_new_tokens=5, do_sample=False)
SAMPLED = GenerationConfig(max_new_tokens=5, do_sample=True)


def dpo(folder, **options):
    return trainer_for("dpo", folder, eval_dataset=rows_for("dpo", 5, seed=3), **options)


def written(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / COMPLETIONS_FILE).read_text().splitlines()]


def test_progress_shows_steps_and_the_last_metrics(tmp_path, capsys):
    options = {"eval_dataset": token_rows(4), "eval_strategy": "steps", "eval_steps": 2}
    trainer = tiny_trainer(tmp_path, train_dataset=token_rows(16), callbacks=[RichProgressCallback()], **options)
    trainer.train()
    said = capsys.readouterr().out
    assert "3/3" in said
    assert "train_loss" in said
    assert "Evaluation" not in said  # its bar is gone with it


def test_progress_of_a_resumed_run_begins_where_it_goes_on(tmp_path, capsys):
    tiny_trainer(tmp_path, train_dataset=token_rows(16), save_strategy="steps", save_steps=2, max_steps=2).train()
    callback = RichProgressCallback()
    again = tiny_trainer(tmp_path, train_dataset=token_rows(16), callbacks=[callback], max_steps=3)
    begun = []
    callback.on_step_begin = lambda *_, **__: begun.append(callback._progress.tasks[0].completed)
    again.train(resume_from_checkpoint=True)
    assert begun == [2]
    assert "3/3" in capsys.readouterr().out


def test_metrics_that_belong_together_stand_in_one_row():
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(
        metrics_table({"loss": 0.51234, "rewards/chosen": 1.5, "rewards/rejected": -0.25, "num_tokens": 1234}, 7)
    )
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["step", "7"] in lines
    assert ["loss", "0.5123", "num_tokens", "1,234"] in lines
    assert ["rewards", "chosen", "1.5", "rejected", "-0.25"] in lines


def test_completions_of_held_out_prompts_are_written_every_few_steps(tmp_path):
    trainer = dpo(tmp_path, max_steps=4)
    trainer.add_callback(LogCompletionsCallback(trainer, SHORT, num_prompts=3, freq=2))
    trainer.train()
    rows = written(tmp_path)
    assert [row["step"] for row in rows] == [2, 2, 2, 4, 4, 4]
    prompts = [trainer.processing_class.decode(row["prompt_ids"]) for row in trainer.eval_dataset][:3]
    assert [row["prompt"] for row in rows] == prompts * 2


def test_batches_of_prompts_are_completed_as_each_alone(tmp_path):
    trainer = dpo(tmp_path, max_steps=1)
    trainer.train()
    prompts = held_out_prompts(trainer.eval_dataset, None)
    assert len({len(prompt) for prompt in prompts}) > 1
    alone = generate_completions(trainer, prompts, SHORT, batch_size=1)
    assert generate_completions(trainer, prompts, SHORT, batch_size=3) == alone
    plain = [
        trainer.model.generate(input_ids=torch.tensor([prompt]), generation_config=SHORT)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    assert alone == plain


@pytest.mark.parametrize("device", ["cpu", "neuron"])
def test_a_run_whose_completions_are_logged_has_the_losses_of_one_whose_are_not(tmp_path, device):
    if device == "neuron" and not hasattr(torch, "neuron"):
        pytest.skip("no neuron device")
    runs = []
    for logs in (False, True):
        adapter = LoraConfig(r=4, lora_dropout=0.5, task_type="CAUSAL_LM")  # random numbers in every step
        trainer = dpo(tmp_path, use_cpu=device == "cpu", peft_config=adapter, disable_dropout=False)
        if logs:
            trainer.add_callback(LogCompletionsCallback(trainer, SAMPLED, freq=1))
        trainer.train()
        assert trainer.model.training
        runs.append(logged(trainer))
    assert runs[0] == runs[1]
    assert len(written(tmp_path)) == 20


def test_a_resumed_run_goes_on_in_the_file_and_a_new_one_begins_it(tmp_path):
    def run(steps, resume=None):
        trainer = dpo(tmp_path, max_steps=steps, save_strategy="steps", save_steps=2)
        trainer.add_callback(LogCompletionsCallback(trainer, SHORT, num_prompts=1, freq=1))
        trainer.train(resume_from_checkpoint=resume)
        return [row["step"] for row in written(tmp_path)]

    assert run(3) == [1, 2, 3]
    assert run(4, str(tmp_path / "checkpoint-2")) == [1, 2, 3, 4]
    assert run(1) == [1]


def test_the_prompt_of_a_fine_tuning_row_is_what_stands_before_its_first_target(tmp_path):
    trainer = tiny_trainer(tmp_path, train_dataset=token_rows(8), max_steps=1)
    rows = trainer.train_dataset.from_list([{"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, -100]}])
    assert held_out_prompts(rows, None) == [[5, 6]]
    with pytest.raises(ConfigError, match="row 0 of eval_dataset has no prompt to complete"):
        held_out_prompts(rows.from_list([{"input_ids": [5, 6], "labels": [5, 6]}]), None)
    assert len(losses(trainer)) == 0


@pytest.mark.parametrize(
    ("method", "options", "arguments", "says"),
    [
        ("dpo", {}, {"freq": 1}, "the trainer has none"),
        ("reward", {"eval_dataset": rows_for("reward", 4)}, {"freq": 1}, "a reward model"),
        ("kto", {"eval_dataset": rows_for("kto", 4)}, {}, "Give freq"),
        ("kto", {"eval_dataset": rows_for("kto", 4)}, {"freq": 0}, "freq must be at least 1"),
        ("kto", {"eval_dataset": {"a": rows_for("kto", 4)}}, {"freq": 1}, "one eval_dataset"),
    ],
)
def test_completions_that_cannot_be_are_told_before_the_run(tmp_path, method, options, arguments, says):
    trainer = trainer_for(method, tmp_path, **options)
    with pytest.raises(ConfigError, match=says):
        LogCompletionsCallback(trainer, **arguments)
