"""Supervised fine-tuning against the plainest way to do it: full logits, padded rows, a loop written by hand."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, TrainerCallback

from tests.trainers.tiny_runs import VOCABULARY, losses, padded_nll_sum, tiny_trainer, token_rows
from trellium import SFTConfig, SFTTrainer
from trellium.errors import ConfigError, DatasetError, ModelError
from trellium.models.tiny import tiny_model
from trellium.trainers.checkpoints import last_checkpoint


def hand_written_losses(rows: list[dict], *, batch: int, steps: int, learning_rate: float) -> list[float]:
    model = tiny_model(vocab_size=VOCABULARY).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    curve = []
    for step in range(steps):
        total, count = padded_nll_sum(model, rows[step * batch : (step + 1) * batch])
        loss = total / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        curve.append(float(loss.detach()))
    return curve


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class KeepGradients(TrainerCallback):
    """Keeps the gradients of the first step, before they are clipped away or used."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if not hasattr(self, "first"):
            self.first = gradients(model)


def test_loss_and_gradient_equal_those_of_padded_rows_with_full_logits(tmp_path):
    rows = token_rows(6)
    keep = KeepGradients()
    trainer = tiny_trainer(
        tmp_path, train_dataset=rows, per_device_train_batch_size=6, max_steps=1, max_grad_norm=0.0, callbacks=[keep]
    )
    trainer.train()
    plain = tiny_model(vocab_size=VOCABULARY)
    total, count = padded_nll_sum(plain, list(rows))
    (total / count).backward()
    assert losses(trainer)[0] == pytest.approx(float(total.detach()) / count, rel=1e-5)
    expected = gradients(plain)
    assert set(keep.first) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(keep.first[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_loss_curve_equals_that_of_a_hand_written_loop(tmp_path):
    rows = token_rows(20)
    trainer = tiny_trainer(
        tmp_path,
        train_dataset=rows,
        train_sampling_strategy="sequential",
        max_steps=5,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        gradient_checkpointing=True,
    )
    trainer.train()
    assert losses(trainer) == pytest.approx(
        hand_written_losses(list(rows), batch=4, steps=5, learning_rate=1e-2), rel=1e-4
    )


def test_four_accumulated_rows_train_as_one_batch_of_four(tmp_path):
    rows = token_rows(12)
    curves, weights = [], []
    for batch, accumulation in ((4, 1), (1, 4), (2, 2)):
        trainer = tiny_trainer(
            tmp_path,
            train_dataset=rows,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
        )
        trainer.train()
        curves.append(losses(trainer))
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    for curve, weight in zip(curves[1:], weights[1:], strict=True):
        assert curve == pytest.approx(curves[0], rel=1e-5)
        torch.testing.assert_close(weight, weights[0], rtol=1e-3, atol=1e-4)


def test_an_epoch_whose_last_step_has_fewer_batches_is_normalised_by_what_it_has(tmp_path):
    rows = token_rows(5)
    curves = []
    for batch, accumulation in ((4, 1), (1, 4)):
        trainer = tiny_trainer(
            tmp_path,
            train_dataset=rows,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            max_steps=-1,
            num_train_epochs=1,
        )
        trainer.train()
        curves.append(losses(trainer))
    assert len(curves[0]) == 2
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)


def test_dft_weights_each_token_by_its_own_probability(tmp_path):
    rows = token_rows(4)
    trainer = tiny_trainer(tmp_path, train_dataset=rows, loss_type="dft", max_steps=1)
    trainer.train()
    model = tiny_model(vocab_size=VOCABULARY)
    total, count = 0.0, 0
    for row in rows:
        logprob = torch.log_softmax(model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1].float(), -1)
        for position, target in enumerate(row["labels"][1:]):
            if target != -100:
                value = float(logprob[position, target].detach())
                total -= torch.exp(torch.tensor(value)).item() * value
                count += 1
    assert losses(trainer)[0] == pytest.approx(total / count, rel=1e-4)


def test_logged_metrics_are_those_of_full_logits(tmp_path):
    rows = token_rows(4)
    trainer = tiny_trainer(tmp_path, train_dataset=rows, max_steps=1)
    trainer.train()
    entry = next(entry for entry in trainer.state.log_history if "loss" in entry)
    model = tiny_model(vocab_size=VOCABULARY)
    entropy, correct, count = 0.0, 0, 0
    for row in rows:
        logprob = torch.log_softmax(
            model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1].float(), -1
        ).detach()
        for position, target in enumerate(row["labels"][1:]):
            if target != -100:
                entropy -= float((logprob[position].exp() * logprob[position]).sum())
                correct += int(logprob[position].argmax()) == target
                count += 1
    assert entry["entropy"] == pytest.approx(entropy / count, rel=1e-4)
    assert entry["mean_token_accuracy"] == pytest.approx(correct / count)
    assert entry["num_tokens"] == sum(len(row["input_ids"]) for row in rows)


