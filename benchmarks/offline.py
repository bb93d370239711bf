"""Learning from data beside TRL 1.16: real tokens a second, peak memory and loss curves of SFT and DPO, on the CPU.

SmolLM2-135M-Instruct on the docstrings of this Python, ragged as they are, eight rows a batch: the same rows, seed and arguments for both libraries, each
run in a process of its own, one after the other and then the other way round. A *real* token is one of the data; padding is none, and a token that several
sequences share counts for each of them. Rates are of the steps after the first two. DPO prefers a function's own docstring over another function's, and
each row has two completions of one prompt.

    python benchmarks/offline.py [--steps 12] [--methods sft-lora sft-full dpo-lora dpo-full] [--rounds 1] [--json benchmarks/results/offline.json]

Needs the bench extra, 20 GiB of memory for TRL's runs, and some 40 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "offline.json"
METHODS = {"sft-lora": 20, "sft-full": 20, "dpo-lora": 6, "dpo-full": 6}
"""Steps of each. Of 20 batches one has a row of 1,000 tokens, so that the peaks are those of long rows."""
LIBRARIES = ("trl", "trellium")
WARM_UP = 2
ROWS = 8


def rows_of(method: str, count: int) -> Any:
    """The rows of a run, in one order for all."""
    from trellium.data.python_docs import python_docs

    docs = (
        python_docs("train", form="chat").shuffle(seed=0).select(range(count)).select_columns(["prompt", "completion"])
    )
    if method.startswith("sft"):
        return docs
    others = docs["completion"][1:] + docs["completion"][:1]
    return docs.rename_column("completion", "chosen").add_column("rejected", others)


class Clock:
    """Seconds of each optimizer step; made into a callback where transformers is loaded."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self._began = 0.0

    def callback(self) -> Any:
        """The callback that keeps it."""
        from transformers import TrainerCallback

        clock = self

        class Keep(TrainerCallback):
            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                clock._began = time.perf_counter()

            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                clock.steps.append(time.perf_counter() - clock._began)

        return Keep()


class Counting:
    """TRL's collator, counting what its batches hold."""

    def __init__(self, collator: Any) -> None:
        self._collator = collator
        self.forwarded = self.real = 0

    def __call__(self, rows: list) -> dict:
        batch = self._collator(rows)
        self.forwarded += batch["input_ids"].numel()
        self.real += int(batch["attention_mask"].sum())
        return batch


def train(library: str, method: str, steps: int, folder: str) -> dict:
    """One run, in this process."""
    import importlib

    from peft import LoraConfig

    from trellium.models.loading import load_model, load_tokenizer

    name, weights = method.upper().split("-")
    module = importlib.import_module("trl" if library == "trl" else "trellium")
    config, trainer_class = getattr(module, f"{name}Config"), getattr(module, f"{name}Trainer")
    rows = rows_of(method, steps * ROWS)
    clock = Clock()
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = trainer_class(
        load_model(),
        args=config(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=ROWS, learning_rate=1e-4 if weights == "LORA" else 1e-5,
            logging_steps=1, bf16=False, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=rows,
        processing_class=load_tokenizer(),
        peft_config=adapter if weights == "LORA" else None,
        callbacks=[clock.callback()],
    )  # fmt: skip
    if library == "trl":
        trainer.data_collator = counting = Counting(trainer.data_collator)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    tokens = [entry["num_tokens"] for entry in logged]
    return {
        "seconds_per_step": [round(seconds, 2) for seconds in clock.steps],
        "real_tokens_per_second": round((tokens[-1] - tokens[WARM_UP - 1]) / sum(clock.steps[WARM_UP:]), 1),
        "num_tokens": tokens[-1],
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "losses": [round(entry["loss"], 6) for entry in logged],
        "real_per_forwarded": round(
            counting.real / counting.forwarded if library == "trl" else logged[-1]["packing_ratio"], 3
        ),
    }


def measure(library: str, method: str, steps: int) -> dict:
    """One run in a process of its own."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, __file__, "--run", library, method, folder, f"--steps={steps}"]
        done = subprocess.run(run, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{library}, {method}: the run failed, see above")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Run all, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="optimizer steps of a run; 20 of SFT and 6 of DPO if not given")
    parser.add_argument(
        "--rounds", type=int, default=1, help="how often each pair of runs is repeated, in turn the other way round"
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        library, method, folder = options.run
        print(json.dumps(train(library, method, options.steps, folder)))
        return
    results: dict = {"host": {"python": platform.python_version(), "cores": os.cpu_count()}, "runs": {}}
    for method in options.methods:
        for turn in range(options.rounds):
            for library in LIBRARIES if turn % 2 == 0 else LIBRARIES[::-1]:
                run = measure(library, method, options.steps or METHODS[method])
                results["runs"].setdefault(f"{method}, {library}", []).append(run)
    results["ratios"] = {method: ratios(results["runs"], method) for method in options.methods}
    print_table(results)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(f"Written to {options.json}")


def ratios(runs: dict, method: str) -> dict:
    """Ours over theirs, the best run of each; and how far the curves are apart at most, relative to theirs."""
    theirs, ours = (runs[f"{method}, {library}"] for library in LIBRARIES)
    speed = [max(run["real_tokens_per_second"] for run in side) for side in (theirs, ours)]
    memory = [min(run["peak_gib"] for run in side) for side in (theirs, ours)]
    pairs = list(zip(theirs[0]["losses"], ours[0]["losses"], strict=True))
    return {
        "speed": round(speed[1] / speed[0], 2),
        "explained_by_layout": round(ours[0]["real_per_forwarded"] / theirs[0]["real_per_forwarded"], 2),
        "memory": round(memory[1] / memory[0], 3),
        "largest_loss_difference": max(abs(a - b) / abs(a) for a, b in pairs),
    }


def print_table(results: dict) -> None:
    """The figures of all runs, side by side."""
    print(f"{'run':<22} {'real tokens/s':>14} {'peak GiB':>9} {'real/fwd':>8} {'first loss':>11} {'last loss':>11}")
    for name, runs in results["runs"].items():
        for run in runs:
            print(
                f"{name:<22} {run['real_tokens_per_second']:>14.1f} {run['peak_gib']:>9.2f} {run['real_per_forwarded']:>8.2f} {run['losses'][0]:>11.5f} {run['losses'][-1]:>11.5f}"
            )
    for method, found in results["ratios"].items():
        print(
            f"{method}: {found['speed']:.2f} times TRL's real tokens a second ({found['explained_by_layout']:.2f} by layout), {found['memory']:.0%} of its peak memory, losses within "
            f"{found['largest_loss_difference']:.1e}"
        )


if __name__ == "__main__":
    main()
