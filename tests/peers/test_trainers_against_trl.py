"""The same rows, seed and arguments train here as with TRL 1.16: twenty steps, every number that TRL logs under its own name.

What differs on purpose is at the end, each with the reason. Both sides get a padding token that is no end token: TRL's sequence classification takes the end
of a text for padding where they are one (`test_public_failures` shows that here it never matters).
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig
from transformers import PreTrainedTokenizerBase

import trellium
from tests.tiny_tokenizer import CHATML_MARKED, tiny_tokenizer
from tests.trainers.preference_runs import model_for, preference_rows, sentence, unpaired_rows
from trellium.ops.preference_options import LOSS_TRAITS

pytestmark = pytest.mark.peers
trl = pytest.importorskip("trl", reason="install the bench extra")

STEPS = 20
ROWS = 42  # the last batch of an epoch has two
NAMES = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward"}
CLOCK = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos", "train_loss"}


def tokenizer() -> PreTrainedTokenizerBase:
    made = tiny_tokenizer(CHATML_MARKED)
    made.eos_token, made.pad_token = "<|im_end|>", "<|endoftext|>"
    return made


def trainer(library: Any, method: str, folder: Any, dataset: Dataset, **options: Any) -> Any:
    """One of ours or of TRL's; a reference for TRL's is made as the model is, since it would load one by the name of a model made in memory."""
    name = NAMES[method]
    given = {key: options.pop(key) for key in ("model", "peft_config", "ref_model", "eval_dataset") if key in options}
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


def both(method: str, folder: Any, dataset: Dataset, **options: Any) -> list[list[dict[str, float]]]:
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
    "cut": {"max_length": 16, "loss_type": "apo_zero_unpaired"},
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
