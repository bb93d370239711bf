"""What padding to few shapes is worth on a device that compiles each one: the experiment of TRL's release notes, on the emulated device.

Twenty steps of supervised fine-tuning of a small Qwen3 on ragged rows, compiled, one row a batch: rows padded to multiples of 128 (TRL's
default on `neuron`), to the shapes planned for these rows (Trellium's), and as long as they are; each from an empty compile cache and again from a
filled one. Every run is a process of its own.
Published for TRL 1.16 and Qwen3-0.6B on a Trainium2: 130 s against 260 s. Ours are *host* seconds of Inductor's C++ code
generation, on a smaller model: only the ratios may be compared, and with care.

    python benchmarks/padding.py [--steps 20] [--layers 4] [--trl] [--json benchmarks/results/padding.json]

Takes 10 to 20 minutes, most of it in the run without padding; `--trl` runs TRL 1.16's trainer beside (the bench extra) and takes twice as long.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "padding.json"
PADDINGS = ("multiples of 128", "planned shapes", "no padding")
PUBLISHED = {
    "padded_seconds": 130,
    "unpadded_seconds": 260,
    "source": "TRL 1.16.0 release notes, Qwen3-0.6B, Trainium2",
}


def train(trainer_name: str, padding: str, steps: int, layers: int, folder: str) -> dict:
    """One run, in this process: seconds of `train()`, what the ledger recorded, losses."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, set_seed

    from trellium.data.python_docs import python_docs
    from trellium.models.loading import load_tokenizer
    from trellium.monitor import ledger  # before anything is compiled

    tokenizer = load_tokenizer(None)
    set_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    rows = python_docs("train", form="text").shuffle(seed=0).select(range(steps))
    if trainer_name == "trl":
        from trl import SFTConfig, SFTTrainer
    else:
        from trellium import SFTConfig, SFTTrainer
    args = SFTConfig(
        output_dir=folder, max_steps=steps, per_device_train_batch_size=1, max_length=512, learning_rate=1e-4, logging_steps=1,
        bf16=False, gradient_checkpointing=False, torch_compile=True, report_to="none", save_strategy="no", disable_tqdm=True,
        **padding_options(trainer_name, padding),
    )  # fmt: skip
    trainer = SFTTrainer(Qwen3ForCausalLM(config), args=args, train_dataset=rows, processing_class=tokenizer)
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    steady = [entry["steady_tokens_per_second"] for entry in logged if "steady_tokens_per_second" in entry]
    summary = ledger.summary()
    return {
        "device": str(torch.accelerator.current_accelerator()),
        "seconds": round(seconds, 1),
        "graphs": summary.graphs,
        "compile_seconds": round(summary.seconds, 1),
        "cold": summary.cold,
        "warm": summary.warm,
        "steady_tokens_per_second": round(sum(steady) / len(steady), 1) if steady else None,
        "losses": [round(entry["loss"], 4) for entry in logged],
    }


def padding_options(trainer_name: str, padding: str) -> dict:
    """The options of a run that differ."""
    lengths = {"pad_to_multiple_of": None} if padding == "no padding" else {}
    if trainer_name == "trl":
        return lengths
    return lengths | {"shapes": "auto" if padding == "planned shapes" else "multiple"}


def measure(trainer_name: str, padding: str, options: argparse.Namespace, cache: str) -> dict:
    """One run in a process of its own."""
    environment = os.environ | {
        "TORCH_NEURONX_NEFF_CACHE_DIR": cache,
        "HF_HUB_OFFLINE": "1",
        "TRELLIUM_NEURON_RECOMPILE_LIMIT": "256",
    }
    with tempfile.TemporaryDirectory() as folder:
        run = [
            sys.executable,
            __file__,
            "--run",
            trainer_name,
            padding,
            folder,
            f"--steps={options.steps}",
            f"--layers={options.layers}",
        ]
        done = subprocess.run(run, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{trainer_name}, {padding}: the run failed, see above")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Run all, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--trl", action="store_true", help="run TRL 1.16 beside")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        trainer_name, padding, folder = options.run
        print(json.dumps(train(trainer_name, padding, options.steps, options.layers, folder)))
        return
    results: dict = {
        "host": {"python": platform.python_version(), "cores": os.cpu_count()},
        "published": PUBLISHED,
        "runs": {},
    }
    for trainer_name in ("trellium", "trl") if options.trl else ("trellium",):
        for padding in PADDINGS if trainer_name == "trellium" else (PADDINGS[0], PADDINGS[-1]):
            with tempfile.TemporaryDirectory() as cache:
                for state in ("cold", "warm"):
                    results["runs"][f"{trainer_name}, {padding}, {state}"] = measure(
                        trainer_name, padding, options, cache
                    )
    print_table(results)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(f"Written to {options.json}")


def print_table(results: dict) -> None:
    """The runs, and the ratios that matter."""
    from rich.console import Console
    from rich.table import Table

    table = Table("run", "host seconds", "graphs", "compile seconds", "cold / warm", "steady tokens/s (host)")
    for name, run in results["runs"].items():
        table.add_row(
            name, str(run["seconds"]), str(run["graphs"]), str(run["compile_seconds"]), f"{run['cold']} / {run['warm']}",
            str(run["steady_tokens_per_second"] or "-"),
        )  # fmt: skip
    Console().print(table)
    for trainer_name in ("trellium", "trl"):
        runs = {
            name.removeprefix(f"{trainer_name}, "): run
            for name, run in results["runs"].items()
            if name.startswith(trainer_name)
        }
        if runs:
            cold, warm = runs[f"{PADDINGS[0]}, cold"], runs[f"{PADDINGS[0]}, warm"]
            ratio = runs[f"{PADDINGS[-1]}, cold"]["seconds"] / cold["seconds"]
            print(
                f"{trainer_name}: no padding takes {ratio:.2f} times the seconds of multiples of 128 (published: 2.00 on a chip);"
            )
            print(
                f"  compile seconds cold : warm, padded, {cold['compile_seconds'] / max(warm['compile_seconds'], 0.1):.1f} : 1"
            )


if __name__ == "__main__":
    main()
