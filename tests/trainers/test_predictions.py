"""`compute_metrics` reads what TRL's reads, and only where it is given."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from tests.tiny_tokenizer import tiny_tokenizer
from tests.trainers.preference_runs import METHODS, model_for, rows_for
from tests.trainers.tiny_runs import VOCABULARY, token_rows
from trellium import SFTConfig, SFTTrainer
from trellium.errors import ConfigError
from trellium.forest.collate import ForestCollator
from trellium.models.tiny import tiny_model
from trellium.monitor import ledger


class Seen:
    """A `compute_metrics` that keeps what it was given."""

    def __call__(self, prediction, compute_result=True):
        self.predictions, self.labels, self.inputs = prediction.predictions, prediction.label_ids, prediction.inputs
        return {"mine": 7.0}


def sft(folder, *, eval_rows, compute_metrics=None, preprocess=None, **options):
    config = SFTConfig(
        **{
            "output_dir": str(folder),
            "use_cpu": True,
            "disable_tqdm": True,
            "save_strategy": "no",
            "max_steps": 1,
            "per_device_eval_batch_size": 4,
            **options,
        }
    )
    return SFTTrainer(
        tiny_model(vocab_size=VOCABULARY),
        args=config,
        train_dataset=token_rows(4),
        eval_dataset=eval_rows,
        processing_class=tiny_tokenizer(),
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess,
    )


def test_metrics_of_the_user_s_read_the_logits_of_each_row(tmp_path):
    rows, seen = token_rows(10, seed=1), Seen()
    trainer = sft(tmp_path, eval_rows=rows, compute_metrics=seen, packing=True, max_length=40)
    assert trainer.evaluate()["eval_mine"] == 7.0
    assert seen.predictions.shape == (10, max(map(len, rows["input_ids"])), VOCABULARY)
    assert seen.labels.shape == seen.predictions.shape[:2]
    for row, logits, labels in zip(rows, seen.predictions, seen.labels, strict=True):
        length = len(row["input_ids"])
        with torch.no_grad():
            expected = trainer.model(input_ids=torch.tensor([row["input_ids"]])).logits[0]
        np.testing.assert_allclose(logits[:length], expected, atol=1e-5)
        assert labels.tolist() == [-100, *row["labels"][1:], *[-100] * (len(labels) - length)]


def test_logits_may_be_shrunk_before_they_are_held(tmp_path):
    seen = Seen()
    trainer = sft(
        tmp_path,
        eval_rows=token_rows(6),
        compute_metrics=seen,
        preprocess=lambda logits, labels: logits.argmax(-1),
        include_for_metrics=["inputs", "loss"],
    )
    metrics = trainer.evaluate()
    target = seen.labels[:, 1:]
    hits = (seen.predictions[:, :-1] == target)[target != -100]
    assert hits.mean() == pytest.approx(metrics["eval_mean_token_accuracy"])
    assert (seen.inputs[:, 1:][target != -100] == target[target != -100]).all()


def test_the_loss_is_the_same_with_metrics_and_without(tmp_path):
    rows = token_rows(9)
    plain = sft(tmp_path, eval_rows=rows).evaluate()
    asked = sft(tmp_path, eval_rows=rows, compute_metrics=Seen()).evaluate()
    assert asked["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-6)
    assert "eval_mine" not in plain


def test_predictions_of_a_set_are_those_that_metrics_read(tmp_path):
    rows = token_rows(5)
    assert sft(tmp_path, eval_rows=None).predict(rows).predictions is None
    found = sft(tmp_path, eval_rows=None, preprocess=lambda logits, labels: logits.argmax(-1)).predict(rows)
    assert found.predictions.shape == found.label_ids.shape == (5, max(map(len, rows["input_ids"])))


def test_it_is_said_once_what_logits_cost(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="trellium"):
        trainer = sft(tmp_path, eval_rows=token_rows(4), compute_metrics=Seen())
        trainer.evaluate()
    said = [record.message for record in caplog.records if "makes logits" in record.message]
    assert len(said) == 1
    assert f"{4 * VOCABULARY} bytes a token" in said[0]


@pytest.mark.parametrize("method", METHODS)
def test_predictions_of_compared_rows_are_whole_in_the_last_batch(method, tmp_path):
    config, trainer_class = METHODS[method]
    rows, seen = rows_for(method, 7), Seen()
    trainer = trainer_class(
        model_for(method),
        args=config(output_dir=str(tmp_path), use_cpu=True, disable_tqdm=True, per_device_eval_batch_size=4),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=tiny_tokenizer(),
        compute_metrics=seen,
    )
    metrics = trainer.evaluate()
    assert metrics["eval_mine"] == 7.0
    if method != "reward":
        assert seen.predictions.shape[:2] == seen.labels.shape
        assert len(seen.predictions) == (7 if method == "kto" else 14)
        return
    chosen, rejected = np.concatenate(
        [part.reshape(2, -1) for part in (seen.predictions[:8], seen.predictions[8:])], axis=1
    )
    assert (chosen > rejected).mean() == pytest.approx(metrics["eval_accuracy"])
    assert (chosen - rejected).mean() == pytest.approx(metrics["eval_margin"], abs=1e-6)


def test_metrics_compile_nothing_beyond_what_was_planned(tmp_path):
    trainer = sft(
        tmp_path,
        eval_rows=token_rows(6),
        compute_metrics=Seen(),
        torch_compile=True,
        torch_compile_backend="eager",
        shapes=["128"],
        strict_shapes=True,
        eval_strategy="steps",
        eval_steps=1,
    )
    trainer.train()
    after = ledger.mark()
    assert trainer.evaluate()["eval_mine"] == 7.0
    assert not ledger.since(after)


def test_a_collator_that_lays_several_sequences_into_a_row_is_refused_for_metrics(tmp_path):
    trainer = sft(tmp_path, eval_rows=token_rows(6), compute_metrics=Seen())
    packed = ForestCollator(0, layout="packed")
    trainer.data_collator = lambda rows: packed(rows)
    with pytest.raises(ConfigError, match="reads one sequence a row"):
        trainer.evaluate()


def test_metrics_that_come_after_the_trainer_was_made_are_not_passed_by(tmp_path):
    trainer = sft(tmp_path, eval_rows=token_rows(6))
    trainer.compute_metrics = Seen()
    with pytest.raises(ConfigError, match="Give it when the trainer is made"):
        trainer.evaluate()


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator, emulated or not")
def test_predictions_on_an_accelerator_are_those_of_the_host(tmp_path):
    seen = {}
    for use_cpu in (True, False):
        seen[use_cpu] = Seen()
        torch.manual_seed(0)
        sft(tmp_path, eval_rows=token_rows(6), compute_metrics=seen[use_cpu], use_cpu=use_cpu, bf16=False).evaluate()
    assert (seen[True].labels == seen[False].labels).all()
    np.testing.assert_allclose(seen[False].predictions, seen[True].predictions, rtol=1e-4, atol=1e-5)
