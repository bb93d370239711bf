"""Training loops that nobody here wrote, as a user would write them: no device is named anywhere.

Run as `python -m tests.peers.scenarios NAME`; prints one JSON line with the device that was used and the loss of every step. Whether that
device is `neuron` or the CPU is decided by `TORCH_DEVICE_BACKEND_AUTOLOAD` alone, which is what the tests compare.
"""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
import textwrap

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed

STEPS = 6
ROW_TOKENS = 128


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate([*alphabet, "<eos>", "<pad>"])}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def real_texts(count: int) -> list[str]:
    """Docstrings of the standard library, long enough that every row is cut to `ROW_TOKENS`: one shape, so that bits can be compared."""
    texts = [
        inspect.getdoc(member) or ""
        for _, member in inspect.getmembers(textwrap) + inspect.getmembers(json) + inspect.getmembers(inspect)
    ]
    texts = sorted({text for text in texts if len(text) > ROW_TOKENS})
    return [texts[i % len(texts)] for i in range(count)]


def tiny_qwen3(vocab_size: int) -> Qwen3ForCausalLM:
    set_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def losses_of(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def trl_sft(*, bf16: bool = False, lora: bool = False, checkpointing: bool = False) -> tuple[str, list[float]]:
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    tokenizer = byte_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=2, learning_rate=1e-3, logging_steps=1, report_to="none",
            save_strategy="no", max_length=ROW_TOKENS, bf16=bf16, gradient_checkpointing=checkpointing, disable_tqdm=True,
            use_cpu=not torch.accelerator.is_available(),  # the default, False, wherever there is a device; the CPU wants it for bfloat16
        )  # fmt: skip
        trainer = SFTTrainer(
            model=tiny_qwen3(len(tokenizer)),
            args=args,
            train_dataset=Dataset.from_dict({"text": real_texts(16)}),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
            if lora
            else None,
        )
        trainer.train()
    return str(trainer.model.device), losses_of(trainer)


def transformers_trainer() -> tuple[str, list[float]]:
    from datasets import Dataset

    tokenizer = byte_tokenizer()
    rows = tokenizer(real_texts(16), truncation=True, max_length=ROW_TOKENS)["input_ids"]
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-3,
            logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model=tiny_qwen3(len(tokenizer)),
            args=args,
            train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
        )
        trainer.train()
    return str(trainer.model.device), losses_of(trainer)


def accelerate_loop() -> tuple[str, list[float]]:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    tokenizer = byte_tokenizer()
    rows = tokenizer(real_texts(16), truncation=True, max_length=ROW_TOKENS, return_tensors="pt")["input_ids"]
    accelerator = Accelerator()
    model = tiny_qwen3(len(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    set_seed(1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=2, shuffle=True))
    losses = []
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss).item())
    return str(accelerator.device), losses


SCENARIOS = {
    "trl_sft": trl_sft,
    "trl_sft_bf16": lambda: trl_sft(bf16=True),
    "trl_sft_lora_checkpointing": lambda: trl_sft(lora=True, checkpointing=True),
    "transformers_trainer": transformers_trainer,
    "accelerate_loop": accelerate_loop,
}


if __name__ == "__main__":
    used_device, step_losses = SCENARIOS[sys.argv[1]]()
    print(json.dumps({"device": used_device, "losses": step_losses}))