def test_held_out_loss_is_the_mean_over_all_its_tokens_whatever_the_batch_size(tmp_path):
    rows = token_rows(7, seed=3)
    total, count = padded_nll_sum(tiny_model(vocab_size=VOCABULARY), list(rows))
    for batch in (1, 3, 7):
        trainer = tiny_trainer(tmp_path, eval_dataset=rows, per_device_eval_batch_size=batch)
        metrics = trainer.evaluate()
        assert metrics["eval_loss"] == pytest.approx(float(total.detach()) / count, rel=1e-5)
        assert {"eval_entropy", "eval_mean_token_accuracy", "eval_num_tokens"} <= set(metrics)


def test_several_held_out_sets_are_reported_by_name(tmp_path):
    sets = {"short": token_rows(3, seed=1, longest=5), "long": token_rows(3, seed=2, shortest=10)}
    trainer = tiny_trainer(
        tmp_path, train_dataset=token_rows(4), eval_dataset=sets, eval_strategy="steps", eval_steps=1, max_steps=1
    )
    trainer.train()
    logged = {key for entry in trainer.state.log_history for key in entry}
    assert {"eval_short_loss", "eval_long_loss", "eval_long_mean_token_accuracy"} <= logged


def test_evaluate_prepares_raw_rows_as_the_constructor_does(tmp_path):
    raw = Dataset.from_list([{"text": "to be or not"}, {"text": "that is the question"}])
    model = tiny_model(vocab_size=400)
    trainer = tiny_trainer(tmp_path, model, eval_dataset=raw)
    expected = trainer.evaluate()["eval_loss"]
    assert trainer.evaluate(raw)["eval_loss"] == expected
    assert trainer.evaluate({"again": raw})["eval_again_loss"] == expected
    assert trainer.evaluate(trainer.eval_dataset)["eval_loss"] == expected


