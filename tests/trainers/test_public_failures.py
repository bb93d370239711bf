"""Kinds of failure that users of other trainers reported, of which each is a test here; those of data are in `tests/data/test_public_failures.py`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

from tests.tiny_tokenizer import tiny_tokenizer
from tests.trainers.preference_runs import logged, model_for, rows_for, trainer_for, unpaired_rows
from tests.trainers.tiny_runs import tiny_trainer
from trellium.errors import ConfigError, DatasetError
from trellium.models.tiny import tiny_model

METHODS = ("sft", "dpo", "kto", "reward")


def make(method: str, folder: Path, rows: Dataset | None = None, **options: Any) -> Any:
    """A trainer of any of the four methods on ragged text."""
    if rows is None:
        rows = rows_for("kto" if method == "sft" else method, 10)
    if method == "sft":
        rows = rows.remove_columns([name for name in ("label",) if name in rows.column_names])
        model = options.pop("model", None)
        model = model_for("dpo") if model is None else model
        return tiny_trainer(folder, model, train_dataset=rows, report_to="none", **options)
    return trainer_for(method, folder, train_dataset=rows, **options)


# ---- the scale of the loss


@pytest.mark.parametrize("method", ["sft", "dpo"])  # all others, in every layout: `test_equality_matrix`
def test_accumulated_micro_batches_train_as_one_batch_the_last_of_an_epoch_included(tmp_path, method):
    """Six rows by four: the second step has two, and each counts as much as any other."""
    curves, weights = [], []
    for batch, steps in ((4, 1), (1, 4), (2, 2)):
        trainer = make(
            method,
            tmp_path,
            rows_for("kto" if method == "sft" else method, 6),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=steps,
            max_steps=-1,
            num_train_epochs=2,
            optim="sgd",
            learning_rate=0.02,
        )
        trainer.train()
        curves.append([logged(trainer, name) for name in ("loss", "grad_norm")])
        weights.append(torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]))
    assert len(curves[0][0]) == 4
    for curve, weight in zip(curves[1:], weights[1:], strict=True):
        for one, other in zip(curve, curves[0], strict=True):
            assert one == pytest.approx(other, rel=1e-4)
        torch.testing.assert_close(weight, weights[0], rtol=1e-4, atol=1e-5)


def test_metrics_do_not_depend_on_which_tokens_rows_share(tmp_path):
    """Rows that begin alike share tokens, and each of them counts in the means."""
    rows = Dataset.from_list([{"text": f"the cat sat on a mat {word}"} for word in ("and", "near", "over it", "")])
    found = []
    for layout in ("padded", "packed", "shared"):
        trainer = make("sft", tmp_path, rows, layout=layout, max_steps=2)
        trainer.train()
        found.append([logged(trainer, name) for name in ("loss", "entropy", "mean_token_accuracy")])
    assert max(logged(trainer, "packing_ratio")) > 1.5
    for other in found[1:]:
        for one, two in zip(other, found[0], strict=True):
            assert one == pytest.approx(two, rel=1e-5)


# ---- judged completions


@pytest.mark.parametrize("label", [True, False])
def test_kto_trains_batches_of_only_good_or_only_bad_rows(tmp_path, label):
    rows = unpaired_rows(6).map(lambda row: {"label": label})
    trainer = make("kto", tmp_path, rows, max_steps=3, eval_dataset=rows)
    trainer.train()
    there, missing = ("chosen", "rejected") if label else ("rejected", "chosen")
    values = [value for entry in trainer.state.log_history for value in entry.values()]
    assert all(math.isfinite(value) for value in values)
    assert len(logged(trainer, f"rewards/{there}")) == 3
    assert not logged(trainer, f"rewards/{missing}")
    assert not logged(trainer, "rewards/margins")
    assert math.isfinite(trainer.evaluate()["eval_loss"])


@pytest.mark.parametrize("batch", [1, 3, 5])
def test_kto_trains_odd_and_single_batches(tmp_path, batch):
    """Also where the last one of an epoch has a single row: seven by three."""
    trainer = make(
        "kto", tmp_path, unpaired_rows(7), per_device_train_batch_size=batch, max_steps=-1, num_train_epochs=2
    )
    trainer.train()
    assert len(logged(trainer)) == 2 * -(-7 // batch)
    assert all(math.isfinite(value) for entry in trainer.state.log_history for value in entry.values())
    assert logged(trainer)[0] == pytest.approx(0.5)  # nothing has been learned yet, and nothing diverges
    assert logged(trainer, "kl")[0] == 0.0


def test_a_single_judged_row_does_not_estimate_the_divergence_from_itself(tmp_path):
    """Its mismatched completion is another row's: with its own, the estimate would be the reward and cancel it."""
    trainer = make("kto", tmp_path, unpaired_rows(7), per_device_train_batch_size=1)
    for row in trainer.train_dataset:
        assert row["kl_completion_ids"] != row["completion_ids"]


def test_unbalanced_kto_weights_are_said_with_those_that_would_balance(tmp_path, caplog):
    rows = Dataset.from_list([{"prompt": "a", "completion": f" b{i}", "label": i < 8} for i in range(10)])
    make("kto", tmp_path, rows)
    assert "8 good and 2 bad rows, weighed 1 and 1" in caplog.text
    assert "desirable_weight between 0.25 and 0.33, or undesirable_weight between 3 and 4" in caplog.text
    for balanced in ({"desirable_weight": 0.3}, {"undesirable_weight": 3.5}):
        caplog.clear()
        make("kto", tmp_path, rows, **balanced)
        assert "For balance" not in caplog.text
    caplog.clear()
    make("kto", tmp_path, rows.select(range(6, 10)), undesirable_weight=3.0)  # as many of each: meant so
    make("kto", tmp_path, rows.select(range(8)))
    assert "For balance" not in caplog.text


