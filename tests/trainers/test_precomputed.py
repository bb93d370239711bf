"""Reference scores of the whole dataset before the run: those of the run itself, made once and kept under everything that they depend on."""

from __future__ import annotations

import copy

import pytest
import torch
from datasets import Dataset, load_from_disk
from peft import LoraConfig, get_peft_model

from tests.trainers.preference_runs import logged, model_for, rows_for, trainer_for
from trellium.errors import ConfigError
from trellium.models.reference import ReferencePolicy

LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
METRICS = {
    "dpo": ("loss", "grad_norm", "rewards/chosen", "rewards/margins", "logps/chosen"),
    "kto": ("loss", "grad_norm", "rewards/margins", "kl", "logps/rejected"),
}


@pytest.fixture
def scored(monkeypatch):
    """How often a reference was asked since the test began."""
    calls = []
    asked = ReferencePolicy.logprob

    def counted(self, model, fields):
        calls.append(fields["input_ids"].shape)
        return asked(self, model, fields)

    monkeypatch.setattr(ReferencePolicy, "logprob", counted)
    return calls


@pytest.fixture
def files(tmp_path):
    """Rows that lie in a file, by method; what is made of them can be kept beside it."""

    def of(method, count=8, seed=0):
        folder = tmp_path / f"{method}{count}{seed}"
        if not folder.exists():
            rows_for(method, count, seed=seed).save_to_disk(folder)
        return load_from_disk(folder)

    return of


def run(method, folder, **options):
    trainer = trainer_for(method, folder, learning_rate=1e-2, max_steps=3, **options)
    trainer.train()
    return {name: logged(trainer, name) for name in METRICS[method]}, trainer