@pytest.mark.parametrize("stop", [2, 3])
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(tmp_path, stop):
    options = {"max_steps": 6, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    whole = tiny_trainer(
        tmp_path / "whole", train_dataset=token_rows(16), save_strategy="steps", save_steps=stop, **options
    )
    whole.train()
    resumed = tiny_trainer(tmp_path / "resumed", train_dataset=token_rows(16), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{stop}"))
    assert losses(resumed) == losses(whole)
    assert [e["num_tokens"] for e in resumed.state.log_history if "loss" in e] == [
        e["num_tokens"] for e in whole.state.log_history if "loss" in e
    ]
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_tokens_of_steps_that_were_not_logged_yet_are_in_the_checkpoint(tmp_path):
    options = {"max_steps": 4, "logging_steps": 4}
    whole = tiny_trainer(
        tmp_path / "whole", train_dataset=token_rows(16), save_strategy="steps", save_steps=3, **options
    )
    whole.train()
    saved = json.loads((tmp_path / "whole" / "checkpoint-3" / "trainer_state.json").read_text())
    assert saved["stateful_callbacks"]["trellium"]["num_tokens"] > 0
    resumed = tiny_trainer(tmp_path / "resumed", train_dataset=token_rows(16), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    last = [e["num_tokens"] for e in resumed.state.log_history if "num_tokens" in e][-1]
    assert last == [e["num_tokens"] for e in whole.state.log_history if "num_tokens" in e][-1]


def test_lora_trains_the_adapter_alone_and_is_saved_alone(tmp_path):
    base = tiny_model(vocab_size=VOCABULARY)
    before = copy.deepcopy(base.state_dict())
    trainer = tiny_trainer(
        tmp_path,
        base,
        train_dataset=token_rows(12),
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    start = copy.deepcopy({n: p for n, p in trainer.model.named_parameters() if p.requires_grad})
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    assert start
    assert all("lora_" in name for name in start)
    assert any(not torch.equal(start[name], p) for name, p in trainer.model.named_parameters() if name in start)
    for name, weight in trainer.model.get_base_model().state_dict().items():
        plain = name.replace(".base_layer", "")
        if plain in before:
            assert torch.equal(weight, before[plain]), name
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    again = PeftModel.from_pretrained(tiny_model(vocab_size=VOCABULARY), tmp_path / "adapter", torch_device="cpu")
    ids = torch.tensor([[5, 6, 7, 8]])
    trainer.model.eval()
    torch.testing.assert_close(again.eval()(input_ids=ids).logits, trainer.model(input_ids=ids).logits)


def test_the_same_seed_draws_the_same_adapter(tmp_path):
    config = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    curves = []
    for _ in range(2):
        trainer = tiny_trainer(tmp_path, train_dataset=token_rows(12), peft_config=config)
        trainer.train()
        curves.append(losses(trainer))
        torch.rand(3)
    assert curves[0] == curves[1]


def test_reentrant_checkpointing_trains_an_adapter(tmp_path):
    trainer = tiny_trainer(
        tmp_path,
        train_dataset=token_rows(4),
        peft_config=LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"),
        gradient_checkpointing_kwargs={"use_reentrant": True},
        max_steps=1,
    )
    trainer.train()
    assert trainer.state.log_history[0]["grad_norm"] > 0


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("not a config", "must be a peft.PeftConfig"),
        (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "virtual tokens"),
        (LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM"), "output head"),
        (LoraConfig(target_modules=["nowhere"], task_type="CAUSAL_LM"), "PEFT cannot put this adapter"),
    ],
)
def test_an_adapter_that_cannot_be_trained_is_refused(tmp_path, config, says):
    with pytest.raises(ConfigError, match=says):
        tiny_trainer(tmp_path, train_dataset=token_rows(2), peft_config=config)


def test_a_model_with_an_adapter_trains_it_and_takes_no_second(tmp_path):
    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(tiny_model(vocab_size=VOCABULARY), lora)
    with pytest.raises(ConfigError, match="has an adapter already"):
        tiny_trainer(tmp_path, model, train_dataset=token_rows(2), peft_config=lora)
    trainer = tiny_trainer(tmp_path, model, train_dataset=token_rows(8), max_steps=2)
    trainer.train()
    assert len(losses(trainer)) == 2


def test_an_adapter_loaded_for_inference_is_refused(tmp_path):
    get_peft_model(tiny_model(vocab_size=VOCABULARY), LoraConfig(r=2, task_type="CAUSAL_LM")).save_pretrained(
        tmp_path / "a"
    )
    model = PeftModel.from_pretrained(tiny_model(vocab_size=VOCABULARY), tmp_path / "a", torch_device="cpu")
    with pytest.raises(ConfigError, match="is_trainable=True"):
        tiny_trainer(tmp_path, model, train_dataset=token_rows(2))


def test_the_saved_model_loads_with_plain_transformers_and_has_no_padding_that_ends_sequences(tmp_path):
    trainer = tiny_trainer(tmp_path, train_dataset=token_rows(4), max_steps=1)
    trainer.processing_class.pad_token = trainer.processing_class.eos_token
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert type(model).__module__.startswith("transformers.")
    assert model.config.eos_token_id is not None
    assert model.config.pad_token_id != model.config.eos_token_id
    assert model.generation_config.pad_token_id != model.generation_config.eos_token_id
    ids = torch.tensor([[5, 6, 7, 8]])
    trainer.model.eval()
    torch.testing.assert_close(model(input_ids=ids).logits, trainer.model(input_ids=ids).logits)
    card = (tmp_path / "final" / "README.md").read_text()
    assert "SFT trainer of Trellium" in card
    assert len(card.splitlines()) < 20


def test_which_token_pads_changes_nothing(tmp_path):
    curves = []
    for token in ("<|endoftext|>", "<|im_end|>"):
        trainer = tiny_trainer(tmp_path, tiny_model(vocab_size=400), train_dataset=token_rows(8), pad_token=token)
        trainer.train()
        curves.append(losses(trainer))
    assert curves[0] == curves[1]


def test_shapes_padded_to_a_multiple_change_nothing(tmp_path):
    curves = []
    for multiple in (None, 32):
        trainer = tiny_trainer(tmp_path, train_dataset=token_rows(8), pad_to_multiple_of=multiple)
        trainer.train()
        batch = next(iter(trainer.get_train_dataloader()))
        assert (
            multiple is None or batch["input_ids"].shape[1] % multiple == batch["edge_target"].shape[0] % multiple == 0
        )
        curves.append(losses(trainer))
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)


def test_a_mixture_of_experts_adds_its_balancing_loss_and_saves_its_configuration_as_it_was(tmp_path):
    def run(coefficient):
        model = tiny_model("qwen3_moe", vocab_size=VOCABULARY, output_router_logits=False)
        trainer = tiny_trainer(
            tmp_path, model, train_dataset=token_rows(4), max_steps=1, router_aux_loss_coef=coefficient
        )
        trainer.train()
        trainer.save_model(str(tmp_path / "moe"))
        return next(entry for entry in trainer.state.log_history if "loss" in entry)

    without, with_loss = run(0.0), run(0.5)
    assert "aux_loss" not in without
    assert with_loss["loss"] == pytest.approx(without["loss"] + 0.5 * with_loss["aux_loss"], rel=1e-5)
    assert json.loads((tmp_path / "moe" / "config.json").read_text())["output_router_logits"] is False
    with pytest.raises(ConfigError, match="no experts"):
        tiny_trainer(tmp_path, train_dataset=token_rows(2), router_aux_loss_coef=0.1)


def test_an_iterable_dataset_trains_and_needs_max_steps(tmp_path):
    def stream():
        yield from ({"text": "row number " + "x" * i} for i in range(1, 9))

    dataset = IterableDataset.from_generator(stream)
    with pytest.raises(ConfigError, match="max_steps"):
        tiny_trainer(tmp_path, tiny_model(vocab_size=400), train_dataset=dataset, max_steps=-1)
    trainer = tiny_trainer(
        tmp_path, tiny_model(vocab_size=400), train_dataset=dataset, max_steps=2, per_device_train_batch_size=2
    )
    trainer.train()
    assert len(losses(trainer)) == 2


def test_formatting_func_makes_the_text(tmp_path):
    rows = Dataset.from_list([{"question": "why", "answer": "because"}] * 4)
    trainer = tiny_trainer(
        tmp_path,
        tiny_model(vocab_size=400),
        train_dataset=rows,
        formatting_func=lambda row: f"{row['question']}? {row['answer']}",
    )
    assert trainer.processing_class.decode(trainer.train_dataset[0]["input_ids"]).startswith("why? because")


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ({"compute_loss_func": lambda a, b: a}, "compute_scored_loss"),
        ({"quantization_config": object()}, "not supported yet"),
        ({"data_collator": lambda rows: {"input_ids": torch.zeros(1, 2)}}, None),
    ],
)
def test_what_wants_logits_is_refused_with_the_reason(tmp_path, argument, says):
    def build():
        config = SFTConfig(output_dir=str(tmp_path), use_cpu=True, max_steps=1, disable_tqdm=True)
        tokenizer = tiny_trainer(tmp_path).processing_class
        return SFTTrainer(
            tiny_model(vocab_size=VOCABULARY),
            config,
            train_dataset=token_rows(2),
            processing_class=tokenizer,
            **argument,
        )

    if says is None:  # a collator shows what it makes only when it is called
        with pytest.raises(ConfigError, match="ForestBatch"):
            build().train()
    else:
        with pytest.raises(ConfigError, match=says):
            build()


