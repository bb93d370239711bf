"""`trellium demo`: a real model fine-tuned on an emulated core, saved, and checked by a program that has never heard of Trellium.

A LoRA adapter of SmolLM2-135M-Instruct learns to write docstrings, from those of this Python. The merged model is a plain Hugging Face checkpoint; a
second process, with nothing of ours imported and no device of ours loaded, reads it with transformers and computes the held-out loss from full
logits. Both numbers must agree. Under two minutes on two free cores; every time and rate is the host's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trellium.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from datasets import Dataset

    from trellium.trainers.sft import SFTTrainer

ROW_TOKENS = 128
"""Rows of at most so many tokens: all batches then have one shape on a device whose shapes are static."""

BATCH_ROWS = 4
HELD_OUT_ROWS = 12
LEARNING_RATE = 2e-3
LORA_RANK = 8
COMPLETION_TOKENS = 32
AGREEMENT = 1e-3
"""How far the two held-out losses may lie apart, relatively: merging an adapter rounds its product once more."""

_CHECK = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, rows = sys.argv[1], json.load(open(sys.argv[2]))
model = AutoModelForCausalLM.from_pretrained(folder).eval()
AutoTokenizer.from_pretrained(folder)
total, count = 0.0, 0
with torch.no_grad():
    for row in rows:
        logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1].float()
        target = torch.tensor(row["labels"][1:])
        total += torch.nn.functional.cross_entropy(logits, target, ignore_index=-100, reduction="sum").item()
        count += int((target != -100).sum())
ours = sorted(name for name in sys.modules if name.split(".")[0] == "trellium")
print(json.dumps({"loss": total / count, "tokens": count, "imported_of_ours": ours, "device": str(model.device)}))
"""
"""The second process: plain transformers, full logits, one row at a time."""


