"""Which checkpoint a run goes on from: damaged ones are told and passed by, foreign ones refused, and all weights are taken up."""

from __future__ import annotations

import shutil

import pytest
import torch
from peft import LoraConfig

from tests.trainers.tiny_runs import VOCABULARY, losses, tiny_trainer, token_rows
from trellium.errors import ConfigError
from trellium.models.loading import load_model
from trellium.models.tiny import tiny_model
from trellium.trainers.checkpoints import last_checkpoint, resume_choice

LORA = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def trainer(folder, *, model=None, steps=4, **options):
    saves = {"save_strategy": "steps", "save_steps": 2}
    return tiny_trainer(folder, model, train_dataset=token_rows(16), max_steps=steps, **{**saves, **options})


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run = trainer(folder)
    run.train()
    return folder


@pytest.fixture
def run_folder(whole_run, tmp_path):
    """A copy of a run's folder, with the checkpoints of steps 2 and 4."""
    return shutil.copytree(whole_run, tmp_path / "run")


def cut(file, keep=0.5):
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * keep)])


def beside(folder, name):
    """Half of a file of weights that is kept in a folder of its own."""
    (folder / name).parent.mkdir()
    shutil.copy(folder / "model.safetensors", folder / name)
    cut(folder / name)


DAMAGES = {
    "no state": (lambda folder: (folder / "trainer_state.json").unlink(), "has no trainer_state.json"),
    "state cut": (lambda folder: cut(folder / "trainer_state.json"), "trainer_state.json that cannot be read"),
    "state of nothing": (lambda folder: (folder / "trainer_state.json").write_text("{}"), "without its step"),
    "weights cut": (lambda folder: cut(folder / "model.safetensors"), "model.safetensors is not a whole"),
    "weights' head cut": (lambda folder: cut(folder / "model.safetensors", 0.001), "model.safetensors is not a whole"),
    "weights empty": (
        lambda folder: (folder / "model.safetensors").write_bytes(b""),
        "model.safetensors is not a whole",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
    "optimizer cut": (lambda folder: cut(folder / "optimizer.pt"), "has a damaged optimizer.pt"),
    "no optimizer": (lambda folder: (folder / "optimizer.pt").unlink(), "has no optimizer.pt"),
    "no scheduler": (lambda folder: (folder / "scheduler.pt").unlink(), "has no scheduler.pt"),
    "moved reference cut": (
        lambda folder: beside(folder, "reference/weights.safetensors"),
        "has a damaged reference/weights.safetensors",
    ),
    "moving average cut": (
        lambda folder: beside(folder, "bema/average.safetensors"),
        "has a damaged bema/average.safetensors",
    ),
    "random state cut": (lambda folder: cut(folder / "rng_state.pth"), "has a damaged rng_state.pth"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_checkpoint_is_passed_by_and_refused_by_name(run_folder, caplog, case):
    spoil, says = DAMAGES[case]
    spoil(run_folder / "checkpoint-4")
    with pytest.raises(ConfigError, match=f"{says}.*whole is {run_folder}/checkpoint-2"):
        trainer(run_folder).train(resume_from_checkpoint=str(run_folder / "checkpoint-4"))
    assert last_checkpoint(run_folder) == str(run_folder / "checkpoint-2")
    assert says in caplog.text
    assert "It is passed by" in caplog.text


def test_the_last_is_the_last_whole_one_and_training_goes_on_from_there(run_folder, whole_run):
    cut(run_folder / "checkpoint-4" / "optimizer.pt")
    resumed = trainer(run_folder)
    resumed.train(resume_from_checkpoint=True)
    for one, other in zip(resumed.model.state_dict().values(), trained(whole_run).values(), strict=True):
        assert torch.equal(one, other)


def test_a_checkpoint_without_random_state_is_said_to_be_one(run_folder, caplog):
    (run_folder / "checkpoint-2" / "rng_state.pth").unlink()
    trainer(run_folder).train(resume_from_checkpoint=str(run_folder / "checkpoint-2"))
    assert "checkpoint-2 has no random state" in caplog.text


def trained(folder):
    from safetensors.torch import load_file

    model = tiny_model(vocab_size=VOCABULARY)
    model.load_state_dict(load_file(folder / "checkpoint-4" / "model.safetensors"), strict=False)
    model.tie_weights()
    return model.state_dict()


def test_where_no_checkpoint_is_whole_none_is_taken(run_folder):
    for step in (2, 4):
        cut(run_folder / f"checkpoint-{step}" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"none of checkpoint-4, checkpoint-2 .* is whole"):
        trainer(run_folder).train(resume_from_checkpoint=True)


def test_weights_alone_are_nothing_to_go_on_from(tmp_path):
    run = trainer(tmp_path, steps=2, save_only_model=True)
    run.train()
    assert run.resume_point is None
    with pytest.raises(ConfigError, match="save_only_model"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_checkpoint_of_another_kind_or_shape_is_refused(run_folder, tmp_path):
    adapted = trainer(tmp_path / "lora", steps=2, peft_config=LoraConfig(r=4, **LORA))
    adapted.train()
    full, lora = str(run_folder / "checkpoint-2"), str(tmp_path / "lora" / "checkpoint-2")
    cases = [
        (trainer(tmp_path / "a"), lora, "trained an adapter, and this one trains the whole model"),
        (trainer(tmp_path / "a", peft_config=LoraConfig(r=4, **LORA)), full, "trained the whole model, and this one"),
        (trainer(tmp_path / "a", peft_config=LoraConfig(r=2, **LORA)), lora, "is not of this model: .*lora_A.* is"),
        (trainer(tmp_path / "a", peft_config=LoraConfig(r=4, **LORA, use_dora=True)), lora, "it has nothing for"),
        (
            trainer(tmp_path / "a", model=tiny_model(vocab_size=VOCABULARY, hidden_size=64)),
            full,
            "is not of this model",
        ),
        (trainer(tmp_path / "a", model=tiny_model("gpt2", vocab_size=VOCABULARY)), full, "is not of this model"),
    ]
    for run, checkpoint, says in cases:
        with pytest.raises(ConfigError, match=says):
            run.train(resume_from_checkpoint=checkpoint)


@pytest.mark.parametrize(
    ("given", "means"),
    [
        ("last", True),
        ("true", True),
        (True, True),
        ("no", None),
        ("False", None),
        (False, None),
        (None, None),
        ("a/b", "a/b"),
    ],
)
def test_a_word_for_resuming_is_understood(given, means):
    assert resume_choice(given) is means or resume_choice(given) == means


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_a_resumed_mixture_of_experts_takes_up_its_experts(tmp_path, kind):
    """They are saved under other names than the model has them."""
    options = {"router_aux_loss_coef": 0.0}
    whole = trainer(tmp_path / "whole", model=tiny_model(kind, vocab_size=VOCABULARY), **options)
    whole.train()
    resumed = trainer(tmp_path / "again", model=tiny_model(kind, vocab_size=VOCABULARY, seed=5), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert losses(resumed) == losses(whole)
    for (name, one), other in zip(whole.model.state_dict().items(), resumed.model.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


def test_the_best_of_a_mixture_of_experts_has_its_own_experts(tmp_path):
    options = {"router_aux_loss_coef": 0.0, "eval_dataset": token_rows(4), "eval_strategy": "steps", "eval_steps": 2}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_num_tokens", "greater_is_better": True}
    run = trainer(tmp_path, model=tiny_model("qwen3_moe", vocab_size=VOCABULARY), **options, **best)
    run.train()  # the metric is the same at both steps, so the first stays the best
    assert run.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    saved = load_model(tmp_path / "checkpoint-2")
    for (name, one), other in zip(run.model.state_dict().items(), saved.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
