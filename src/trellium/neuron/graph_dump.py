"""The graphs that are compiled, as text, for whoever looks for what was in one.

By the vendor's variable and folders: where TORCH_NEURONX_DEBUG_DIR names a folder, each graph that is compiled leaves a file in
`fx_graphs/proc_{rank}` under it, one for what Dynamo saw and one for each of the forward and the backward that were compiled: readable code with
shapes and dtypes. A graph found in the cache leaves only Dynamo's. The vendor's other folders (StableHLO, NEFF) have no counterpart here.
"""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

from torch import fx

_numbers = itertools.count()


def dump(graph: fx.GraphModule, what: str, name: str | None = None) -> Path | None:
    """Write a graph where TORCH_NEURONX_DEBUG_DIR says; nothing is written where it says nothing.

    Args:
        graph: with or without metadata.
        what: "dynamo", "forward", ...: the end of the file's name.
        name: the graph's own, of `options={"model_name": ...}`.

    Returns:
        The file.
    """
    named = os.environ.get("TORCH_NEURONX_DEBUG_DIR", "").strip()
    if not named:
        return None
    folder = Path(named).expanduser() / "fx_graphs" / f"proc_{os.environ.get('RANK', '0')}"
    folder.mkdir(parents=True, exist_ok=True)
    readable = re.sub(r"[^\w.-]+", "_", name or "graph")
    path = folder / f"{readable}_{os.getpid()}_{next(_numbers):04d}_{what}.txt"
    path.write_text(graph.print_readable(print_output=False) + "\n")
    return path
