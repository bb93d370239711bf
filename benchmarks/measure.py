"""What the benchmarks here share: the options of a script, seconds taken in turn, memory grown in a process of its own, and the file of results.

Time is that of the processors this process kept busy, summed over its threads, so that what else the machine does counts little; the best of the rounds
is taken, and the clock's seconds stand beside it. Memory is what the resident set grew by at its highest, in a process of its own for each way.
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
from collections.abc import Callable, Iterable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait are not busy

import torch

Seconds = tuple[float, float]
"""Best of the processors, and best by the clock."""


def options(description: str, results: Path, *, ways: Iterable[str] = ()) -> argparse.Namespace:
    """The command line of a benchmark. `ways`: those whose memory is measured, which asks a second process for one of them."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, default=results, help="where the numbers go (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="smaller and fewer; noisy")
    parser.add_argument("--memory-of", choices=list(ways), help=argparse.SUPPRESS)
    parser.add_argument("--sizes", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args()


def best_seconds(calls: dict[str, Callable[[], None]], *, rounds: int) -> dict[str, Seconds]:
    """Every call in turn, round by round, in this order and back."""
    best = dict.fromkeys(calls, (float("inf"), float("inf")))
    for turn in range(rounds):
        for name in calls if turn % 2 == 0 else reversed(calls):
            busy, begin = time.process_time(), time.perf_counter()
            calls[name]()
            taken = (time.process_time() - busy, time.perf_counter() - begin)
            best[name] = (min(best[name][0], taken[0]), min(best[name][1], taken[1]))
    return best


def bytes_grown(call: Callable[[], None]) -> int:
    """By how much the resident set was larger at its highest. What is loaded once should have been."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    call()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]


def bytes_grown_elsewhere(script: str, way: str, sizes: Iterable[object]) -> int:
    """What `script --memory-of way --sizes ...` prints."""
    arguments = [sys.executable, script, "--memory-of", way, "--sizes", *map(str, sizes)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # freed tensors leave the resident set
    return int(subprocess.run(arguments, check=True, capture_output=True, text=True, env=environment).stdout)


def environment() -> dict:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


def write(result: dict, path: Path) -> None:
    """As far as it was measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {path}", flush=True)