def test_models_and_arguments_of_the_wrong_kind_are_named(tmp_path):
    with pytest.raises(ModelError, match="got int"):
        SFTTrainer(
            5,
            SFTConfig(output_dir=str(tmp_path), use_cpu=True),
            processing_class=tiny_trainer(tmp_path).processing_class,
        )
    with pytest.raises(ConfigError, match="must be a SFTConfig"):
        SFTTrainer(tiny_model(), {"max_steps": 3})
    with pytest.raises(ConfigError, match="Give it as processing_class"):
        SFTTrainer(tiny_model(), SFTConfig(output_dir=str(tmp_path), use_cpu=True))
    with pytest.raises(ConfigError, match="loaded already"):
        tiny_trainer(tmp_path, model_init_kwargs={"dtype": "bfloat16"})
    with pytest.raises(DatasetError, match="got list"):
        tiny_trainer(tmp_path, train_dataset=[{"text": "a"}])


def test_resuming_from_what_is_no_checkpoint_names_those_that_are(tmp_path):
    trainer = tiny_trainer(tmp_path, train_dataset=token_rows(4), save_strategy="steps", save_steps=1, max_steps=1)
    with pytest.raises(ConfigError, match="nothing to resume from"):
        trainer.train(resume_from_checkpoint=True)
    trainer.train()
    with pytest.raises(ConfigError, match="checkpoint-1"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-9"))


def test_a_checkpoint_that_was_cut_short_is_not_resumed_from(tmp_path):
    trainer = tiny_trainer(tmp_path, train_dataset=token_rows(8), save_strategy="steps", save_steps=1, max_steps=2)
    trainer.train()
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-2" / "trainer_state.json").unlink()
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")


def test_the_host_waits_for_the_device_once_a_step_and_when_something_is_logged(tmp_path, monkeypatch):
    waits = []
    for name in ("item", "tolist"):
        original = getattr(torch.Tensor, name)

        def counted(tensor, *args, _original=original, _name=name):
            if tensor.is_floating_point() and tensor.grad_fn is None:
                waits.append(_name)
            return _original(tensor, *args)

        monkeypatch.setattr(torch.Tensor, name, counted)
    trainer = tiny_trainer(
        tmp_path,
        train_dataset=token_rows(32),
        max_steps=8,
        logging_steps=4,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=1,
    )
    waits.clear()
    trainer.train()
    assert len(losses(trainer)) == 2
    # Each step, not each micro-batch: whether it is finite. Each log: transformers' loss and gradient norm, and all of our metrics at once. At the end:
    # transformers' mean loss.
    assert waits == [*["tolist"] * 4, "item", "item", "tolist"] * 2 + ["item"]
