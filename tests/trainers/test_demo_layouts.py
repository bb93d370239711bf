"""The demo's data and model: packed and shared rows train to the losses of padded ones."""

from __future__ import annotations

import pytest
import torch

from tests.trainers.tiny_runs import losses

pytest.importorskip("gguf", reason="the bundled model is in the demo extra")

STEPS = 3


def run(folder, **options) -> list[float]:
    from peft import LoraConfig

    from trellium import SFTConfig, SFTTrainer
    from trellium.cli import demo
    from trellium.data.python_docs import python_docs
    from trellium.models.loading import load_model, load_tokenizer

    tokenizer = load_tokenizer()
    rows = {
        "train_dataset": demo.short_rows(python_docs("train"), tokenizer, STEPS * demo.BATCH_ROWS),
        "eval_dataset": demo.short_rows(python_docs("test"), tokenizer, demo.HELD_OUT_ROWS),
    }
    config = SFTConfig(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=demo.BATCH_ROWS,
        per_device_eval_batch_size=demo.BATCH_ROWS,
        learning_rate=demo.LEARNING_RATE,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    adapter = LoraConfig(r=demo.LORA_RANK, lora_alpha=2 * demo.LORA_RANK, target_modules="all-linear")
    trainer = SFTTrainer(load_model(), config, processing_class=tokenizer, peft_config=adapter, **rows)
    trainer.train()
    return [*losses(trainer), trainer.evaluate()["eval_loss"]]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "neuron"])
def test_the_demo_trains_to_the_same_losses_in_every_layout(tmp_path, device):
    if device == "neuron" and not hasattr(torch, "neuron"):
        pytest.skip("no emulated device here")
    padded, packed, shared = (
        run(tmp_path / layout, layout=layout, use_cpu=device == "cpu") for layout in ("padded", "packed", "shared")
    )
    assert packed == pytest.approx(padded, rel=1e-5)
    assert shared == pytest.approx(padded, rel=1e-5)
