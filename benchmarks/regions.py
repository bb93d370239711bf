"""Compile the whole model, or its repeated block once: what each costs to compile and to run, by depth.

Forward and backward of a Qwen3 of 256 on one shape of 2 x 256 tokens, compiled for `neuron` from an empty cache: as one graph, and block by
block (`trellium.models.blocks`), beside eager. Every variant is a process of its own; the steps are timed after the graphs stand.
Seconds are the host's. What to read off: how compile seconds grow with depth, and what the block's smaller graph costs in each step.

    python benchmarks/regions.py [--layers 2 8 24] [--steps 8] [--json benchmarks/results/regions.json]

Takes about 10 minutes on two cores, most of it the deepest whole model.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "regions.json"
VARIANTS = ("eager", "model", "blocks")
ROWS, LENGTH, VOCABULARY = 2, 256, 4096


def step_of(variant: str, layers: int):  # type: ignore[no-untyped-def]
    """A function that runs one step and returns its loss."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, set_seed

    from trellium.models.blocks import compile_blocks
    from trellium.models.scoring import install_scores

    set_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=LENGTH,
    )  # fmt: skip
    model = install_scores(Qwen3ForCausalLM(config)).to("neuron")
    if variant == "blocks":
        compile_blocks(model, backend="neuron")
    called = torch.compile(model, backend="neuron") if variant == "model" else model
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH), device="neuron")
    edges = torch.arange(ROWS * LENGTH - 1, device="neuron")
    batch = {
        "input_ids": tokens,
        "subtree_end": torch.full_like(tokens, LENGTH),
        "edge_position": edges,
        "edge_target": tokens.flatten()[1:],
    }

    def step() -> float:
        loss = -called(**batch).logprob.mean()
        loss.backward()
        model.zero_grad()
        return loss.item()

    return step


def run(variant: str, layers: int, steps: int) -> dict:
    """One variant, in this process."""
    from trellium.monitor import ledger

    step = step_of(variant, layers)
    began = time.perf_counter()
    loss = step()
    first = time.perf_counter() - began
    step()
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    summary = ledger.summary()
    return {
        "first_step_seconds": round(first, 2),
        "compile_seconds": round(summary.seconds, 2),
        "graphs": summary.graphs,
        "step_ms": round(statistics.median(seconds) * 1e3, 1),
        "best_step_ms": round(min(seconds) * 1e3, 1),
        "loss": round(loss, 5),
    }


def measure(variant: str, layers: int, steps: int) -> dict:
    """One variant in a process of its own, with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, __file__, "--run", variant, "--layers", str(layers), "--steps", str(steps)]
        environment = os.environ | {
            "TORCH_NEURONX_NEFF_CACHE_DIR": cache,
            "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
        }
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{variant}, {layers} layers: the run failed, see above")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Run all, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 24])
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each (default: %(default)s)")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--run", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(run(options.run, options.layers[0], options.steps)))
        return
    runs = {
        f"{layers} layers, {variant}": measure(variant, layers, options.steps)
        for layers in options.layers
        for variant in VARIANTS
    }
    print_table(runs)
    host = {"python": platform.python_version(), "cores": os.cpu_count()}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"host": host, "runs": runs}, indent=2) + "\n")
    print(f"Written to {options.json}")


def print_table(runs: dict) -> None:
    """The runs, one a line."""
    from rich.console import Console
    from rich.table import Table

    table = Table("run", "graphs", "compile seconds (host)", "first step s (host)", "step ms (host)", "loss")
    for name, one in runs.items():
        table.add_row(
            name, str(one["graphs"]), str(one["compile_seconds"]), str(one["first_step_seconds"]), str(one["step_ms"]), str(one["loss"])
        )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
