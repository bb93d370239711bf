"""What scoring without logits costs: time beside the bare products it cannot do without, and memory.

Forward and backward of the same loss, with gradients of the hidden states and of the head, by every way in turn, round by round in one process. Time
is that of the processors this process kept busy, summed over its threads, so that what else the machine does counts little; the best of the rounds is
taken, and the clock's seconds stand beside it. The floors are the three (or four) `torch.mm` of the problem and nothing else, in tiles of 1024 x 1024 that
are overwritten, so that they too hold no logits. Memory is what the resident set grew by at its highest, less the head's gradient: the gradient of the
hidden states is in it, and so is what the products' library packs; it is measured in a process of its own for each way.

    python benchmarks/head.py [--quick] [--json benchmarks/results/head.json]

Takes about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait are not busy

import torch
import torch.nn.functional as F
from torch import Tensor

from trellium.ops.head import token_scores, weighted_nll

RESULTS = Path(__file__).parent / "results" / "head.json"
PROBLEMS = [(2048, 576, 49_152, "float32"), (256, 896, 151_936, "float32"), (64, 576, 49_152, "bfloat16")]
MEMORY_PROBLEM = (8192, 896, 151_936, "float32")
TRAINED = 0.3  # of the positions, where most are not
TRL_CHUNK = 32_768
Way = Callable[[Tensor, Tensor, Tensor], None]


def problem(edges: int, width: int, vocabulary: int, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a head and targets, whose logits are of the size a trained model's are."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(edges, width, generator=generator).to(getattr(torch, dtype))
    weight = torch.randn(vocabulary, width, generator=generator).mul_(3 * width**-0.5).to(getattr(torch, dtype))
    target = torch.randint(0, vocabulary, (edges,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), target


def products(count: int) -> Way:
    """The bare products: logits once or twice, and the two gradients."""

    def run(hidden: Tensor, weight: Tensor, target: Tensor) -> None:
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        buffer = hidden.new_empty(1024 * 1024)
        with torch.no_grad():
            for column in range(0, weight.shape[0], 1024):
                head = weight[column : column + 1024]
                for row in range(0, hidden.shape[0], 1024):
                    rows = hidden[row : row + 1024]
                    tile = buffer[: len(rows) * len(head)].view(len(rows), len(head))
                    for _ in range(count - 2):
                        torch.mm(rows, head.t(), out=tile)
                    grad_hidden[row : row + 1024].addmm_(tile, head)
                    grad_weight[column : column + 1024].addmm_(tile.t(), rows)

    return run


def full_logits(hidden: Tensor, weight: Tensor, target: Tensor) -> None:
    F.cross_entropy(F.linear(hidden, weight).float(), target, reduction="sum").backward()


def torch_chunked(hidden: Tensor, weight: Tensor, target: Tensor) -> None:
    options = torch.nn.LinearCrossEntropyOptions()
    F.linear_cross_entropy(hidden, weight, target, reduction="sum", options=options).backward()


def trl(hidden: Tensor, weight: Tensor, target: Tensor) -> None:
    from trl.kernels import ChunkedLogProbFunction

    logprob = ChunkedLogProbFunction.apply(hidden, weight, None, target, 1.0, TRL_CHUNK, None, 1.0, ())[0]
    (-logprob.sum()).backward()


def supervised(hidden: Tensor, weight: Tensor, target: Tensor) -> None:
    weighted_nll(hidden, weight, target, torch.ones(len(target)))[0].backward()


def policy(hidden: Tensor, weight: Tensor, target: Tensor) -> None:
    scores = token_scores(hidden, weight, target)
    assert scores.logprob is not None
    (-scores.logprob.sum()).backward()


def policy_with_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> None:
    scores = token_scores(hidden, weight, target, outputs=("logprob", "entropy"))
    assert scores.logprob is not None
    (-scores.logprob.sum()).backward()


def partly(way: Way) -> Way:
    """`way` over the trained positions only."""

    def run(hidden: Tensor, weight: Tensor, target: Tensor) -> None:
        trained = torch.arange(int(TRAINED * len(target)))
        way(hidden.index_select(0, trained), weight, target[trained])

    return run


WAYS: dict[str, Way] = {
    "three products": products(3),
    "four products": products(4),
    "weighted_nll": supervised,
    "token_scores": policy,
    "token_scores + entropy": policy_with_entropy,
    "TRL 1.16 chunked": trl,
    "torch linear_cross_entropy": torch_chunked,
    "full logits": full_logits,
    "weighted_nll, 30 % trained": partly(supervised),
    "token_scores, 30 % trained": partly(policy),
}


def measure_time(sizes: tuple[int, int, int, str], *, rounds: int) -> dict[str, tuple[float, float]]:
    """Best seconds of each way: of its processors, and by the clock."""
    hidden, weight, target = problem(*sizes)
    best = dict.fromkeys(WAYS, (float("inf"), float("inf")))
    for way in WAYS.values():  # what is loaded and set up once
        way(*problem(16, 64, 2048, sizes[3]))
    for turn in range(rounds):
        for name in WAYS if turn % 2 == 0 else reversed(WAYS):
            hidden.grad = weight.grad = None
            busy, begin = time.process_time(), time.perf_counter()
            WAYS[name](hidden, weight, target)
            taken = (time.process_time() - busy, time.perf_counter() - begin)
            best[name] = (min(best[name][0], taken[0]), min(best[name][1], taken[1]))
    return best


def _resident(field: str) -> int:
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]


def print_memory(way: str, sizes: tuple[int, int, int, str]) -> None:
    """In a process of its own: by how many bytes the resident set grew at its highest."""
    WAYS[way](*problem(16, 64, 2048, sizes[3]))  # what is loaded and set up once
    hidden, weight, target = problem(*sizes)
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    WAYS[way](hidden, weight, target)
    print(_resident("VmHWM") - before)


def measure_memory(way: str, sizes: tuple[int, int, int, str]) -> float:
    """MiB above inputs and weights, and less the head's gradient."""
    arguments = [sys.executable, __file__, "--memory-of", way, "--sizes", *map(str, sizes)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # freed tensors leave the resident set
    grown = int(subprocess.run(arguments, check=True, capture_output=True, text=True, env=environment).stdout)
    return (grown - sizes[1] * sizes[2] * getattr(torch, sizes[3]).itemsize) / 2**20


def rows_of(sizes: tuple[int, int, int, str], *, rounds: int, with_memory: bool) -> list[dict]:
    seconds = measure_time(sizes, rounds=rounds)
    rows = []
    for name in WAYS:
        busy = seconds[name][0]
        row = {"way": name, "processor_seconds": round(busy, 3), "clock_seconds": round(seconds[name][1], 3)}
        row["of_three_products"] = round(busy / seconds["three products"][0], 3)
        row["of_four_products"] = round(busy / seconds["four products"][0], 3)
        row["trl_takes"] = round(seconds["TRL 1.16 chunked"][0] / busy, 2)
        if with_memory and "products" not in name and "%" not in name:
            row["mib_beside_weight_gradient"] = round(measure_memory(name, sizes), 1)
        rows.append(row)
    return rows


def show(sizes: tuple[int, int, int, str], rows: list[dict]) -> None:
    print(f"\nE {sizes[0]} x H {sizes[1]} x V {sizes[2]}, {sizes[3]}")
    print(f"{'way':<28}{'busy s':>9}{'clock s':>9}{'of 3 mm':>9}{'of 4 mm':>9}{'TRL takes':>11}{'MiB':>9}")
    for row in rows:
        memory = row.get("mib_beside_weight_gradient", "")
        print(
            f"{row['way']:<28}{row['processor_seconds']:>9.3f}{row['clock_seconds']:>9.3f}{row['of_three_products']:>9.2f}{row['of_four_products']:>9.2f}"
            f"{row['trl_takes']:>10.2f}x{memory:>9}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="What scoring without logits costs.")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the numbers go (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="small problems, one round; noisy")
    parser.add_argument("--memory-of", choices=list(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--sizes", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        edges, width, vocabulary, dtype = arguments.sizes
        print_memory(arguments.memory_of, (int(edges), int(width), int(vocabulary), dtype))
        return 0
    problems = [(256, 128, 8192, "float32")] if arguments.quick else PROBLEMS
    result: dict = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "target": {
            "weighted_nll_of_three": 1.1,
            "token_scores_of_four": 1.1,
            "trl_takes": 1.3,
            "trl_takes_30_percent": 3.0,
            "mib": 64,
        },
        "problems": [],
    }
    for sizes in problems:
        low = sizes[3] != "float32"
        rows = rows_of(sizes, rounds=1 if arguments.quick else 2, with_memory=not low)
        show(sizes, rows)
        names = ("edges", "width", "vocabulary", "dtype")
        result["problems"].append({**dict(zip(names, sizes, strict=True)), "ways": rows})
        write(result, arguments.json)
    if not arguments.quick:
        largest = {way: round(measure_memory(way, MEMORY_PROBLEM), 1) for way in ("weighted_nll", "token_scores")}
        print(f"\nMiB beside the weight's gradient at {MEMORY_PROBLEM}: {largest}")
        result["largest"] = {"sizes": MEMORY_PROBLEM, "mib_beside_weight_gradient": largest}
        write(result, arguments.json)
    return 0


def write(result: dict, path: Path) -> None:
    """As far as it was measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {path}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