CASES = {
    "dpo": ("dpo", {}),
    "ld_alpha": ("dpo", {"ld_alpha": 0.3}),
    "length-normalised": ("dpo", {"loss_type": ["ipo"]}),
    "kto": ("kto", {}),
    "unpaired without an estimate": ("kto", {"loss_type": "apo_zero_unpaired"}),
    "kto, cut": ("kto", {"max_length": 16}),
    "kto, in any order": ("kto", {"train_sampling_strategy": "random"}),
    "kto, batches of one": ("kto", {"per_device_train_batch_size": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_scores_from_before_the_run_train_as_those_of_the_run(tmp_path, case):
    method, options = CASES[case]
    options = {"eval_dataset": {"one": rows_for(method, 4, seed=5)}, **options}
    there, trainer = run(method, tmp_path / "a", **options)
    before, other = run(method, tmp_path / "b", precompute_ref_log_probs=True, precompute_ref_batch_size=3, **options)
    assert other.reference is None  # its weights are not kept
    metrics = [name for name in METRICS[method] if there[name]]
    for name in metrics:
        assert before[name] == pytest.approx(there[name], rel=1e-4, abs=1e-5), name
    held_out, expected = other.evaluate(), trainer.evaluate()
    for name in {f"eval_one_{name}" for name in metrics} & set(expected):
        assert held_out[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name


def test_scores_are_the_references_whatever_the_batch_they_were_made_in(tmp_path):
    columns = [
        trainer_for("dpo", tmp_path, precompute_ref_log_probs=True, precompute_ref_batch_size=size).train_dataset
        for size in (1, 5, 16)
    ]
    for name in ("ref_chosen_logps", "ref_rejected_logps"):
        for other in columns[1:]:
            assert list(other[name]) == pytest.approx(list(columns[0][name]), rel=1e-5)


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_scores_are_made_once_and_anew_where_they_would_be_others(tmp_path, files, scored, method):
    def calls(model=None, **options):
        scored.clear()
        made = trainer_for(
            method,
            tmp_path / "run",
            model,
            precompute_ref_log_probs=True,
            **{"train_dataset": files(method), **options},
        )
        return len(scored), made.train_dataset

    name = "ref_chosen_logps" if method == "dpo" else "ref_logps"
    first, rows = calls()
    assert first == 2
    again, same = calls()
    assert again == 0
    assert same[name] == rows[name]
    assert calls(learning_rate=1.0, max_steps=9, per_device_eval_batch_size=3)[0] == 0

    changed = model_for(method)
    with torch.no_grad():
        changed.model.layers[1].mlp.up_proj.weight[3, 4] += 1.0
    count, other = calls(changed)
    assert count == 2
    assert other[name] != rows[name]
    assert calls(train_dataset=files(method, seed=1))[0] == 2
    one_changed = files(method).map(
        lambda row, index: {"prompt": row["prompt"] + "!" * (index == 5)}, with_indices=True
    )
    count, other = calls(train_dataset=one_changed)
    assert count == 2
    assert [a == b for a, b in zip(other[name], rows[name], strict=True)] == [index != 5 for index in range(8)]
    assert calls(max_length=14)[0] > 0
    assert calls()[0] == 0


def test_scores_depend_on_how_longer_completions_are_weighed(tmp_path, files, scored):
    options = {"train_dataset": files("dpo"), "precompute_ref_log_probs": True}
    columns = []
    for alpha in (None, 0.5, 0.2, 0.5):
        scored.clear()
        trainer = trainer_for("dpo", tmp_path, ld_alpha=alpha, **options)
        columns.append((len(scored), list(trainer.train_dataset["ref_chosen_logps"])))
    assert [count for count, _ in columns] == [2, 2, 2, 0]
    assert columns[0][1] != columns[1][1] != columns[2][1]
    assert columns[1][1] == columns[3][1]


def test_scores_of_another_adapter_or_reference_are_others(tmp_path, files, scored):
    options = {"train_dataset": files("dpo"), "precompute_ref_log_probs": True}
    adapted = get_peft_model(model_for("dpo"), LoraConfig(**LORA))
    moved = copy.deepcopy(adapted)
    with torch.no_grad():
        for name, parameter in moved.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.05)
    plain = trainer_for("dpo", tmp_path, **options).train_dataset["ref_chosen_logps"]
    fresh = trainer_for("dpo", tmp_path, adapted, **options).train_dataset["ref_chosen_logps"]
    pretrained = trainer_for("dpo", tmp_path, moved, **options).train_dataset["ref_chosen_logps"]
    given = trainer_for("dpo", tmp_path, ref_model=model_for("dpo", "qwen3"), **options)
    assert list(fresh) == pytest.approx(list(plain), rel=1e-5)
    assert list(pretrained) != pytest.approx(list(plain), rel=1e-3)
    assert list(given.train_dataset["ref_chosen_logps"]) != pytest.approx(list(plain), rel=1e-3)


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_a_run_asks_no_reference_once_the_dataset_is_scored(tmp_path, scored, method):
    trainer = trainer_for(method, tmp_path, precompute_ref_log_probs=True, eval_dataset=rows_for(method, 4))
    before = len(scored)
    trainer.train()
    trainer.evaluate()
    assert len(scored) == before == 5


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_rows_of_a_stream_are_scored_as_they_are_read(tmp_path, method):
    rows = rows_for(method, 12)
    options = {"precompute_ref_log_probs": True, "train_sampling_strategy": "sequential"}
    table, _ = run(method, tmp_path / "a", train_dataset=rows, **options)
    stream, _ = run(method, tmp_path / "b", train_dataset=rows.to_iterable_dataset(), **options)
    there, _ = run(method, tmp_path / "c", train_dataset=rows.to_iterable_dataset())
    for name in METRICS[method]:
        assert stream[name] == pytest.approx(table[name], rel=1e-4, abs=1e-5), name
        assert stream[name] == pytest.approx(there[name], rel=1e-4, abs=1e-5), name


def test_scores_that_rows_bring_are_taken(tmp_path, scored):
    scores = {"ref_chosen_logps": -3.0, "ref_rejected_logps": -4.0}
    rows = Dataset.from_list([{**row, **scores} for row in rows_for("dpo", 8)])
    trainer = trainer_for("dpo", tmp_path, train_dataset=rows, precompute_ref_log_probs=True, max_steps=1, beta=1.0)
    trainer.train()
    assert scored == []
    entry = trainer.state.log_history[0]
    assert entry["rewards/chosen"] == pytest.approx(entry["logps/chosen"] + 3.0, rel=1e-5)


@pytest.mark.parametrize("adapted", [False, True])
def test_a_new_held_out_set_is_scored_where_there_is_still_a_reference(tmp_path, adapted):
    trainer = trainer_for(
        "dpo", tmp_path, precompute_ref_log_probs=True, peft_config=LoraConfig(**LORA) if adapted else None
    )
    rows = rows_for("dpo", 4, seed=7)
    if not adapted:
        with pytest.raises(ConfigError, match="kept no reference to score new rows with"):
            trainer.evaluate(rows)
        return
    trainer.train()
    there = trainer_for("dpo", tmp_path, peft_config=LoraConfig(**LORA))
    there.train()
    assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(there.evaluate(rows)["eval_loss"], rel=1e-4)


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_a_resumed_run_takes_the_same_scores(tmp_path, files, scored, method):
    options = {"train_dataset": files(method, 12), "precompute_ref_log_probs": True, "max_steps": 4}
    whole = trainer_for(method, tmp_path / "whole", save_strategy="steps", save_steps=2, learning_rate=1e-2, **options)
    whole.train()
    scored.clear()
    resumed = trainer_for(method, tmp_path / "resumed", learning_rate=1e-2, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert scored == []
    assert logged(resumed) == logged(whole)
    assert logged(resumed, "rewards/margins") == logged(whole, "rewards/margins")
