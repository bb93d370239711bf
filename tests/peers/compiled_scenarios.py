"""What users run with `--torch_compile`, unmodified: no device and no backend is named anywhere.

Run as `python -m tests.peers.compiled_scenarios NAME`; prints one JSON line with the numbers of an eager and of a compiled run, and what
the ledger and the device counted in the second.
"""

from __future__ import annotations

import json
import sys
import tempfile

import torch
import transformers
from datasets import Dataset

from tests.peers.scenarios import ROW_TOKENS, byte_tokenizer, losses_of, real_texts, tiny_qwen3
from trellium.monitor import ledger


def settings(folder: str, *, compiled: bool) -> dict:
    return {
        "output_dir": folder, "max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "logging_steps": 1,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "torch_compile": compiled,
    }  # fmt: skip


def transformers_trainer(compiled: bool) -> list[float]:
    tokenizer = byte_tokenizer()
    rows = tokenizer(real_texts(16), truncation=True, max_length=ROW_TOKENS)["input_ids"]
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(**settings(folder, compiled=compiled))
        assert args.torch_compile_backend == ("neuron" if compiled else None)
        trainer = transformers.Trainer(
            model=tiny_qwen3(len(tokenizer)),
            args=args,
            train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
        )
        trainer.train()
    return losses_of(trainer)


def trl_sft(compiled: bool) -> list[float]:
    from trl import SFTConfig, SFTTrainer

    tokenizer = byte_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=tiny_qwen3(len(tokenizer)),
            args=SFTConfig(max_length=ROW_TOKENS, **settings(folder, compiled=compiled)),
            train_dataset=Dataset.from_dict({"text": real_texts(16)}),
            processing_class=tokenizer,
        )
        trainer.train()
    return losses_of(trainer)


def generate(compiled: bool) -> list[float]:
    """Greedy tokens from a static cache: transformers compiles the decoding step by itself for this device."""
    tokenizer = byte_tokenizer()
    model = tiny_qwen3(len(tokenizer)).to("neuron").eval()
    prompt = tokenizer("The quick brown fox", return_tensors="pt").to(model.device)
    config = transformers.CompileConfig(backend="neuron", mode="default", fullgraph=False)
    tokens = model.generate(
        **prompt,
        max_new_tokens=6,
        min_new_tokens=6,
        do_sample=False,
        cache_implementation="static",
        pad_token_id=0,
        **({"compile_config": config} if compiled else {"disable_compile": True}),
    )
    return tokens[0].tolist()


SCENARIOS = {function.__name__: function for function in (transformers_trainer, trl_sft, generate)}


if __name__ == "__main__":
    scenario = SCENARIOS[sys.argv[1]]
    eager = scenario(False)
    torch.neuron.reset_dynamo_metrics()
    ledger.start()
    start = ledger.mark()
    numbers = scenario(True)
    told = {"counted": torch.neuron.get_dynamo_metrics(), "ledger": ledger.summary(start)._asdict()}
    print(json.dumps({"eager": eager, "compiled": numbers, **told}))
