"""Fine-tune a LoRA adapter of the bundled model on conversations written in this file.

Run it with `python examples/sft_lora.py`. The names are TRL's: a script of yours changes its import. On a machine with an emulated or a real `neuron` device it trains
there, else on what there is.
"""

from datasets import Dataset
from peft import LoraConfig

from trellium import SFTConfig, SFTTrainer

CAPITALS = {
    "France": "Paris",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Peru": "Lima",
    "Norway": "Oslo",
    "India": "New Delhi",
}

rows = Dataset.from_list(
    [
        {
            "prompt": [{"role": "user", "content": f"What is the capital of {country}?"}],
            "completion": [{"role": "assistant", "content": f"{city}, naturally."}],
        }
        for country, city in CAPITALS.items()
    ]
)

trainer = SFTTrainer(
    model="smollm2-135m-instruct",
    args=SFTConfig(
        output_dir="runs/sft-capitals",
        max_steps=10,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        bf16=False,
    ),
    train_dataset=rows,
    peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
trainer.save_model()
