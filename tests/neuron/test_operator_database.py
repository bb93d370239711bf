"""torch's operator database gives the CPU's results and gradients on `neuron`.

Fifty common operators with two samples each run always; every entry with every sample, in float32, bfloat16 and complex64, with `-m slow`: three to five minutes. What is not bit-equal has to be
exactly what docs/operators.md lists, with its reason.
"""

from __future__ import annotations

import collections
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from tests.neuron.operator_database import Outcome, compare_values, read

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "operators.md"
LEAST_EQUAL = 0.98
DTYPES = ("float32", "bfloat16", "complex64")

on_neuron = pytest.mark.skipif(
    not hasattr(torch, "neuron"), reason="the neuron extension is not built: see `trellium env`"
)

COMMON = (
    "add",
    "mul",
    "div.no_rounding_mode",
    "sub",
    "pow",
    "exp",
    "log",
    "sqrt",
    "rsqrt",
    "sigmoid",
    "tanh",
    "clamp",
    "where",
    "masked_fill",
    "sum",
    "mean",
    "var",
    "argmax",
    "topk",
    "sort",
    "cumsum",
    "gather",
    "scatter_add",
    "index_select",
    "index_add",
    "cat",
    "stack",
    "split",
    "chunk",
    "expand",
    "permute",
    "matmul",
    "bmm",
    "addmm",
    "einsum",
    "softmax",
    "log_softmax",
    "nn.functional.linear",
    "nn.functional.embedding",
    "nn.functional.layer_norm",
    "nn.functional.rms_norm",
    "nn.functional.silu",
    "nn.functional.gelu",
    "nn.functional.cross_entropy",
    "nn.functional.scaled_dot_product_attention",
    "nn.functional.dropout",
    "tensor_split",
    "empty_like",
    "randn_like",
)


@on_neuron
def test_common_operators_give_the_results_and_gradients_of_the_cpu(tmp_path: Path) -> None:
    outcomes = _sweep(tmp_path / "outcomes.jsonl", "--samples", "2", "--only", *COMMON)
    assert [outcome.name for outcome in outcomes] == list(COMMON)
    assert all(outcome.verdict == "equal" and outcome.samples for outcome in outcomes), _lines(outcomes)


def test_a_device_is_seen_to_differ_when_it_does() -> None:
    right, wrong = torch.tensor([1.0, 2.0, float("nan")]), torch.tensor([1.0, 2.5, float("nan")])
    assert compare_values(right, right.clone(), values=True).verdict == "equal"
    assert compare_values(right, right + 1e-6, values=True).verdict == "close"
    assert compare_values(right, wrong, values=True).verdict == "differs"
    assert compare_values(right, right.double(), values=True).verdict == "differs"
    assert compare_values(right.repeat(2, 1), right.repeat(2, 1).t().contiguous().t(), values=True).verdict == "differs"
    assert compare_values(right, wrong, values=False).verdict == "equal"


@pytest.mark.slow
@on_neuron
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_operator_database_gives_the_results_and_gradients_of_the_cpu(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only = [] if dtype == "float32" else ["--dtype", dtype]
    outcomes = _sweep(tmp_path / "outcomes.jsonl", "--samples", "100000", *only)
    counts = collections.Counter(outcome.verdict for outcome in outcomes)
    compared = [outcome for outcome in outcomes if outcome.verdict != "excluded"]
    share = counts["equal"] / len(compared)
    with capsys.disabled():
        print(
            f"\noperators, {dtype}: {len(outcomes)} entries, {counts['excluded']} that the CPU cannot run; "
            f"{sum(o.samples for o in compared)} calls, {sum(o.backward for o in compared)} backward, "
            f"{sum(o.variants for o in compared)} in place or out; "
            f"{counts['equal']} of {len(compared)} entries equal bit for bit ({share:.2%}), "
            + ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("close", "differs", "fails", "crashes"))
        )
    assert share >= LEAST_EQUAL
    unequal = {outcome.name: outcome for outcome in compared if outcome.verdict != "equal"}
    listed = {name: verdict for name, dtypes, verdict, _ in _rows() if dtype in dtypes}
    unknown = [outcome for outcome in unequal.values() if listed.get(outcome.name) != outcome.verdict]
    assert not unknown, _lines(unknown)
    # What is only close may come out equal: on the CPU, too, it changes from call to call.
    assert not {name for name, verdict in listed.items() if verdict != "close"} - unequal.keys(), (
        "listed, but equal now"
    )


def test_the_document_gives_a_reason_for_every_operator_it_lists() -> None:
    rows = _rows()
    assert rows
    for name, dtypes, verdict, reason in rows:
        assert verdict in {"close", "differs", "fails"}, name
        assert set(dtypes) <= set(DTYPES), name
        assert len(reason) > 20, name


def _rows() -> list[tuple[str, list[str], str, str]]:
    """The entries that docs/operators.md lists: name, dtypes, verdict, reason."""
    text = DOCUMENT.read_text(encoding="utf-8")
    found = re.findall(r"^\| `([^`]+)` \| ([\w, ]+) \| (\w+) \| (.+?) \|$", text, flags=re.MULTILINE)
    return [(name, dtypes.split(", "), verdict, reason) for name, dtypes, verdict, reason in found]


def _lines(outcomes: Iterable[Outcome]) -> str:
    return "\n".join(f"{o.name}: {o.verdict}: {o.detail}" for o in outcomes if o.verdict != "equal")


def _sweep(path: Path, *options: str) -> list[Outcome]:
    """The operator database in a process of its own; an entry that kills it is written down as a crash, and the sweep goes on behind it."""
    command = [sys.executable, "-m", "tests.neuron.operator_database", "--out", str(path), *options]
    crashed: list[str] = []
    while (process := subprocess.run([*command, *crashed], cwd=ROOT, capture_output=True, text=True)).returncode:
        assert process.returncode < 0, process.stderr[-2000:]
        crashed = ["--crashed", f"signal {-process.returncode}"]
    return list(read(path))