def register(subparsers: Any) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "demo",
        help="fine-tune a real model on an emulated core, and check the result",
        description=__doc__.split("\n\n")[1],
    )
    parser.add_argument(
        "--steps", type=int, default=10, help=f"optimizer steps of {BATCH_ROWS} rows (default: %(default)s)"
    )
    parser.add_argument(
        "--output_dir", "--output-dir", default="runs/demo", help="where the checkpoint is saved (default: %(default)s)"
    )
    parser.add_argument(
        "--device", help="neuron, cpu, cuda ... (default: neuron where it is, else what this machine has)"
    )
    parser.add_argument(
        "--torch_compile", "--torch-compile", nargs="?", const="true", default="false", choices=("true", "false"),
        help="train on graphs compiled ahead of time, the block of the model once (default: %(default)s: operator by operator)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the results as JSON, progress on standard error")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo; exit code 0 if the losses agree, else 1.

    Raises:
        TrelliumError: the device asked for, or the bundled model, is not there.
    """
    began = time.perf_counter()
    # Read when torch is loaded. Threads that wait for others by spinning take the cores from them on a machine that is not idle.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if args.steps < 1:
        raise ConfigError(f"--steps must be at least 1, got {args.steps}")
    say = _speaker(sys.stderr if args.json else sys.stdout)
    device, why = choose_device(args.device)
    say(f"Device: {why}")
    results = fine_tune(args.steps, args.output_dir, device, say, torch_compile=args.torch_compile == "true")
    results["total_seconds_host"] = round(time.perf_counter() - began, 1)
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        print_results(results)
    return 0 if results["agree"] else 1


def choose_device(wanted: str | None) -> tuple[str, str]:
    """The device to train on, and a sentence about it.

    Raises:
        ConfigError: the one asked for is not there; says why and how to get it.
    """
    import torch

    from trellium import neuron
    from trellium.cli.devices import device_sentence, refuse_a_missing_neuron

    if wanted != "cpu":
        refuse_a_missing_neuron("--device cpu")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    found = accelerator.type if accelerator is not None else "cpu"
    device = wanted or found
    if device not in (found, "cpu"):
        reason = neuron.unavailable_reason() if device == "neuron" else None
        raise ConfigError(f"--device {device} is not on this machine, which has {found}. {reason or ''}".strip())
    return device, device_sentence(device, asked=wanted is not None)


def fine_tune(
    steps: int, output_dir: str, device: str, say: Callable[[str], None], *, torch_compile: bool = False
) -> dict[str, Any]:
    """The whole demo; what it found."""
    from trellium.cli.interruption import stop_on_interrupt
    from trellium.monitor import ledger

    compiled_before = ledger.mark()
    with quiet_libraries():
        say("Model and data: SmolLM2-135M-Instruct, and the docstrings of this Python ...")
        trainer, held_out = build_trainer(steps, output_dir, device, say, torch_compile=torch_compile)
        say(f"Held-out loss before training ({len(held_out)} rows) ...")
        before = trainer.evaluate()["eval_loss"]
        asked = next((row for row in held_out if "function" in _asked(row)), held_out[0])
        sentence_before = complete(trainer, asked)
        say(
            f"Held-out loss {before:.4f}. Training a LoRA adapter of rank {LORA_RANK} for {steps} steps of {BATCH_ROWS} rows ..."
        )
        contract = _contract(device)
        if contract is not None:
            contract.reset()
        with stop_on_interrupt(trainer) as stop:
            trainer.train()
            stop.check(trainer)
        device_report = _device_report(contract)
        say("Held-out loss after training ...")
        after = trainer.evaluate()["eval_loss"]
        sentence_after = complete(trainer, asked)
        peaks = _peak_memory(device)
        folder = Path(output_dir) / "merged"
        say(f"Held-out loss {after:.4f}. Merging the adapter, saving to {folder} ...")
        save_merged(trainer, folder)
    say("Reading it back in another process, with plain transformers on the CPU and full logits ...")
    check = check_with_plain_transformers(folder, trainer.eval_dataset)
    speeds = [entry for entry in trainer.state.log_history if "tokens_per_second" in entry]
    return {
        "device": device,
        "steps": steps,
        "held_out_loss_before": round(before, 5),
        "held_out_loss_after": round(after, 5),
        "held_out_loss_plain_transformers": round(check["loss"], 5),
        "agree": abs(check["loss"] - after) <= AGREEMENT * after and not check["imported_of_ours"],
        "training_losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "compiled": ledger.metrics(compiled_before),
        "prompt": _asked(asked),
        "completion_before": sentence_before,
        "completion_after": sentence_after,
        "tokens_per_second_host": speeds[-1]["tokens_per_second"],
        "forwarded_tokens_per_second_host": speeds[-1]["forwarded_tokens_per_second"],
        "peak_memory_bytes": peaks,
        **device_report,
        "checkpoint": str(folder),
    }


def build_trainer(
    steps: int, output_dir: str, device: str, say: Callable[[str], None], *, torch_compile: bool = False
) -> tuple[SFTTrainer, Dataset]:
    """The trainer, and the raw held-out rows."""
    from peft import LoraConfig

    from trellium.data.python_docs import python_docs
    from trellium.models.loading import load_model, load_tokenizer
    from trellium.trainers.sft import SFTTrainer
    from trellium.trainers.sft_config import SFTConfig

    tokenizer = load_tokenizer()
    train = short_rows(python_docs("train"), tokenizer, steps * BATCH_ROWS)
    held_out = short_rows(python_docs("test"), tokenizer, HELD_OUT_ROWS)
    config = SFTConfig(
        output_dir=output_dir,
        max_steps=steps,
        per_device_train_batch_size=BATCH_ROWS,
        per_device_eval_batch_size=BATCH_ROWS,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="linear",
        warmup_steps=1,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=device == "cpu",
        dataloader_pin_memory=False,
        torch_compile=torch_compile,
        logging_steps=max(1, steps // 5),
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        load_model(),
        config,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        callbacks=[_progress(say)],
    )
    _remove_printer(trainer)
    return trainer, held_out


def short_rows(dataset: Dataset, tokenizer: Any, count: int) -> Dataset:
    """The first `count` rows, in an order drawn once, that fill at least half of `ROW_TOKENS` and no more than it."""
    chosen = []
    order = dataset.shuffle(seed=0)
    for index, row in enumerate(order):
        text = tokenizer.apply_chat_template(row["prompt"] + row["completion"], tokenize=False)
        if ROW_TOKENS // 2 <= len(tokenizer(text, add_special_tokens=False).input_ids) <= ROW_TOKENS:
            chosen.append(index)
            if len(chosen) == count:
                break
    return order.select(chosen)


def complete(trainer: SFTTrainer, row: dict) -> str:
    """What the model says to a row's prompt, greedily."""
    import torch

    tokenizer, model = trainer.processing_class, trainer.model
    inputs = tokenizer.apply_chat_template(
        row["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    inputs = inputs.to(model.device)
    model.eval()
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=COMPLETION_TOKENS, do_sample=False, use_cache=True)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :].cpu(), skip_special_tokens=True).strip()


def save_merged(trainer: SFTTrainer, folder: Path) -> None:
    """Write the model with its adapter merged in, and its tokenizer, as a plain checkpoint."""
    model = trainer.model.merge_and_unload().to("cpu")
    model.config.use_cache = True
    model.save_pretrained(folder)
    trainer.processing_class.save_pretrained(folder)


