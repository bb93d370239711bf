"""What scoring without logits costs: time beside the bare products it cannot do without, and memory.

Forward and backward of the same loss, with gradients of the hidden states and of the head, by every way in turn (`measure`). The floors are the three
(or four) products of the problem and nothing else, in tiles of 1024 x 1024 that are overwritten, so that they too hold no logits: as `torch.mm`, and as
oneDNN's products, which the head uses on the host (`trellium.ops.head_products`). Memory is less the head's gradient: the gradient of the hidden states
is in it, and so is what the products' library packs.

    python benchmarks/head.py [--quick] [--json benchmarks/results/head.json]

Takes about ten minutes on two cores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import measure
import torch
import torch.nn.functional as F
from torch import Tensor

from trellium.ops import head_products
from trellium.ops.head import token_scores, weighted_nll

RESULTS = Path(__file__).parent / "results" / "head.json"
PROBLEMS = [(2048, 576, 49_152, "float32"), (256, 896, 151_936, "float32"), (64, 576, 49_152, "bfloat16")]
MEMORY_PROBLEM = (8192, 896, 151_936, "float32")
TRAINED = 0.3  # of the positions, where most are not
TRL_CHUNK = 32_768
TARGET = {
    "weighted_nll_of_three": 1.1,
    "token_scores_of_four": 1.1,
    "trl_takes": 1.3,
    "trl_takes_30_percent": 3.0,
    "mib": 64,
}
Way = Callable[[Tensor, Tensor, Tensor], None]


def problem(edges: int, width: int, vocabulary: int, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a head and targets, whose logits are of the size a trained model's are."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(edges, width, generator=generator).to(getattr(torch, dtype))
    weight = torch.randn(vocabulary, width, generator=generator).mul_(3 * width**-0.5).to(getattr(torch, dtype))
    target = torch.randint(0, vocabulary, (edges,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), target


def multiply_by_torch(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    return torch.mm(left, right, out=out)


def add_by_torch(accumulator: Tensor, left: Tensor, right: Tensor) -> None:
    accumulator.addmm_(left, right)


def products(count: int, *, of_the_head: bool = False) -> Way:
    """The bare products: logits once or twice, and the two gradients; as `torch.mm` of the operands' dtype, or as the head makes them, in float32."""
    multiply = head_products.multiply if of_the_head else multiply_by_torch
    add = head_products.add_product if of_the_head else add_by_torch

    def run(hidden: Tensor, weight: Tensor, target: Tensor) -> None:
        dtype = torch.float32 if of_the_head else hidden.dtype
        hidden = hidden.detach().to(dtype)
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight, dtype=dtype)
        buffer = hidden.new_empty(1024 * 1024)
        with torch.no_grad():
            for column in range(0, weight.shape[0], 1024):
                head = weight[column : column + 1024].to(dtype)
                for row in range(0, hidden.shape[0], 1024):
                    rows = hidden[row : row + 1024]
                    tile = buffer[: len(rows) * len(head)].view(len(rows), len(head))
                    for _ in range(count - 2):
                        multiply(rows, head.t(), tile)
                    add(grad_hidden[row : row + 1024], tile, head)
                    add(grad_weight[column : column + 1024], tile.t(), rows)

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


def smoothed(hidden: Tensor, weight: Tensor, target: Tensor) -> None:
    weighted_nll(hidden, weight, target, torch.ones(len(target)), label_smoothing=0.1)[0].backward()


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
    "three products by oneDNN": products(3, of_the_head=True),
    "four products by oneDNN": products(4, of_the_head=True),
    "weighted_nll": supervised,
    "weighted_nll + smoothing": smoothed,
    "token_scores": policy,
    "token_scores + entropy": policy_with_entropy,
    "TRL 1.16 chunked": trl,
    "torch linear_cross_entropy": torch_chunked,
    "full logits": full_logits,
    "weighted_nll, 30 % trained": partly(supervised),
    "token_scores, 30 % trained": partly(policy),
}


