"""What tokens shared are worth: forward and backward of a small Qwen3 over groups of sequences, each group laid out in several ways.

- `separate`: a row a sequence, scaled-dot-product attention, causal: what synchronous trainers do. `packed`: the sequences behind one another in one row,
  nothing shared, by Trellium's attention. `forest`: each shared token once. The compiled ones run on the emulated device, block by block; those with `oneDNN`
  multiply in their linear layers by it, as a trainer's model does on the CPU (`trellium.models.linears`). The others multiply there as PyTorch does.
- All sequences of a group are equally long: rows have no padding, every way does the same work, and what padding costs is counted nowhere. Causal attention
  without a mask is the fastest that separate rows can have; a trainer that pads passes a mask and is slower.
- Completions are trained, prompts are not, so every way scores the same edges; of 256 tokens, which costs next to nothing: what scores cost is measured by
  `benchmarks/head.py`.
- The packing ratio is sequence tokens ÷ forest tokens. Attention shares less than that: completions that share a prompt each ask all of its tokens. Work
  falls by less than the ratio, then, and by how much depends on attention's share of it: at 2,548 tokens 5 % in a Qwen3-8B and 4 % in a Qwen3-14B. The model
  `proportioned` has 4 % in two layers of 768; in six layers of 384, `narrow`, it is 36 %. `of work` is what the operations of the layers and of attention allow.
- A forest can be faster than that: the system maps large tensors anew each time, a page fault for every 4 KiB, and a forest's are smaller. At 3.37 separate
  rows take two million faults a step, 3.5 of 21.7 seconds, and the forest a fifth of that. `user` is the speed-up without the system's seconds.

Every way in turn, round by round in one process; speed-ups are of the seconds that processors were busy, summed over threads, so that what else the machine
does counts little; the best round counts, and the clock's seconds stand beside it. Speed-ups are over `separate`; a way that is compiled or multiplies by oneDNN is
also compared with separate rows that do (`of alike`).
Memory is what the resident set grew by at its highest during a step, gradients of the weights there before; each in a process of its own.
Published for TRL 1.16's asynchronous GRPO: 1.90 times at a ratio of 2.29, 2.97 at 3.37 (0.83 and 0.88 of the ratio), on CUDA with FlashAttention-3.

    python benchmarks/tree.py [--models proportioned] [--layers 2] [--rounds 3] [--cases 2.29 3.37] [--json benchmarks/results/tree.json]

Takes some forty minutes on two quiet cores, and 6 GB for the separate rows; `--layers 2` half of both.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait are not busy

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from trellium.data.sequence import Sequence
from trellium.forest.batch import ForestBatch
from trellium.forest.layout import chains, trees
from trellium.models.attention import let_read_forests
from trellium.models.blocks import compile_blocks
from trellium.models.linears import use_host_products
from trellium.models.scoring import install_scores

RESULTS = Path(__file__).parent / "results" / "tree.json"
VOCABULARY = 256
HEAD = 64
ROWS = 8
"""Separate rows of a call, TRL's default for a device; more are accumulated."""
MEMORY_CASE = "3.37"
TARGETS = {"1": 0.99, "2.29": 0.97, "3.37": 0.97, "3.37, ragged": 0.97, "8": 0.95}
WAYS = (
    "separate",
    "packed",
    "forest",
    "separate, compiled",
    "forest, compiled",
    "separate, oneDNN",
    "forest, oneDNN",
)
PUBLISHED = {"2.29": 1.90, "3.37": 2.97, "source": "TRL 1.16, asynchronous GRPO, CUDA, FlashAttention-3"}


@dataclass(frozen=True)
class Case:
    """`shared[i]` is how many of its first tokens sequence `i` has from the one before it; all are `length` tokens long."""

    length: int
    shared: tuple[int, ...]

    def sequences(self) -> list[Sequence]:
        """Random tokens; those that are a sequence's own are trained."""
        random = np.random.default_rng(0)
        made: list[Sequence] = []
        for shared in self.shared:
            tokens = random.integers(0, VOCABULARY, self.length)
            if made:
                before = made[-1].input_ids
                tokens[:shared] = before[:shared]
                tokens[shared] = (before[shared] + 1) % VOCABULARY  # no more is shared by accident
            place = np.arange(self.length)
            made.append(Sequence(tokens, place >= max(shared or self.shared[-1], 1)))
        return made


