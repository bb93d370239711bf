"""Train a reward model: the bundled language model with a LoRA adapter and a new layer that gives one number.

Run it with `python examples/reward.py`. The names are TRL's: a script of yours changes its import. On a machine with an emulated or a real `neuron` device it trains
there, else on what there is. `task_type="SEQ_CLS"` lets PEFT train and save the new layer beside the adapter.
"""

from pathlib import Path

from datasets import load_dataset
from peft import LoraConfig

from trellium import RewardConfig, RewardTrainer

rows = load_dataset("json", data_files=str(Path(__file__).with_name("preferences.jsonl")), split="train")

trainer = RewardTrainer(
    model="smollm2-135m-instruct",
    args=RewardConfig(
        output_dir="runs/reward-script",
        max_steps=8,
        per_device_train_batch_size=4,
        learning_rate=2e-4,
        logging_steps=1,
        save_strategy="no",
        bf16=False,
    ),
    train_dataset=rows,
    peft_config=LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="SEQ_CLS"),
)
trainer.train()
trainer.save_model()
