"""What the policy is compared with: the model at the moment training starts, whatever it came from, and nothing that training does moves it unless asked."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, TrainerCallback

from tests.trainers.preference_runs import VOCABULARY, logged, model_for, rows_for, trainer_for
from trellium.errors import ConfigError
from trellium.models.tiny import tiny_model
from trellium.trainers.arguments import forest_fields

LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
METHODS = ("dpo", "kto")


def randomized(model, seed=3, scale=0.1):
    """The model with what is to be trained changed in memory, as somebody does who merges, averages or continues."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * scale)
    return model


def start(kind, folder):
    """A model to train, and the trainer's arguments."""
    if kind == "changed after loading":
        model_for("dpo").save_pretrained(folder / "saved")
        return randomized(AutoModelForCausalLM.from_pretrained(folder / "saved", dtype="float32"))
    if kind == "adapter of an earlier run":
        return randomized(get_peft_model(model_for("dpo"), LoraConfig(**LORA)))
    return model_for("dpo")


STARTS = ("full", "changed after loading", "new adapter", "adapter of an earlier run")


@torch.no_grad()
def plain_logprobs(model, rows, completion):
    """`[rows]`, from the full logits of each row alone."""
    model.eval()
    found = []
    for row in rows:
        ids = torch.tensor([[*row["prompt_ids"], *row[completion]]])
        logprob = torch.log_softmax(model(input_ids=ids).logits[0, :-1].float(), -1)
        each = logprob.gather(1, ids[0, 1:, None])[:, 0]
        found.append(each[len(row["prompt_ids"]) - 1 :].sum())
    return torch.stack(found)


def batch_of(trainer):
    return next(iter(trainer.get_eval_dataloader()))


def reference_scores(trainer):
    return trainer.reference.logprob(trainer.model, forest_fields(batch_of(trainer)))


@pytest.mark.parametrize("kind", STARTS)
def test_rewards_are_measured_from_the_model_that_training_began_with(tmp_path, kind):
    model = start(kind, tmp_path)
    before = copy.deepcopy(model)
    trainer = trainer_for(
        "dpo",
        tmp_path,
        model,
        eval_dataset=rows_for("dpo", 5, seed=4),
        peft_config=LoraConfig(**LORA) if kind == "new adapter" else None,
        learning_rate=1e-2,
        beta=0.3,
    )
    trainer.train()
    assert logged(trainer, "rewards/chosen")[0] == 0.0
    held_out = trainer.evaluate()
    for kind_of, name in (("chosen", "eval_rewards/chosen"), ("rejected", "eval_rewards/rejected")):
        moved = plain_logprobs(trainer.model, trainer.eval_dataset, f"{kind_of}_ids") - plain_logprobs(
            before, trainer.eval_dataset, f"{kind_of}_ids"
        )
        assert moved.abs().mean() > 0.05
        assert held_out[name] == pytest.approx(0.3 * float(moved.mean()), rel=1e-3)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", STARTS)
def test_training_does_not_change_the_reference(tmp_path, method, kind):
    trainer = trainer_for(
        method,
        tmp_path,
        start(kind, tmp_path),
        eval_dataset=rows_for(method, 4),
        peft_config=LoraConfig(**LORA) if kind == "new adapter" else None,
        learning_rate=1e-2,
    )
    before, weights = reference_scores(trainer), trainer.reference.fingerprint()
    trainer.train()
    torch.testing.assert_close(reference_scores(trainer), before, rtol=0, atol=0)
    assert trainer.reference.fingerprint() == weights
    with torch.no_grad():
        policy = trainer.model(**forest_fields(batch_of(trainer)), score_outputs=("logprob",)).logprob
    assert not torch.allclose(policy, before, atol=1e-2)


@pytest.mark.parametrize("where", ["model", "adapter", "given reference"])
def test_the_reference_has_no_dropout_where_the_policy_has(tmp_path, where):
    rate = {"resid_pdrop": 0.5, "embd_pdrop": 0.5}
    model = tiny_model("gpt2", vocab_size=VOCABULARY, **(rate if where != "adapter" else {}))
    peft_config = None
    if where == "adapter":  # with weights, so that what is dropped matters
        model = randomized(get_peft_model(model, LoraConfig(**LORA, lora_dropout=0.5)))
    given = tiny_model("gpt2", vocab_size=VOCABULARY, **rate).train() if where == "given reference" else None
    trainer = trainer_for(
        "dpo",
        tmp_path,
        model,
        ref_model=given,
        eval_dataset=rows_for("dpo", 4),
        disable_dropout=False,
        peft_config=peft_config,
    )
    fields = forest_fields(batch_of(trainer))
    trainer.model.train()
    scores = reference_scores(trainer)
    torch.testing.assert_close(reference_scores(trainer), scores, rtol=0, atol=0)
    assert trainer.model.training
    with torch.no_grad():
        dropped = trainer.model(**fields, score_outputs=("logprob",)).logprob
        whole = trainer.model.eval()(**fields, score_outputs=("logprob",)).logprob
    torch.testing.assert_close(scores, whole)
    assert not torch.allclose(dropped, whole, atol=0.05)