# ---- resuming


@pytest.mark.parametrize("method", METHODS)
def test_counters_and_losses_go_on_where_the_checkpoint_stood(tmp_path, method):
    options = {"max_steps": 4, "per_device_train_batch_size": 2}
    whole = make(method, tmp_path / "whole", save_strategy="steps", save_steps=2, **options)
    whole.train()
    resumed = make(method, tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for name in ("loss", "num_tokens"):
        assert logged(resumed, name) == logged(whole, name)
    assert logged(whole, "num_tokens") == sorted(logged(whole, "num_tokens"))
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


# ---- what is saved

SOME = tiny_tokenizer()("the cat sat on a mat")["input_ids"]
EMBEDDINGS = {
    "whole": {"modules_to_save": ["embed_tokens"]},
    "some tokens": {"trainable_token_indices": {"embed_tokens": SOME}},
    "some tokens by number": {"trainable_token_indices": SOME},
    "head": {"modules_to_save": ["lm_head"]},
}


def embedding_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.get_input_embeddings()(torch.tensor(SOME)).clone()


@pytest.mark.parametrize(
    ("kind", "tied"),
    [
        ("whole", False),
        ("whole", True),
        ("some tokens", False),
        ("some tokens", True),  # PEFT then trains those rows of the head as well
        ("some tokens by number", False),
        ("head", False),
    ],
)
@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_an_adapter_on_the_embeddings_is_trained_saved_and_loaded(tmp_path, method, kind, tied):
    def base():
        return tiny_model("llama", vocab_size=400, tie_word_embeddings=tied)

    def run(name, **more):
        lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **EMBEDDINGS[kind])
        return make(method, tmp_path / name, model=base(), peft_config=lora, learning_rate=1e-2, max_steps=4, **more)

    trainer = run("whole", save_strategy="steps", save_steps=2)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert torch.allclose(embedding_of(trainer.model), embedding_of(base())) == (kind == "head")
    loaded = PeftModel.from_pretrained(base(), tmp_path / "saved").eval()
    ids = torch.arange(5, 45)[None]
    trained = trainer.model.eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids).logits, trained(input_ids=ids).logits)
    # What was trained is what the plain forward computes: the scores are those of the loaded model's logits.
    logits = loaded(input_ids=ids).logits[0, :-1].log_softmax(-1)
    expected = logits.gather(1, ids[0, 1:, None])[:, 0]
    edge, count = torch.arange(ids.shape[1] - 1), ids.shape[1]
    fields = {
        "input_ids": ids,
        "position_ids": torch.arange(count)[None],
        "subtree_end": torch.full((1, count), count),
        "edge_position": edge,
        "edge_target": ids[0, 1:],
    }
    with torch.no_grad():
        torch.testing.assert_close(trained(**fields, score_outputs=("logprob",)).logprob, expected)
    resumed = run("resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert logged(resumed) == logged(trainer)


@pytest.mark.parametrize("method", ["sft", "dpo", "kto"])
def test_an_adapter_on_the_head_is_refused_by_name(tmp_path, method):
    lora = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    with pytest.raises(ConfigError, match=r"adapter is on the output head.*modules_to_save"):
        make(method, tmp_path, peft_config=lora)


@pytest.mark.parametrize("method", ["sft", "dpo"])
@pytest.mark.parametrize("tied", [False, True])
def test_tied_and_untied_weights_are_saved_as_they_are(tmp_path, method, tied):
    model = tiny_model("llama", vocab_size=400, tie_word_embeddings=tied)
    trainer = make(method, tmp_path / "run", model=model, learning_rate=1e-2, max_steps=2)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="float32")
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(input_ids=ids).logits, trainer.model.eval()(input_ids=ids).logits)


# ---- nothing to train

EMPTY = {
    "sft": {"input_ids": [3, 4, 5], "labels": [-100, -100, -100]},
    "dpo": {"prompt": "a " * 30, "chosen": " b", "rejected": " c"},
    "kto": {"prompt": "a " * 30, "completion": " b", "label": True},
    "reward": {"prompt": "a " * 30, "chosen": " b", "rejected": " c"},
}


@pytest.mark.parametrize("method", METHODS)
def test_rows_of_which_nothing_is_trained_are_left_out_and_none_left_is_an_error(tmp_path, method):
    short = {**EMPTY[method], **({"labels": [-100, 4, 5]} if method == "sft" else {"prompt": "a"})}
    mixed = make(method, tmp_path, Dataset.from_list([EMPTY[method], short, EMPTY[method]]), max_length=12)
    assert len(mixed.train_dataset) == 1
    mixed.train()
    assert all(math.isfinite(value) for value in logged(mixed))
    with pytest.raises(DatasetError):
        make(method, tmp_path, Dataset.from_list([EMPTY[method]] * 2), max_length=12)


@pytest.mark.parametrize("method", ["sft", "dpo", "kto"])  # rewards: `test_rewards`
def test_which_token_pads_changes_nothing(tmp_path, method):
    curves = []
    for token in ("<|endoftext|>", "<|im_start|>", "a"):
        trainer = make(method, tmp_path, layout="padded", max_steps=2, pad_token=token)
        assert trainer.data_collator.pad_token_id == trainer.processing_class.convert_tokens_to_ids(token)
        trainer.train()
        curves.append([logged(trainer, name) for name in ("loss", "grad_norm")])
    assert curves[1:] == curves[:1] * 2
