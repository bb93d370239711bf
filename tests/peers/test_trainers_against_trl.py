"""The same rows, seed and arguments train here as with TRL 1.16: twenty steps, every number that TRL logs under its own name.

What differs on purpose is at the end, each with the reason. Both sides get a padding token that is no end token: TRL's sequence classification takes the end
of a text for padding where they are one (`test_public_failures` shows that here it never matters).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import PreTrainedTokenizerBase

import trellium
from tests.tiny_tokenizer import CHATML_MARKED, tiny_tokenizer
from tests.trainers.preference_runs import model_for, preference_rows, sentence, unpaired_rows
from trellium.errors import ConfigError
from trellium.ops.preference_options import LOSS_TRAITS

pytestmark = pytest.mark.peers
trl = pytest.importorskip("trl", reason="install the bench extra")

STEPS = 20
ROWS = 42  # the last batch of an epoch has two
GIVEN = ("model", "peft_config", "ref_model", "eval_dataset", "compute_metrics")
NAMES = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward"}


def tokenizer() -> PreTrainedTokenizerBase:
    made = tiny_tokenizer(CHATML_MARKED)
    made.eos_token, made.pad_token = "<|im_end|>", "<|endoftext|>"
    return made


def trainer(library: Any, method: str, folder: Path, dataset: Dataset, **options: Any) -> Any:
    """One of ours or of TRL's; a reference for TRL's is made as the model is, since it would load one by the name of a model made in memory."""
    name = NAMES[method]
    given = {key: options.pop(key) for key in GIVEN if key in options}
    model = given.pop("model", None)
    model = model_for(method) if model is None else model
    if method in ("dpo", "kto") and library is trl and "peft_config" not in given:
        given.setdefault("ref_model", model_for(method))
    config = getattr(library, f"{name}Config")(
        **{
            "output_dir": str(folder),
            "use_cpu": True,
            "bf16": False,
            "disable_tqdm": True,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "learning_rate": 1e-3,
            "per_device_train_batch_size": 4,
            "gradient_checkpointing": False,
            "max_steps": STEPS,
            **options,
        }
    )
    return getattr(library, f"{name}Trainer")(
        model, args=config, train_dataset=dataset, processing_class=tokenizer(), **given
    )


def curve(trainer: Any) -> list[dict[str, float]]:
    """What was logged, step by step, without times."""
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def both(method: str, folder: Path, dataset: Dataset, **options: Any) -> list[list[dict[str, float]]]:
    """The curves of ours and of TRL's; an option that is a function makes the value anew for each."""
    return [
        curve(
            trainer(
                library,
                method,
                folder / library.__name__,
                dataset,
                **{name: value() if callable(value) else value for name, value in options.items()},
            )
        )
        for library in (trellium, trl)
    ]


def assert_equal_curves(
    ours: list[dict[str, float]], theirs: list[dict[str, float]], without: tuple[str, ...] = ()
) -> None:
    assert len(theirs) == len(ours)
    for step, (mine, their) in enumerate(zip(ours, theirs, strict=True)):
        assert {"loss", "entropy" if "entropy" in their else "mean_reward", "num_tokens"} <= set(their)
        for name, value in their.items():
            if name in without:
                continue
            # Sums of terms that cancel, such as a margin near 0, are as exact as their terms.
            assert mine[name] == pytest.approx(value, rel=1e-4, abs=2e-5), f"{name} of step {step}"


def lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


# ---- supervised fine-tuning


def text_rows(count: int = ROWS) -> Dataset:
    draw = random.Random(0)
    return Dataset.from_list([{"text": sentence(draw, 12)} for _ in range(count)])


def conversations() -> Dataset:
    draw = random.Random(0)
    roles = ("user", "assistant") * 2
    return Dataset.from_list(
        [
            {"messages": [{"role": role, "content": sentence(draw, 6)} for role in roles[: draw.choice((2, 4))]]}
            for _ in range(ROWS)
        ]
    )


def rows_of_distinct_lengths(count: int = 60) -> Dataset:
    """Where no two rows are alike in length, there is one way to pack the longest first."""
    draw = random.Random(0)
    lengths = draw.sample(range(3, 3 + count), count)
    return Dataset.from_list([{"input_ids": [draw.randrange(20, 380) for _ in range(length)]} for length in lengths])


def with_untrained_beginnings(rows: Dataset) -> Dataset:
    """Rows whose first token is no target, which no sequence before them can predict."""
    return rows.map(lambda row: {"labels": [-100, *row["input_ids"][1:]]})


