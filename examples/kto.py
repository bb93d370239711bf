"""Teach a LoRA adapter of the bundled model from answers that are marked good or bad.

Run it with `python examples/kto.py`. The names are TRL's: a script of yours changes its import. On a machine with an emulated or a real `neuron` device it trains
there, else on what there is. Rows are shuffled here; the estimate of the divergence does not mind.
"""

from pathlib import Path

from datasets import load_dataset
from peft import LoraConfig

from trellium import KTOConfig, KTOTrainer

rows = load_dataset("json", data_files=str(Path(__file__).with_name("labelled.jsonl")), split="train")

trainer = KTOTrainer(
    model="smollm2-135m-instruct",
    args=KTOConfig(
        output_dir="runs/kto-script",
        beta=0.1,
        max_steps=8,
        per_device_train_batch_size=4,
        train_sampling_strategy="random",
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
