"""What the emulated device costs beyond the CPU it runs on.

Each operator is timed on `cpu` and on `neuron` in turn, block by block, in one process and on one thread; the extra cost is the difference
of the best blocks, so that what else the machine does does not count. A training step of a small Qwen3 is timed in turn too, and given as the
median of the ratios of neighbours, with the losses compared bit by bit. Targets: at most 2 us an operator, at most 1.05 times the step.

    python benchmarks/device_overhead.py [--quick] [--json benchmarks/results/device_overhead.json]

Takes about a minute.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import measure
import torch
import torch.nn.functional as F

RESULTS = Path(__file__).parent / "results" / "device_overhead.json"
TARGET_MICROSECONDS = 2.0
TARGET_RATIO = 1.05


def operators(device: str) -> dict[str, Callable[[], object]]:
    """Small calls, whose cost is mostly dispatch, by name."""
    torch.manual_seed(0)
    a = torch.randn(16, 16, device=device)
    b = torch.randn(16, 16, device=device)
    out = torch.empty(16, 16, device=device)
    bias = torch.randn(16, device=device)
    index = torch.randint(0, 16, (8,), device=device)
    heads = torch.randn(1, 2, 8, 16, device=device)
    many = [torch.randn(4, device=device) for _ in range(50)]
    host = torch.randn(256)
    leaf = torch.randn(16, 16, device=device, requires_grad=True)

    def backward() -> None:
        leaf.grad = None
        (leaf * b).sum().backward()

    return {
        "add": lambda: a + b,
        "add_ (in place)": lambda: out.add_(1.0),
        "add (out=)": lambda: torch.add(a, b, out=out),
        "mul by a number": lambda: a * 2.0,
        "mm": lambda: a @ b,
        "linear with bias": lambda: F.linear(a, b, bias),
        "softmax": lambda: F.softmax(a, -1),
        "layer_norm": lambda: F.layer_norm(a, (16,), bias, bias),
        "silu": lambda: F.silu(a),
        "embedding": lambda: F.embedding(index, a),
        "cat of two": lambda: torch.cat((a, b)),
        "sum and item": lambda: a.sum().item(),
        "attention": lambda: F.scaled_dot_product_attention(heads, heads, heads, is_causal=True),
        "view": lambda: a.view(256),
        "transpose": lambda: a.t(),
        "empty": lambda: torch.empty(16, 16, device=device),
        "zeros": lambda: torch.zeros(16, 16, device=device),
        "copy from the host, 1 KB": lambda: host.to(device, copy=True),
        "foreach_add_ over 50": lambda: torch._foreach_add_(many, 1.0),
        "mul, sum, backward": backward,
    }


# Calls that are several operators; the target is for one. The last: mul, sum, ones_like (empty_like, fill_), expand, mul, detach, and the engine.
OPERATORS_IN_CALL = {"sum and item": 2, "foreach_add_ over 50": 50, "mul, sum, backward": 8}


def microseconds(call: Callable[[], object], times: int) -> float:
    begin = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - begin) / times * 1e6


def measure_operators(*, rounds: int, blocks: int, times: int) -> list[dict]:
    """Per call: best block on each device, in microseconds, and the difference per operator.

    Blocks are short, some hundred microseconds, and an operator's are spread over the whole measurement, so that each side finds moments
    in which the machine does nothing else.
    """
    sides = {device: operators(device) for device in ("cpu", "neuron")}
    names = list(sides["cpu"])
    best = {(name, device): float("inf") for name in names for device in sides}
    for _ in range(rounds):
        for name in names:
            for _ in range(blocks):
                for device in sides:
                    best[name, device] = min(best[name, device], microseconds(sides[device][name], times))
    rows = []
    for name in names:
        count = OPERATORS_IN_CALL.get(name, 1)
        host, device = best[name, "cpu"], best[name, "neuron"]
        rows.append(
            {
                "operator": name,
                "cpu_us": round(host, 3),
                "neuron_us": round(device, 3),
                "operators": count,
                "extra_us": round((device - host) / count, 3),
            }
        )
    return rows


def measure_training_step(*, steps: int) -> dict:
    """A small Qwen3's step on each device, in turn, and the median of the ratios of neighbours."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (4, 128), generator=generator)
    sides = {}
    for device in ("cpu", "neuron"):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config).to(device)
        # One form of the optimizer on both sides; torch would choose the loop on the CPU and foreach on an accelerator.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        sides[device] = (model, optimizer, ids.to(device))
    seconds: dict[str, list[float]] = {device: [] for device in sides}
    losses: dict[str, list[float]] = {device: [] for device in sides}

    def step(device: str) -> None:
        model, optimizer, batch = sides[device]
        begin = time.perf_counter()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[device].append(loss.item())
        seconds[device].append(time.perf_counter() - begin)

    for device in sides:
        step(device)
        seconds[device].clear()
    for turn in range(steps):
        for device in ("cpu", "neuron") if turn % 2 else ("neuron", "cpu"):
            step(device)
    medians = {device: statistics.median(values) for device, values in seconds.items()}
    ratios = [device / host for host, device in zip(seconds["cpu"], seconds["neuron"], strict=True)]
    return {
        "model": "Qwen3, 4 layers of 256, vocabulary 4096, batch 4 x 128, float32, AdamW (foreach)",
        "steps_each": steps,
        "cpu_ms": round(medians["cpu"] * 1e3, 2),
        "neuron_ms": round(medians["neuron"] * 1e3, 2),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_of_best": round(min(seconds["neuron"]) / min(seconds["cpu"]), 4),
        "losses_equal": losses["cpu"] == losses["neuron"],
    }


def show(rows: list[dict], step: dict) -> None:
    width = max(len(row["operator"]) for row in rows)
    print(f"{'call':<{width}}  {'cpu us':>8}  {'neuron us':>9}  {'extra us per operator':>21}")
    for row in rows:
        mark = "" if row["extra_us"] <= TARGET_MICROSECONDS else "  over the target"
        print(
            f"{row['operator']:<{width}}  {row['cpu_us']:>8.2f}  {row['neuron_us']:>9.2f}  {row['extra_us']:>21.2f}{mark}"
        )
    print(f"\ntraining step: {step['model']}")
    print(
        f"cpu {step['cpu_ms']} ms, neuron {step['neuron_ms']} ms: ratio {step['ratio']} (of the best steps {step['ratio_of_best']}), "
        f"target {TARGET_RATIO}; losses {'equal' if step['losses_equal'] else 'DIFFER'}"
    )


def main() -> int:
    arguments = measure.options("What the emulated device costs beyond the CPU it runs on.", RESULTS)
    if not hasattr(torch, "neuron"):
        import trellium.neuron

        print(f"no neuron device: {trellium.neuron.unavailable_reason()}", file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    scale = 10 if arguments.quick else 1
    rows = measure_operators(rounds=20 // scale, blocks=20, times=100)
    step = measure_training_step(steps=40 // scale)
    show(rows, step)
    result = {
        **measure.environment(),
        "operator_tracking": _tracking(),
        "target": {"extra_us": TARGET_MICROSECONDS, "ratio": TARGET_RATIO},
        "operators": rows,
        "training_step": step,
    }
    measure.write(result, arguments.json)
    return 0


def _tracking() -> bool:
    from trellium.neuron import contract

    return contract.is_tracking()


if __name__ == "__main__":
    raise SystemExit(main())
