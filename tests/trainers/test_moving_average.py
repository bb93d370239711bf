"""The moving average of the weights is its formula, with an adapter too, and goes on where a run is resumed."""

from __future__ import annotations

import logging

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

from tests.trainers.tiny_runs import VOCABULARY, tiny_trainer, token_rows
from trellium import BEMACallback
from trellium.errors import ConfigError
from trellium.models.tiny import tiny_model


class Weights:
    """Keeps the trained weights after every step."""

    def __new__(cls):
        from transformers import TrainerCallback

        class Keeping(TrainerCallback):
            def __init__(self):
                self.steps = {}

            def on_train_begin(self, args, state, control, model=None, **kwargs):
                self._keep(state, model)

            def on_step_end(self, args, state, control, model=None, **kwargs):
                self._keep(state, model)

            def _keep(self, state, model):
                named = model.named_parameters()
                self.steps[state.global_step] = {
                    name: weight.detach().double() for name, weight in named if weight.requires_grad
                }

        return Keeping()


def plain_bema(steps, *, freq, after=0, lag=10, least=0.0):
    """The formula, in float64, from the weights of each step."""
    start = ema = bema = steps[after]
    for step in range(after + freq, max(steps) + 1, freq):
        beta, alpha = max((lag + step) ** -0.5, least), (lag + step) ** -0.2
        ema = {name: (1 - beta) * ema[name] + beta * now for name, now in steps[step].items()}
        bema = {name: ema[name] + alpha * (now - start[name]) for name, now in steps[step].items()}
    return bema


def run(folder, callback, **options):
    seen = Weights()
    trainer = tiny_trainer(
        folder, train_dataset=token_rows(32), callbacks=[callback, seen], **{"max_steps": 7, **options}
    )
    trainer.train(resume_from_checkpoint=options.get("resume_from_checkpoint"))
    return trainer, seen.steps


@pytest.mark.parametrize("options", [{"freq": 2}, {"freq": 1, "after": 3}, {"freq": 3, "lag": 1, "least": 0.7}])
def test_the_saved_weights_are_the_formula_s(tmp_path, options):
    callback = BEMACallback(
        update_freq=options["freq"],
        update_after=options.get("after", 0),
        lag=options.get("lag", 10),
        min_ema_multiplier=options.get("least", 0.0),
    )
    trainer, steps = run(tmp_path, callback)
    expected = plain_bema(steps, **options)
    saved = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "bema").named_parameters())
    for name, weight in expected.items():
        torch.testing.assert_close(saved[name].double(), weight, rtol=1e-5, atol=1e-6)
    last = steps[7]
    for name, weight in trainer.model.named_parameters():  # those of the run stay as they are
        assert torch.equal(weight.detach().double(), last[name])


def test_of_an_adapter_the_adapter_is_averaged(tmp_path):
    adapter = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", exclude_modules=["lm_head"])
    _, steps = run(tmp_path, BEMACallback(update_freq=2), peft_config=adapter)
    expected = plain_bema(steps, freq=2)
    assert (tmp_path / "bema" / "adapter_model.safetensors").is_file()
    saved = dict(PeftModel.from_pretrained(tiny_model(vocab_size=VOCABULARY), tmp_path / "bema").named_parameters())
    assert expected
    for name, weight in expected.items():
        torch.testing.assert_close(saved[name].double(), weight, rtol=1e-5, atol=1e-6)


def test_a_resumed_run_goes_on_with_the_average(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 4, "lr_scheduler_type": "constant"}
    run(tmp_path / "whole", BEMACallback(update_freq=2), **saving)
    run(tmp_path / "cut", BEMACallback(update_freq=2), max_steps=4, **saving)
    run(
        tmp_path / "cut",
        BEMACallback(update_freq=2),
        resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-4"),
        **saving,
    )
    whole, resumed = (
        dict(AutoModelForCausalLM.from_pretrained(tmp_path / name / "bema").named_parameters())
        for name in ("whole", "cut")
    )
    for name, weight in whole.items():
        torch.testing.assert_close(resumed[name], weight, rtol=1e-6, atol=1e-7)


def test_a_run_that_ends_before_the_first_update_says_so(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="trellium"):
        _, steps = run(tmp_path, BEMACallback(), max_steps=2)
    assert "holds the weights that training began with" in caplog.text
    saved = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "bema").named_parameters())
    assert all(torch.equal(saved[name].double(), weight) for name, weight in steps[0].items())


@pytest.mark.parametrize("options", [{"update_freq": 0}, {"lag": 0}, {"update_after": -1}])
def test_numbers_that_cannot_be_are_named(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        BEMACallback(**options)


@pytest.mark.peers
def test_the_numbers_are_trls(tmp_path):
    trl = pytest.importorskip("trl", reason="install the bench extra")
    options = {"update_freq": 2, "update_after": 1, "lag": 5, "bias_power": 0.3}
    for name, callback in (("ours", BEMACallback(**options)), ("theirs", trl.BEMACallback(**options))):
        run(tmp_path / name, callback)
    ours, theirs = (
        dict(AutoModelForCausalLM.from_pretrained(tmp_path / name / "bema").named_parameters())
        for name in ("ours", "theirs")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