CASES = {
    "1": Case(2048, (0,) * 3),
    "2.29": Case(2727, (0,) + (2048,) * 3),
    "3.37": Case(2548, (0,) + (2048,) * 7),
    # branches of branches, no two leaves alike
    "3.37, ragged": Case(2548, (0, 2180, 1730, 2310, 1950, 2420, 1580, 2168)),
    "8": Case(2194, (0,) + (2048,) * 15),
}


@dataclass(frozen=True)
class Model:
    """Sizes of a Qwen3 with heads of 64."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_heads: int

    def make(self, way: str) -> PreTrainedModel:
        """The same weights for every way."""
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=self.hidden, intermediate_size=self.intermediate, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.key_heads, head_dim=HEAD, max_position_embeddings=8192,
            tie_word_embeddings=True,
        )  # fmt: skip
        model = install_scores(Qwen3ForCausalLM(config))
        if not way.startswith("separate"):
            let_read_forests(model)
        if way.endswith("compiled"):
            model.to("neuron")
            compile_blocks(model, backend="neuron", dynamic=False)
        if way.endswith("oneDNN"):
            use_host_products(model)
        return model

    def operations(self, case: Case, *, shared: bool) -> float:
        """Of a layer's products in a forward pass: with its weights for every token, and with keys and values for every pair of a token and one it sees."""
        own = [case.length - (common if shared else 0) for common in case.shared]
        pairs = sum(tokens * (case.length - tokens) + tokens * (tokens + 1) / 2 for tokens in own)
        weights = 2 * self.hidden * HEAD * (self.heads + self.key_heads) + 3 * self.hidden * self.intermediate
        return 2 * weights * sum(own) + 4 * self.heads * HEAD * pairs


MODELS = {"proportioned": Model(2, 768, 3072, 2, 1), "narrow": Model(6, 384, 1152, 6, 2)}


def batches_of(sequences: list[Sequence], way: str) -> list[ForestBatch]:
    """A group as the calls of one step."""
    if way.startswith("separate"):
        parts = [sequences[begin : begin + ROWS] for begin in range(0, len(sequences), ROWS)]
        return [chains(part) for part in parts]
    apart = list(range(len(sequences))) if way == "packed" else None
    return [trees(sequences, [0] * len(sequences), groups=apart)]


def step_of(model: PreTrainedModel, batches: list[ForestBatch]) -> Callable[[], float]:
    """Forward and backward of a group; gives the loss, and adds to the gradients."""
    calls = [{name: tensor.to(model.device) for name, tensor in batch.tensors().items()} for batch in batches]

    def step() -> float:
        total = 0.0
        for call in calls:
            loss = model(**call, fused_loss="nll", score_outputs=()).loss_sum
            loss.backward()
            total += loss.item()
        return total

    return step


def measure_time(case: Case, model: Model, rounds: int) -> dict[str, dict[str, float]]:
    """Best seconds of each way: of its processors, of those without the system's, and by the clock."""
    sequences = case.sequences()
    steps = {way: step_of(model.make(way), batches_of(sequences, way)) for way in WAYS}
    losses = {way: step() for way, step in steps.items()}  # what is compiled and allocated once
    if not np.allclose(list(losses.values()), losses["separate"], rtol=1e-5):
        sys.exit(f"the ways do not compute the same loss: {losses}")
    best = {way: dict.fromkeys(_seconds(), float("inf")) for way in WAYS}
    for turn in range(rounds):
        for way in WAYS if turn % 2 == 0 else reversed(WAYS):
            before = _seconds()
            steps[way]()
            best[way] = {kind: min(best[way][kind], now - before[kind]) for kind, now in _seconds().items()}
    return best


def _seconds() -> dict[str, float]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {"busy": time.process_time(), "user": used.ru_utime, "clock": time.perf_counter()}


def _resident(field: str) -> int:
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]


def print_memory(way: str, sizes: Model) -> None:
    """In a process of its own: by how many bytes the resident set grew at its highest."""
    model = sizes.make(way)
    sequences = CASES[MEMORY_CASE].sequences()
    short = [Sequence(sequence.input_ids[:64], sequence.trained[-64:]) for sequence in sequences[:1]]
    # What is loaded and allocated once: the libraries, the gradients, and for a compiled way its graph, which holds for one shape.
    step = step_of(model, batches_of(sequences, way))
    (step if way.endswith("compiled") else step_of(model, batches_of(short, way)))()
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    step()
    print(_resident("VmHWM") - before)