def measure_time(sizes: tuple[int, int, int, str], *, rounds: int) -> dict[str, measure.Seconds]:
    """Best seconds of each way."""
    hidden, weight, target = problem(*sizes)

    def once(way: Way) -> None:
        hidden.grad = weight.grad = None
        way(hidden, weight, target)

    for way in WAYS.values():  # what is loaded and set up once
        way(*problem(16, 64, 2048, sizes[3]))
    return measure.best_seconds({name: partial(once, way) for name, way in WAYS.items()}, rounds=rounds)


def print_memory(name: str, sizes: tuple[int, int, int, str]) -> None:
    """In a process of its own."""
    way = WAYS[name]
    way(*problem(16, 64, 2048, sizes[3]))
    tensors = problem(*sizes)
    print(measure.bytes_grown(lambda: way(*tensors)))


def measure_memory(way: str, sizes: tuple[int, int, int, str]) -> float:
    """MiB above inputs and weights, and less the head's gradient."""
    of_gradient = sizes[1] * sizes[2] * getattr(torch, sizes[3]).itemsize
    return (measure.bytes_grown_elsewhere(__file__, way, sizes) - of_gradient) / 2**20


def rows_of(sizes: tuple[int, int, int, str], *, rounds: int, with_memory: bool) -> list[dict]:
    seconds = measure_time(sizes, rounds=rounds)
    rows = []
    for name in WAYS:
        busy = seconds[name][0]
        row = {"way": name, "processor_seconds": round(busy, 3), "clock_seconds": round(seconds[name][1], 3)}
        row["of_three_products"] = round(busy / seconds["three products"][0], 3)
        row["of_four_products"] = round(busy / seconds["four products"][0], 3)
        row["of_three_by_onednn"] = round(busy / seconds["three products by oneDNN"][0], 3)
        row["of_four_by_onednn"] = round(busy / seconds["four products by oneDNN"][0], 3)
        row["trl_takes"] = round(seconds["TRL 1.16 chunked"][0] / busy, 2)
        if with_memory and "products" not in name and "%" not in name:
            row["mib_beside_weight_gradient"] = round(measure_memory(name, sizes), 1)
        rows.append(row)
    return rows


def show(sizes: tuple[int, int, int, str], rows: list[dict]) -> None:
    print(f"\nE {sizes[0]} x H {sizes[1]} x V {sizes[2]}, {sizes[3]}")
    columns = ("busy s", "clock s", "of 3 mm", "of 4 mm", "3 oneDNN", "4 oneDNN", "TRL takes", "MiB")
    print(f"{'way':<28}" + "".join(f"{column:>10}" for column in columns))
    for row in rows:
        way, *numbers = (value for name, value in row.items() if name != "mib_beside_weight_gradient")
        memory = row.get("mib_beside_weight_gradient", "")
        print(f"{way:<28}" + "".join(f"{number:>10.2f}" for number in numbers) + f"{memory:>10}")


def main() -> int:
    arguments = measure.options("What scoring without logits costs.", RESULTS, ways=WAYS)
    if arguments.memory_of:
        edges, width, vocabulary, dtype = arguments.sizes
        print_memory(arguments.memory_of, (int(edges), int(width), int(vocabulary), dtype))
        return 0
    result: dict = {**measure.environment(), "target": TARGET, "problems": []}
    for sizes in [(256, 128, 8192, "float32")] if arguments.quick else PROBLEMS:
        rows = rows_of(sizes, rounds=1 if arguments.quick else 2, with_memory=sizes[3] == "float32")
        show(sizes, rows)
        names = ("edges", "width", "vocabulary", "dtype")
        result["problems"].append({**dict(zip(names, sizes, strict=True)), "ways": rows})
        measure.write(result, arguments.json)
    if not arguments.quick:
        largest = {way: round(measure_memory(way, MEMORY_PROBLEM), 1) for way in ("weighted_nll", "token_scores")}
        print(f"\nMiB beside the weight's gradient at {MEMORY_PROBLEM}: {largest}")
        result["largest"] = {"sizes": MEMORY_PROBLEM, "mib_beside_weight_gradient": largest}
        measure.write(result, arguments.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