SFT = {
    "text": (text_rows, {}),
    "cut text": (text_rows, {"max_length": 10}),
    "prompt and completion": (lambda: unpaired_rows(ROWS).remove_columns("label"), {}),
    "prompt and completion, both trained": (
        lambda: unpaired_rows(ROWS).remove_columns("label"),
        {"completion_only_loss": False},
    ),
    "conversations": (conversations, {}),
    "assistant only": (conversations, {"assistant_only_loss": True}),
    "packed bfd": (rows_of_distinct_lengths, {"packing": True, "max_length": 64}),
    "packed bfd_split": (
        rows_of_distinct_lengths,
        {"packing": True, "packing_strategy": "bfd_split", "max_length": 64},
    ),
    "packed wrapped": (
        lambda: with_untrained_beginnings(rows_of_distinct_lengths()),
        {"packing": True, "packing_strategy": "wrapped", "max_length": 64},
    ),
    "dft": (text_rows, {"loss_type": "dft"}),
    "LoRA": (text_rows, {"peft_config": lora}),
}


@pytest.mark.parametrize("case", SFT)
def test_supervised_fine_tuning_is_trls(tmp_path, case):
    rows, options = SFT[case]
    assert_equal_curves(*both("sft", tmp_path, rows(), **options))


# ---- preferences

