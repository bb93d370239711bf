"""What distilling without logits costs: time beside the bare products it cannot do without, and memory.

Forward and backward of one divergence of a student from a teacher, with gradients of the student's hidden states and head, by every way in turn
(`measure`). The floor is four products and nothing else: both models' logits and the student's two gradients, in tiles of 1024 x 1024 that are
overwritten; as `torch.mm` and as oneDNN's products (`trellium.ops.head_products`). TRL 1.16's is the function behind its DistillationTrainer. Memory is
less the student's head's gradient.

    python benchmarks/divergence.py [--quick] [--json benchmarks/results/divergence.json]

Takes about six minutes on two cores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import measure
import torch
import torch.nn.functional as F
from head import add_by_torch, multiply_by_torch
from torch import Tensor

from trellium.ops import head_products
from trellium.ops.divergence import divergence

RESULTS = Path(__file__).parent / "results" / "divergence.json"
PROBLEMS = [(1024, 576, 960, 49_152), (256, 896, 1536, 151_936)]
BETAS = {"forward KL": 0.0, "reverse KL": 1.0, "JSD": 0.5}


class Models(NamedTuple):
    """`[E, H]` and `[V, H]` of a student, `[E, H']` and `[V, H']` of a teacher."""

    hidden: Tensor
    weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor


Way = Callable[[Models], None]


def problem(edges: int, width: int, teacher_width: int, vocabulary: int) -> Models:
    """Two models whose logits are of the size trained models' are."""
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for size in (width, teacher_width):
        tensors.append(torch.randn(edges, size, generator=generator))
        tensors.append(torch.randn(vocabulary, size, generator=generator).mul_(3 * size**-0.5))
    return Models(tensors[0].requires_grad_(), tensors[1].requires_grad_(), *tensors[2:])


def products(*, of_the_head: bool) -> Way:
    multiply = head_products.multiply if of_the_head else multiply_by_torch
    add = head_products.add_product if of_the_head else add_by_torch

    def run(models: Models) -> None:
        grad_hidden, grad_weight = torch.zeros_like(models.hidden), torch.zeros_like(models.weight)
        tile = models.hidden.new_empty(1024 * 1024)
        with torch.no_grad():
            for tokens in torch.arange(len(models.weight)).split(1024):
                columns = slice(int(tokens[0]), int(tokens[-1]) + 1)
                head, teacher_head = models.weight[columns], models.teacher_weight[columns]
                z = tile[: len(models.hidden) * len(tokens)].view(-1, len(tokens))
                multiply(models.teacher_hidden, teacher_head.t(), z)
                multiply(models.hidden, head.t(), z)
                add(grad_hidden, z, head)
                add(grad_weight[columns], z.t(), models.hidden)

    return run


def ours(beta: float) -> Way:
    def run(models: Models) -> None:
        divergence(*models, beta=beta)[0].backward()

    return run


def full_logits(beta: float) -> Way:
    def run(models: Models) -> None:
        log_s = F.linear(models.hidden, models.weight).log_softmax(-1)
        log_t = F.linear(models.teacher_hidden, models.teacher_weight).log_softmax(-1)
        if beta == 0:
            value = F.kl_div(log_s, log_t, reduction="sum", log_target=True)
        elif beta == 1:
            value = F.kl_div(log_t, log_s, reduction="sum", log_target=True)
        else:
            log_m = torch.log(beta * log_t.exp() + (1 - beta) * log_s.exp())
            of_teacher, of_student = (F.kl_div(log_m, x, reduction="sum", log_target=True) for x in (log_t, log_s))
            value = beta * of_teacher + (1 - beta) * of_student
        value.backward()

    return run


def trl(beta: float) -> Way:
    def run(models: Models) -> None:
        from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

        student, teacher = (models.hidden, models.weight, None), (models.teacher_hidden, models.teacher_weight, None)
        ChunkedDivergenceFunction.apply(*student, *teacher, beta)[0].sum().backward()

    return run


WAYS: dict[str, Way] = {
    "four products": products(of_the_head=False),
    "four products by oneDNN": products(of_the_head=True),
    **{f"{name}": ours(beta) for name, beta in BETAS.items()},
    **{f"TRL 1.16, {name}": trl(beta) for name, beta in BETAS.items()},
    **{f"full logits, {name}": full_logits(beta) for name, beta in BETAS.items()},
}


def rows_of(sizes: tuple[int, int, int, int], *, rounds: int) -> list[dict]:
    models = problem(*sizes)

    def once(way: Way) -> None:
        models.hidden.grad = models.weight.grad = None
        way(models)

    for way in WAYS.values():  # what is loaded and set up once
        way(problem(16, 64, 64, 2048))
    seconds = measure.best_seconds({name: partial(once, way) for name, way in WAYS.items()}, rounds=rounds)
    rows = []
    for name, (busy, clock) in seconds.items():
        row = {"way": name, "processor_seconds": round(busy, 3), "clock_seconds": round(clock, 3)}
        row["of_four_products"] = round(busy / seconds["four products"][0], 3)
        row["of_four_by_onednn"] = round(busy / seconds["four products by oneDNN"][0], 3)
        if "products" not in name:
            grown = measure.bytes_grown_elsewhere(__file__, name, sizes)
            row["mib_beside_weight_gradient"] = round((grown - models.weight.nbytes) / 2**20, 1)
        if name in BETAS:
            row["trl_takes"] = round(seconds[f"TRL 1.16, {name}"][0] / busy, 2)
        rows.append(row)
    return rows


def show(sizes: tuple[int, int, int, int], rows: list[dict]) -> None:
    print(f"\nE {sizes[0]} x H {sizes[1]} (teacher {sizes[2]}) x V {sizes[3]}, float32")
    print(f"{'way':<28}{'busy s':>9}{'clock s':>9}{'of 4 mm':>9}{'4 oneDNN':>10}{'MiB':>9}{'TRL takes':>11}")
    for row in rows:
        print(
            f"{row['way']:<28}{row['processor_seconds']:>9.3f}{row['clock_seconds']:>9.3f}{row['of_four_products']:>9.2f}"
            f"{row['of_four_by_onednn']:>10.2f}{row.get('mib_beside_weight_gradient', ''):>9}{row.get('trl_takes', ''):>11}"
        )


def main() -> int:
    arguments = measure.options("What distilling without logits costs.", RESULTS, ways=WAYS)
    if arguments.memory_of:
        way = WAYS[arguments.memory_of]
        way(problem(16, 64, 64, 2048))
        edges, width, teacher_width, vocabulary = map(int, arguments.sizes)
        models = problem(edges, width, teacher_width, vocabulary)
        print(measure.bytes_grown(lambda: way(models)))
        return 0
    result: dict = {**measure.environment(), "target": {"of_four_products": 1.1}, "problems": []}
    for sizes in [(256, 128, 192, 8192)] if arguments.quick else PROBLEMS:
        rows = rows_of(sizes, rounds=1 if arguments.quick else 2)
        show(sizes, rows)
        names = ("edges", "width", "teacher_width", "vocabulary")
        result["problems"].append({**dict(zip(names, sizes, strict=True)), "ways": rows})
        measure.write(result, arguments.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