def check_with_plain_transformers(folder: Path, rows: Any) -> dict[str, Any]:
    """The held-out loss as another process computes it, without anything of ours.

    Raises:
        ModelError: it could not read the checkpoint; its last lines.
    """
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "rows.json"
        file.write_text(json.dumps([{"input_ids": row["input_ids"], "labels": row["labels"]} for row in rows]))
        environment = {
            **os.environ,
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        done = subprocess.run(
            [sys.executable, "-c", _CHECK, str(folder.absolute()), str(file)],
            env=environment,
            capture_output=True,
            text=True,
            cwd=scratch,
        )
    if done.returncode:
        raise ModelError("plain transformers could not read the saved checkpoint: " + done.stderr.strip()[-500:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def _contract(device: str) -> Any:
    from trellium import neuron

    return neuron if device == "neuron" and neuron.is_emulated() else None


def _device_report(contract: Any) -> dict[str, Any]:
    if contract is None:
        return {}
    report = contract.report()
    return {
        "operators_that_would_have_fallen_back": {operator.name: operator.host_calls for operator in report.host},
        "operators_of_data_dependent_size": {
            operator.name: operator.data_dependent_calls for operator in report.data_dependent
        },
        "programs_that_would_have_been_compiled": report.compilations,
        "operator_calls": report.calls,
        "estimate": report.source,
    }


def _peak_memory(device: str) -> dict[str, int]:
    from trellium.monitor.throughput import peak_memory_by_device, peak_memory_bytes

    return {"cpu": peak_memory_bytes("cpu")} if device == "cpu" else peak_memory_by_device()


def _progress(say: Callable[[str], None]) -> Any:
    from transformers import TrainerCallback

    class Progress(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                say(
                    f"  step {state.global_step}/{state.max_steps}  loss {logs['loss']:.3f}  "
                    f"{logs['forwarded_tokens_per_second']:.0f} tokens/s (host)"
                )

    return Progress()


def _remove_printer(trainer: SFTTrainer) -> None:
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Without the bars and warnings of transformers and datasets, which would hide the few lines that say something."""
    import datasets
    import transformers

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        transformers.logging.enable_progress_bar()
        datasets.enable_progress_bars()


def _speaker(stream: Any) -> Callable[[str], None]:
    began = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - began:5.1f} s] {text}", file=stream, flush=True)

    return say


def _asked(row: dict) -> str:
    return row["prompt"][-1]["content"]


def print_results(results: dict[str, Any]) -> None:
    """The results, for a reader."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table(title="What happened", show_header=False)
    table.add_row("held-out loss before", f"{results['held_out_loss_before']:.4f}")
    table.add_row("held-out loss after", f"{results['held_out_loss_after']:.4f}")
    table.add_row(
        "the same, by plain transformers on the CPU",
        f"{results['held_out_loss_plain_transformers']:.4f} ({'agrees' if results['agree'] else 'DOES NOT AGREE'})",
    )
    table.add_row(
        "tokens per second (host)",
        f"{results['tokens_per_second_host']:.0f} real, {results['forwarded_tokens_per_second_host']:.0f} with padding",
    )
    compiled = results["compiled"]
    if compiled["compile/graphs"]:
        table.add_row(
            "graphs compiled",
            f"{compiled['compile/graphs']:.0f} in {compiled['compile/seconds']:.1f} s (host): {compiled['compile/cold']:.0f} cold, "
            f"{compiled['compile/warm']:.0f} from the cache",
        )
    for name, peak in results["peak_memory_bytes"].items():
        table.add_row(f"peak memory of {name}", f"{peak / 2**30:.2f} GiB")
    if "operators_that_would_have_fallen_back" in results:
        fallbacks = results["operators_that_would_have_fallen_back"]
        listed = "\n".join(f"{name}: {calls} calls" for name, calls in fallbacks.items()) or "none"
        table.add_row("operators a chip would run on its host (estimate)", listed)
        table.add_row(
            "programs a chip would compile, eager (estimate)", f"{results['programs_that_would_have_been_compiled']}"
        )
    table.add_row("checkpoint", results["checkpoint"])
    table.add_row("total seconds (host)", f"{results['total_seconds_host']:.1f}")
    console.print(table)
    console.print(f"[bold]Asked:[/bold]  {escape(results['prompt'])}")
    console.print(f"[bold]Before:[/bold] {escape(results['completion_before'])}")
    console.print(f"[bold]After:[/bold]  {escape(results['completion_after'])}")
