"""What a shared prefix is worth: forward and backward of one group of sequences, as rows of their own, packed, and as a forest.

A small Qwen3 of random weights on groups of sequences that begin with one prompt: some thousand tokens, with as many equally long completions as give the
packing ratio asked for (tokens of the sequences ÷ tokens of the forest). The sequences of a group are equally long, so rows of their own have no padding and
its absence is no gain here: `separate rows` is what a trainer without shared prefixes does at its best, one row a sequence, with PyTorch's causal attention.
All forms have the same trained edges and give the same loss. Times are taken in turns within one process, the best of several; on a machine that is not idle
read the column of CPU seconds.

    python benchmarks/tree.py [--repeats 3] [--compiled] [--json benchmarks/results/tree.json]

Takes about ten minutes on two cores; `--compiled` adds the forest as graphs of the `neuron` device, block by block, and some minutes of compiling.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "tree.json"
FORMS = ("separate rows", "separate packed", "forest")
VOCABULARY = 512
"""Small, because the head is the same work in every form and would hide the trees."""


@dataclass(frozen=True)
class Group:
    """A prompt of `prompt` tokens with `completions` completions of `length` each."""

    prompt: int
    completions: int
    length: int

    @property
    def ratio(self) -> float:
        """Tokens of the sequences ÷ tokens of the forest."""
        return self.completions * (self.prompt + self.length) / (self.prompt + self.completions * self.length)


GROUPS = {
    "1": Group(0, 4, 1024),
    "2.29": Group(2048, 4, 680),
    "3.37": Group(2048, 6, 379),
    "8": Group(3072, 16, 219),
}


def model_of(device: str) -> Any:
    """The model, ready to score and to read trees."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from trellium.models.scoring import install_scores

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    return install_scores(Qwen3ForCausalLM(config)).to(device)


def batch_of(group: Group, form: str) -> dict:
    """The group's sequences in one form; completions are trained."""
    import numpy as np

    from trellium.data.samples import after_prompt
    from trellium.forest.layout import chains, trees

    draw = np.random.default_rng(0)
    prompt = draw.integers(2, VOCABULARY, group.prompt)
    sequences = [after_prompt(prompt, draw.integers(2, VOCABULARY, group.length)) for _ in range(group.completions)]
    if form == "separate rows":
        return chains(sequences).tensors()
    apart = range(len(sequences)) if form == "separate packed" else None
    return trees(sequences, [0] * len(sequences), groups=apart).tensors()


def step(model: Any, batch: dict) -> float:
    """A forward and a backward; the loss."""
    loss = model(**batch, score_outputs=("logprob",), fused_loss="nll").loss_sum / batch["edge_weight"].sum()
    loss.backward()
    for parameter in model.parameters():
        parameter.grad = None
    return float(loss.detach())


def measure(name: str, repeats: int, compiled: bool) -> dict:
    """All forms of one group, in turns."""
    import torch

    from trellium.models.attention import let_read_forests
    from trellium.models.blocks import compile_blocks

    group = GROUPS[name]
    separate, reading = model_of("cpu"), model_of("cpu")
    let_read_forests(reading)
    runs = {form: (separate if form == "separate rows" else reading, batch_of(group, form)) for form in FORMS}
    if compiled:
        model = model_of("neuron")
        let_read_forests(model)
        compile_blocks(model, backend="neuron", mode=None, dynamic=False)
        runs["forest, compiled"] = (
            model,
            {key: value.to("neuron") for key, value in batch_of(group, "forest").items()},
        )
        step(*runs["forest, compiled"])
    seconds: dict[str, list] = {form: [] for form in runs}
    losses = {}
    for _ in range(repeats + 1):  # the first of each warms up
        for form, (model, batch) in runs.items():
            wall, cpu = time.perf_counter(), time.process_time()
            losses[form] = step(model, batch)
            seconds[form].append((time.perf_counter() - wall, time.process_time() - cpu))
    best = {form: [min(column) for column in zip(*times[1:], strict=True)] for form, times in seconds.items()}
    plain = best["separate rows"]
    return {
        "ratio": round(group.ratio, 3),
        "tokens": {form: batch["input_ids"].numel() for form, (_, batch) in runs.items()},
        "threads": torch.get_num_threads(),
        "losses": losses,
        "forms": {
            form: {
                "seconds": round(wall, 3),
                "cpu_seconds": round(cpu, 3),
                "speed_up": round(plain[0] / wall, 3),
                "cpu_speed_up": round(plain[1] / cpu, 3),
                "of_the_ratio": round(plain[0] / wall / group.ratio, 3),
                "cpu_of_the_ratio": round(plain[1] / cpu / group.ratio, 3),
            }
            for form, (wall, cpu) in best.items()
        },
    }


def peak(name: str, form: str) -> float:
    """MiB that a step of one form takes above the model, in this process."""
    from trellium.models.attention import let_read_forests

    model = model_of("cpu")
    if form != "separate rows":
        let_read_forests(model)
    tiny = Group(8, 2, 8)
    GROUPS["tiny"] = tiny
    step(model, batch_of(tiny, form))
    batch = batch_of(GROUPS[name], form)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(model, batch)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def in_a_process(*words: str) -> Any:
    """What this script prints last, run by itself."""
    done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(words)}: the run failed, see above")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Run all, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=list(GROUPS), help="packing ratios")
    parser.add_argument("--compiled", action="store_true", help="the forest as compiled graphs as well")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.repeats, options.compiled)))
        return
    if options.peak:
        print(json.dumps(peak(*options.peak)))
        return
    results: dict = {"host": {"python": platform.python_version(), "cores": os.cpu_count()}, "groups": {}}
    flags = [f"--repeats={options.repeats}", *(["--compiled"] if options.compiled else [])]
    print(
        f"{'ratio':>6} {'form':<18} {'tokens':>7} {'s':>8} {'CPU s':>8} {'speed-up':>9} {'÷ ratio':>8} {'CPU ÷ ratio':>12} {'peak MiB':>9}"
    )
    for name in options.groups:
        found = in_a_process("--measure", name, *flags)
        results["groups"][name] = found
        for form, one in found["forms"].items():
            one["peak_mib"] = round(in_a_process("--peak", name, form), 1) if form in FORMS else None
            memory = f"{one['peak_mib']:.0f}" if one["peak_mib"] is not None else "-"
            print(
                f"{found['ratio']:>6.2f} {form:<18} {found['tokens'][form]:>7} {one['seconds']:>8.2f} {one['cpu_seconds']:>8.2f} {one['speed_up']:>9.2f} "
                f"{one['of_the_ratio']:>8.2f} {one['cpu_of_the_ratio']:>12.2f} {memory:>9}",
                flush=True,
            )
        spread = max(found["losses"].values()) - min(found["losses"].values())
        print(f"       losses within {spread:.1e}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(f"Written to {options.json}")


if __name__ == "__main__":
    main()