def measure_memory(way: str, name: str, layers: int) -> float:
    """MiB above weights, gradients and batch."""
    arguments = [sys.executable, __file__, "--memory-of", way, "--models", name, "--layers", str(layers)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # freed tensors leave the resident set
    done = subprocess.run(arguments, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return int(done.stdout) / 2**20


def measure(name: str, model: Model, rounds: int) -> dict:
    """One case: its ratio, and what every way takes."""
    case = CASES[name]
    tokens = case.length * len(case.shared)
    ratio = tokens / (tokens - sum(case.shared))
    seconds = measure_time(case, model, rounds)
    ways = {}
    for way in WAYS:
        shares = ratio if way.startswith("forest") else 1.0
        speed_up = seconds["separate"]["busy"] / seconds[way]["busy"]
        row = {
            "busy_seconds": round(seconds[way]["busy"], 3),
            "clock_seconds": round(seconds[way]["clock"], 3),
            "speed_up": round(speed_up, 3),
            "speed_up_over_ratio": round(speed_up / shares, 3),
            "user_speed_up": round(seconds["separate"]["user"] / seconds[way]["user"], 3),
            "clock_speed_up": round(seconds["separate"]["clock"] / seconds[way]["clock"], 3),
        }
        if "," in way:
            alike = "separate," + way.partition(",")[2]
            row["over_separate_alike"] = round(seconds[alike]["busy"] / seconds[way]["busy"], 3)
        ways[way] = row
    return {
        "ratio": round(ratio, 3),
        "work_ratio": round(model.operations(case, shared=False) / model.operations(case, shared=True), 3),
        "sequences": len(case.shared),
        "length": case.length,
        "forest_tokens": tokens - sum(case.shared),
        "target_of_ratio": TARGETS[name],
        "ways": ways,
    }


def show(title: str, case: dict) -> None:
    print(
        f"\n{title}: {case['sequences']} sequences of {case['length']} tokens in {case['forest_tokens']}, ratio {case['ratio']}, "
        f"of work {case['work_ratio']}; target {case['target_of_ratio']} of the ratio"
    )
    print(
        f"{'way':<22}{'busy s':>9}{'clock s':>9}{'speed-up':>10}{'of ratio':>10}{'user':>10}{'by clock':>10}{'of alike':>10}"
    )
    for way, row in case["ways"].items():
        print(
            f"{way:<22}{row['busy_seconds']:>9.2f}{row['clock_seconds']:>9.2f}{row['speed_up']:>10.2f}{row['speed_up_over_ratio']:>10.3f}"
            f"{row['user_speed_up']:>10.2f}{row['clock_speed_up']:>10.2f}{row.get('over_separate_alike', ''):>10}",
            flush=True,
        )


def main() -> None:
    """Run all, print the tables, write the JSON as far as it was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--layers", type=int, help="of every model, instead of its own; at least 2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--memory-of", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    models = {name: replace(MODELS[name], layers=options.layers or MODELS[name].layers) for name in options.models}
    if options.memory_of:
        print_memory(options.memory_of, models[options.models[0]])
        return
    result: dict = {
        "host": {"python": platform.python_version(), "torch": torch.__version__, "threads": torch.get_num_threads()},
        "published": PUBLISHED,
        "models": {name: {"sizes": asdict(model), "cases": {}} for name, model in models.items()},
    }
    for name, model in models.items():
        for case in options.cases:
            found = result["models"][name]["cases"][case] = measure(case, model, options.rounds)
            show(f"{name}, {case}", found)
            write(result, options.json)
        if MEMORY_CASE in options.cases:
            memory = {way: round(measure_memory(way, name, model.layers), 1) for way in WAYS if "oneDNN" not in way}
            result["models"][name]["peak_mib"] = memory
            show_memory(memory)
            write(result, options.json)


def show_memory(memory: dict[str, float]) -> None:
    print(f"\nMiB above weights and gradients at {MEMORY_CASE}:")
    for way, mib in memory.items():
        print(f"{way:<22}{mib:>10.1f}   {memory['separate'] / mib:.2f} times less than separate rows")


def write(result: dict, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