SMOOTHING = {"exo_pair": 0.1, "robust": 0.1, "sigmoid": 0.0}
DPO = {
    **{loss: {"loss_type": [loss], "label_smoothing": SMOOTHING.get(loss, 0.0)} for loss in LOSS_TRAITS},
    "forward_kl": {"f_divergence_type": "forward_kl"},
    "js_divergence": {"f_divergence_type": "js_divergence"},
    "alpha_divergence": {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3},
    "ld_alpha": {"ld_alpha": 0.4},
    "use_weighting": {"use_weighting": True},
    "combined": {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    "LoRA": {"peft_config": lora},
    "precomputed": {"precompute_ref_log_probs": True},
    "another reference": {"ref_model": lambda: model_for("dpo", "qwen3")},
    "moving reference": {"sync_ref_model": True, "ref_model_sync_steps": 3, "ref_model_mixup_alpha": 0.5},
    "cut": {"max_length": 16},
}


def test_every_loss_is_among_the_cases():
    assert len(LOSS_TRAITS) == 15


@pytest.mark.parametrize("case", DPO)
def test_direct_preference_optimization_is_trls(tmp_path, case):
    assert_equal_curves(*both("dpo", tmp_path, preference_rows(ROWS), **DPO[case]))


# ---- judged completions

KTO = {
    "kto": {},
    "apo_zero_unpaired": {"loss_type": "apo_zero_unpaired"},
    "weights": {"desirable_weight": 1.2, "undesirable_weight": 0.7},
    "another beta": {"beta": 0.5},
    "LoRA": {"peft_config": lora},
    "precomputed": {"precompute_ref_log_probs": True},
    "cut": {"max_length": 16},
    "precomputed, cut": {"max_length": 16, "precompute_ref_log_probs": True, "precompute_ref_batch_size": 3},
    "apo_zero_unpaired, cut": {"max_length": 16, "loss_type": "apo_zero_unpaired"},
}


@pytest.mark.parametrize("case", KTO)
def test_kahneman_tversky_optimization_is_trls(tmp_path, case):
    # What is not estimated is not logged; TRL logs a 0.
    without = ("kl",) if KTO[case].get("loss_type") == "apo_zero_unpaired" else ()
    assert_equal_curves(*both("kto", tmp_path, unpaired_rows(ROWS), **KTO[case]), without)


def test_paired_rows_train_kto_as_trls(tmp_path):
    assert_equal_curves(*both("kto", tmp_path, preference_rows(ROWS // 2)))


# ---- rewards

REWARD = {
    "plain": (False, {}),
    "margins": (True, {}),
    "centred": (False, {"center_rewards_coefficient": 0.05}),
    "too long": (False, {"max_length": 18}),
}


@pytest.mark.parametrize("case", REWARD)
def test_reward_modelling_is_trls(tmp_path, case):
    margin, options = REWARD[case]
    assert_equal_curves(*both("reward", tmp_path, preference_rows(ROWS, margin=margin), **options))


# ---- predictions


class Seen:
    """A `compute_metrics` that keeps what it was given."""

    def __call__(self, prediction: Any, compute_result: bool = True) -> dict[str, float]:
        self.predictions, self.labels = prediction.predictions, prediction.label_ids
        return {"mine": 1.0}


@pytest.mark.parametrize(
    ("method", "rows"), [("sft", "text"), ("dpo", "pairs"), ("kto", "judged"), ("reward", "pairs")]
)
def test_metrics_of_the_user_s_read_what_trls_read(tmp_path, method, rows):
    made = {"text": lambda: text_rows(6), "pairs": lambda: preference_rows(6), "judged": lambda: unpaired_rows(6)}[rows]
    seen = {}
    for library in (trellium, trl):
        seen[library] = Seen()
        run = trainer(
            library,
            method,
            tmp_path / library.__name__,
            made(),
            eval_dataset=made(),
            compute_metrics=seen[library],
            per_device_eval_batch_size=3,
        )
        assert run.evaluate()["eval_mine"] == 1.0
    ours, theirs = seen[trellium], seen[trl]
    torch.testing.assert_close(torch.from_numpy(ours.predictions), torch.from_numpy(theirs.predictions))
    if method == "reward":
        assert ours.labels == theirs.labels == ()
    else:  # nothing predicts a row's first token, which TRL labels all the same
        assert (ours.labels[:, 1:] == theirs.labels[:, 1:]).all()


# ---- what differs on purpose


def losses(entries: list[dict[str, float]], name: str = "loss") -> list[float]:
    return [entry[name] for entry in entries]


@pytest.mark.parametrize("method", ["dpo", "kto", "reward"])
def test_accumulated_batches_of_unequal_size_count_by_their_rows_and_not_each_alike(tmp_path, method):
    """Six rows as a batch of four and one of two: TRL means each and then the two means, so the rows of the smaller weigh double."""
    rows = unpaired_rows(6, seed=2) if method == "kto" else preference_rows(6, seed=2)
    options = {"max_steps": 4, "train_sampling_strategy": "sequential"}
    options |= {"loss_type": "apo_zero_unpaired"} if method == "kto" else {}
    whole = both(method, tmp_path / "whole", rows, per_device_train_batch_size=6, **options)
    assert_equal_curves(*whole, () if method != "kto" else ("kl",))
    ours, theirs = both(method, tmp_path / "parts", rows, gradient_accumulation_steps=2, **options)
    assert losses(ours) == pytest.approx(losses(whole[0]), rel=1e-4)
    assert losses(theirs) != pytest.approx(losses(whole[1]), rel=1e-3)


def test_accumulated_tokens_count_alike_in_supervised_fine_tuning_as_with_trl(tmp_path):
    ours, theirs = both("sft", tmp_path, text_rows(), gradient_accumulation_steps=3)
    for name in ("loss", "grad_norm", "num_tokens"):
        assert losses(ours, name) == pytest.approx(losses(theirs, name), rel=1e-4)


def test_metrics_of_accumulated_batches_are_means_over_tokens_and_not_over_batches(tmp_path):
    """So that they do not depend on how a step's rows are divided; TRL means the means of its micro-batches."""
    parts = both("sft", tmp_path / "parts", text_rows(), gradient_accumulation_steps=2, max_steps=5)
    whole = both("sft", tmp_path / "whole", text_rows(), per_device_train_batch_size=8, max_steps=5)
    assert losses(whole[0], "entropy") == pytest.approx(losses(whole[1], "entropy"), rel=1e-4)
    assert losses(parts[0], "entropy") == pytest.approx(losses(whole[0], "entropy"), rel=1e-5)
    assert losses(parts[1], "entropy") != pytest.approx(losses(whole[1], "entropy"), rel=1e-5)


def test_a_held_out_loss_is_the_mean_over_the_set_whatever_the_size_of_its_batches(tmp_path):
    """TRL weighs the means of its batches by their rows, so that its held-out loss changes with the size of a batch of ragged rows."""
    found: dict[str, list[float]] = {}
    for library in (trellium, trl):
        for size in (2, 3):
            run = trainer(
                library,
                "sft",
                tmp_path,
                text_rows(4),
                eval_dataset=text_rows(10),
                per_device_eval_batch_size=size,
            )
            found.setdefault(library.__name__, []).append(run.evaluate()["eval_loss"])
    assert found["trellium"][0] == pytest.approx(found["trellium"][1], rel=1e-6)
    assert found["trl"][0] != pytest.approx(found["trl"][1], rel=1e-4)


def test_keep_end_cuts_the_prompt_of_a_pair_once_for_both_completions(tmp_path):
    """TRL cuts the two apart, so the shorter completion answers more of the prompt than the longer, and the two are no longer compared on one prompt."""
    same = {"truncation_mode": "keep_end"}
    assert_equal_curves(*both("dpo", tmp_path / "whole", preference_rows(ROWS), max_length=60, **same))
    of_one_length = preference_rows(ROWS).map(lambda row: {"rejected": " " + " ".join(reversed(row["chosen"].split()))})
    assert_equal_curves(*both("dpo", tmp_path / "alike", of_one_length, max_length=24, max_steps=5, **same))
    ours, theirs = both("dpo", tmp_path / "cut", preference_rows(ROWS), max_length=24, max_steps=5, **same)
    assert losses(ours, "logps/chosen") != pytest.approx(losses(theirs, "logps/chosen"), rel=1e-3)


@pytest.mark.parametrize("options", [{"per_device_train_batch_size": 1}, {"train_sampling_strategy": "random"}])
def test_kto_trains_batches_of_one_and_rows_in_any_order_which_trl_refuses(tmp_path, options):
    """A row has its mismatched completion whatever the batch it comes in; one that is alone has that of the next row, and with TRL it would have its own."""
    with pytest.raises(ValueError):
        trainer(trl, "kto", tmp_path, unpaired_rows(ROWS), **options)
    entries = curve(trainer(trellium, "kto", tmp_path, unpaired_rows(ROWS), **options))
    assert len(entries) == STEPS
    assert max(losses(entries, "kl")) > 0
    assert all(torch.isfinite(torch.tensor(losses(entries))))


def test_the_reference_is_the_model_that_is_given_and_not_what_its_path_holds(tmp_path):
    """A model may be changed after it was loaded: an adapter merged, an embedding resized. TRL loads the path again and compares with what it was before."""
    from transformers import AutoModelForCausalLM

    model_for("dpo").save_pretrained(tmp_path / "model")
    first = {}
    for library in (trellium, trl):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="float32")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        given = {} if library is trellium else {"ref_model": None}
        run = trainer(
            library, "dpo", tmp_path / library.__name__, preference_rows(8), model=model, max_steps=1, **given
        )
        first[library.__name__] = curve(run)[0]
    assert first["trellium"]["rewards/chosen"] == 0.0
    assert first["trellium"]["loss"] == pytest.approx(0.693147, rel=1e-5)
    assert abs(first["trl"]["rewards/chosen"]) > 0.01


def test_rows_are_packed_over_the_whole_set_and_not_within_each_thousand(tmp_path):
    """`best fit decreasing` wastes the less the more it chooses from; TRL's begins anew with each thousand rows."""
    draw = random.Random(0)
    rows = Dataset.from_list([{"input_ids": [20] * draw.randint(3, 60)} for _ in range(2100)])
    ours, theirs = (
        trainer(library, "sft", tmp_path, rows, packing=True, max_length=64).train_dataset
        for library in (trellium, trl)
    )
    tokens = sum(map(len, rows["input_ids"]))
    assert sum(map(len, ours["input_ids"])) == sum(map(len, theirs["input_ids"])) == tokens
    assert len(ours) < len(theirs)


def test_a_document_does_not_train_the_first_token_of_the_next_one_behind_it(tmp_path):
    """Wrapped documents see each other, as with TRL, but nothing in one foretells how another begins; TRL trains that token all the same."""
    options = {"packing": True, "packing_strategy": "wrapped", "max_length": 64, "max_steps": 3}
    plain = both("sft", tmp_path / "plain", rows_of_distinct_lengths(), **options)
    told = both("sft", tmp_path / "told", with_untrained_beginnings(rows_of_distinct_lengths()), **options)
    assert losses(plain[0]) == losses(told[0])
    assert losses(told[1]) == pytest.approx(losses(told[0]), rel=1e-4)
    assert losses(plain[1]) != pytest.approx(losses(told[1]), rel=1e-3)


def test_label_smoothing_that_a_loss_does_not_take_is_refused_and_not_passed_by(tmp_path):
    options = {"label_smoothing": 0.2, "max_steps": 1}
    smoothed, plain = (
        losses(curve(trainer(trl, "dpo", tmp_path, preference_rows(8), **{**options, **more})))
        for more in ({}, {"label_smoothing": 0.0})
    )
    assert smoothed == plain
    with pytest.raises(ConfigError, match="would do nothing"):
        trainer(trellium, "dpo", tmp_path, preference_rows(8), **options)
