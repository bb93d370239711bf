"""Teach a LoRA adapter of the bundled model which of two answers to prefer.

Run it with `python examples/dpo.py`. The names are TRL's: a script of yours changes its import. On a machine with an emulated or a real `neuron` device it trains
there, else on what there is. The reference is the model without the adapter, so no second one is loaded.
"""

from pathlib import Path

from datasets import load_dataset
from peft import LoraConfig

from trellium import DPOConfig, DPOTrainer

rows = load_dataset("json", data_files=str(Path(__file__).with_name("preferences.jsonl")), split="train")

trainer = DPOTrainer(
    model="smollm2-135m-instruct",
    args=DPOConfig(
        output_dir="runs/dpo-script",
        beta=0.1,
        max_steps=8,
        per_device_train_batch_size=4,
        learning_rate=2e-4,
        logging_steps=1,
        save_strategy="no",
        bf16=False,
    ),
    train_dataset=rows,
    peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
trainer.save_model()