def test_without_dropout_policy_and_reference_begin_alike(tmp_path):
    model = tiny_model("gpt2", vocab_size=VOCABULARY, resid_pdrop=0.5, embd_pdrop=0.5)
    trainer = trainer_for("dpo", tmp_path, model, peft_config=LoraConfig(**LORA, lora_dropout=0.5), max_steps=1)
    trainer.train()
    assert logged(trainer, "rewards/chosen") == [0.0]
    assert logged(trainer, "rewards/margins") == [0.0]


class _Average(TrainerCallback):
    """Keeps by hand what the reference should be: TRL's `(1 - share) · reference + share · policy`."""

    def __init__(self, share, every):
        self.share, self.every, self.weights = share, every, None

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.weights = {name: value.detach().clone() for name, value in model.named_parameters()}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.every == 0:
            for name, value in model.named_parameters():
                self.weights[name].mul_(1 - self.share).add_(value.detach(), alpha=self.share)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["full", "new adapter", "given"])
def test_a_moving_reference_is_an_average_of_policies(tmp_path, method, kind):
    average = _Average(0.3, 2)
    trainer = trainer_for(
        method,
        tmp_path,
        eval_dataset=rows_for(method, 4),
        ref_model=model_for("dpo") if kind == "given" else None,
        peft_config=LoraConfig(**LORA) if kind == "new adapter" else None,
        callbacks=[average],
        learning_rate=1e-2,
        max_steps=5,
        sync_ref_model=True,
        ref_model_sync_steps=2,
        ref_model_mixup_alpha=0.3,
    )
    before = reference_scores(trainer)
    trainer.train()
    moved = reference_scores(trainer)
    assert not torch.allclose(moved, before, atol=1e-3)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            parameter.copy_(average.weights[name])
        expected = trainer.model.eval()(**forest_fields(batch_of(trainer)), score_outputs=("logprob",)).logprob
    torch.testing.assert_close(moved, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_a_reference_given_by_name_or_as_a_model_is_that_model(tmp_path, method):
    other = tiny_model("qwen3", vocab_size=VOCABULARY, seed=5)
    other.save_pretrained(tmp_path / "other")
    curves = []
    for given in (copy.deepcopy(other), str(tmp_path / "other"), None):
        trainer = trainer_for(method, tmp_path, ref_model=given)
        trainer.train()
        curves.append([logged(trainer), logged(trainer, "rewards/chosen")])
    assert curves[0] == curves[1]
    assert curves[0] != curves[2]


def test_a_given_reference_is_left_as_it_came(tmp_path):
    given = model_for("dpo")
    before = {name: value.clone() for name, value in given.state_dict().items()}
    trainer_for("dpo", tmp_path, ref_model=given, learning_rate=1e-2).train()
    assert all(torch.equal(value, before[name]) for name, value in given.state_dict().items())
    assert all(parameter.grad is None for parameter in given.parameters())


@pytest.mark.parametrize("method", METHODS)
def test_the_model_itself_is_no_reference(tmp_path, method):
    model = model_for(method)
    with pytest.raises(ConfigError, match="ref_model is the model itself"):
        trainer_for(method, tmp_path, model, ref_model=model)


@pytest.mark.parametrize("kind", ["full", "new adapter", "moving", "given and moving"])
def test_a_resumed_run_compares_with_what_the_whole_run_did(tmp_path, kind):
    """The reference is what the run began with, or where it has been moved to since, and not the checkpoint's policy."""

    def run(name, **options):
        moving = {"sync_ref_model": True, "ref_model_sync_steps": 1} if "moving" in kind else {}
        return trainer_for(
            "dpo",
            tmp_path / name,
            ref_model=model_for("dpo") if kind == "given and moving" else None,
            peft_config=LoraConfig(**LORA) if kind == "new adapter" else None,
            learning_rate=1e-2,
            max_steps=4,
            **moving,
            **options,
        )

    whole = run("whole", save_strategy="steps", save_steps=2)
    whole.train()
    resumed = run("resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for name in ("loss", "rewards/chosen", "rewards/margins"):
        assert logged(resumed, name) == logged(whole, name)
