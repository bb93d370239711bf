"""A reward model learns the rewards that its own plain forward gives, and is saved such that it gives them again."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.tiny_tokenizer import tiny_tokenizer
from tests.trainers.preference_runs import logged, model_for, preference_rows, trainer_for
from trellium import RewardConfig, RewardTrainer
from trellium.errors import DatasetError

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "up_proj"]}


@torch.no_grad()
def plain_rewards(model, dataset, name="chosen_ids"):
    """Of each row alone, by transformers' own forward, which is told of no padding: it would take the end of a text for that."""
    model.eval()
    model.config.pad_token_id = None
    return torch.tensor([float(model(input_ids=torch.tensor([row[name]])).logits) for row in dataset])


@torch.no_grad()
def padded_rewards(model, dataset, pad, name="chosen_ids"):
    """The same of one padded batch, as somebody who loads the model calls it."""
    model.eval()
    width = max(map(len, dataset[name]))
    ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in dataset[name]])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in dataset[name]])
    return model(input_ids=ids, attention_mask=mask).logits[:, 0]


def test_rewards_in_training_are_those_of_the_plain_forward_of_each_row(tmp_path):
    rows = preference_rows(8)
    trainer = trainer_for("reward", tmp_path, train_dataset=rows, per_device_train_batch_size=8, max_steps=1)
    before = copy.deepcopy(trainer.model)
    trainer.train()
    chosen, rejected = (plain_rewards(before, trainer.train_dataset, name) for name in ("chosen_ids", "rejected_ids"))
    entry = trainer.state.log_history[0]
    assert entry["loss"] == pytest.approx(float(-torch.nn.functional.logsigmoid(chosen - rejected).mean()), rel=1e-5)
    assert entry["accuracy"] == pytest.approx(float((chosen > rejected).float().mean()))
    assert entry["mean_reward"] == pytest.approx(float(torch.cat([chosen, rejected]).mean()), rel=1e-4)


def test_the_saved_model_gives_its_rewards_with_plain_transformers(tmp_path):
    trainer = trainer_for("reward", tmp_path, learning_rate=1e-2)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    expected = plain_rewards(trainer.model, trainer.train_dataset)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved", dtype="float32")
    torch.testing.assert_close(plain_rewards(loaded, trainer.train_dataset), expected)
    assert "AutoModelForSequenceClassification" in (tmp_path / "saved" / "README.md").read_text()


@pytest.mark.parametrize("asked", [{"task_type": "SEQ_CLS"}, {"modules_to_save": ["score"]}])
def test_with_an_adapter_the_score_layer_is_trained_and_saved(tmp_path, asked):
    trainer = trainer_for("reward", tmp_path, peft_config=LoraConfig(**LORA, **asked), learning_rate=1e-2)
    before = copy.deepcopy(trainer.model.get_base_model().score)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    expected = plain_rewards(trainer.model, trainer.train_dataset)
    loaded = PeftModel.from_pretrained(model_for("reward"), tmp_path / "saved")
    torch.testing.assert_close(plain_rewards(loaded, trainer.train_dataset), expected)
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(plain_rewards(merged, trainer.train_dataset), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(merged.score.weight, before.original_module.weight)


def test_a_score_layer_that_an_adapter_leaves_untrained_is_said(tmp_path, caplog):
    trainer_for("reward", tmp_path, peft_config=LoraConfig(**LORA), max_steps=1).train()
    assert "the score layer is not trained" in caplog.text
    caplog.clear()
    for options in ({"peft_config": LoraConfig(**LORA, task_type="SEQ_CLS")}, {}):
        trainer_for("reward", tmp_path, max_steps=1, **options).train()
    assert "the score layer" not in caplog.text


def test_a_language_model_given_by_name_gets_a_score_layer_that_is_trained_and_saved(tmp_path):
    model_for("dpo").save_pretrained(tmp_path / "language")
    tiny_tokenizer().save_pretrained(tmp_path / "language")
    config = RewardConfig(
        output_dir=str(tmp_path / "run"), use_cpu=True, report_to="none", max_steps=2, save_strategy="no"
    )
    trainer = RewardTrainer(str(tmp_path / "language"), config, train_dataset=preference_rows(8))
    trainer.train()
    trainer.save_model()
    assert json.loads((tmp_path / "run" / "config.json").read_text())["architectures"] == [
        "LlamaForSequenceClassification"
    ]
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run", dtype="float32")
    rows = trainer.train_dataset
    torch.testing.assert_close(plain_rewards(loaded, rows), plain_rewards(trainer.model, rows))


@pytest.mark.parametrize("layout", ["padded", "shared"])
def test_which_token_pads_changes_nothing(tmp_path, layout):
    """Not the end of a text, nor a token that stands in the text, nor none: where a sequence ends is known by place."""
    curves = []
    for token in ("<|endoftext|>", "<|im_end|>", "a", "s"):
        trainer = trainer_for("reward", tmp_path, layout=layout, pad_token=token)
        assert trainer.processing_class.pad_token == token
        trainer.train()
        curves.append([logged(trainer, name) for name in ("loss", "grad_norm", "mean_reward")])
    assert curves[1:] == curves[:1] * 3


def test_a_margin_asks_for_more_between_the_rewards_of_a_pair(tmp_path):
    rows = preference_rows(8, margin=True)
    options = {"per_device_train_batch_size": 8, "max_steps": 1}
    trainer = trainer_for("reward", tmp_path, train_dataset=rows, center_rewards_coefficient=0.1, **options)
    before = copy.deepcopy(trainer.model)
    trainer.train()
    chosen, rejected = (plain_rewards(before, trainer.train_dataset, name) for name in ("chosen_ids", "rejected_ids"))
    asked = torch.nn.functional.logsigmoid(chosen - rejected - torch.tensor(rows["margin"]))
    assert logged(trainer)[0] == pytest.approx(float(-asked.mean() + 0.1 * ((chosen + rejected) ** 2).mean()), rel=1e-5)


def test_pairs_that_are_too_long_are_left_out_and_none_left_is_an_error(tmp_path):
    rows = Dataset.from_list([{"chosen": "a b", "rejected": "c"}, {"chosen": "a " * 40, "rejected": "c"}])
    assert len(trainer_for("reward", tmp_path, train_dataset=rows, max_length=10).train_dataset) == 1
    with pytest.raises(DatasetError):
        trainer_for("reward", tmp_path, train_dataset=rows.select([1]), max_length=10)


def test_a_saved_model_takes_no_end_of_a_text_for_padding(tmp_path):
    """Where the tokenizer pads with the end token, a batch is refused by the loaded model, and not scored one token early."""
    trainer = trainer_for("reward", tmp_path, max_steps=1)
    assert trainer.processing_class.pad_token_id == trainer.processing_class.eos_token_id
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved", dtype="float32")
    with pytest.raises(ValueError, match="no padding token"):
        padded_rewards(loaded, trainer.train_dataset, 0)


def test_a_padded_batch_of_the_saved_model_is_scored_at_each_rows_end(tmp_path):
    """With a padding token that stands in no row, as transformers' pooling needs."""
    trainer = trainer_for("reward", tmp_path, pad_token="<bos>", learning_rate=1e-2)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved", dtype="float32")
    pad = AutoConfig.from_pretrained(tmp_path / "saved").pad_token_id
    rows = trainer.train_dataset
    torch.testing.assert_close(padded_rewards(loaded, rows, pad), plain_rewards(trainer.model, rows))
