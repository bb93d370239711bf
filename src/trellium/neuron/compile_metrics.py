"""What was compiled for `neuron` in this process: `torch.neuron.get_dynamo_metrics()`.

Counters only; `trellium.monitor.ledger` has a record of each compilation, for any backend.
"""

from __future__ import annotations

import dataclasses
import threading


@dataclasses.dataclass
class _Counters:
    graphs: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    cache_bypasses: int = 0
    corrupt_entries: int = 0
    failures: int = 0
    fallbacks: int = 0
    compile_seconds: float = 0.0
    load_seconds: float = 0.0


_lock = threading.Lock()
_counters = _Counters()


def count(**more: float) -> None:
    """Add to counters by name."""
    with _lock:
        for name, value in more.items():
            setattr(_counters, name, getattr(_counters, name) + value)


def count_graph(outcome: str, seconds: float) -> None:
    """Count a graph made ready.

    Args:
        outcome: "hit" of the cache, "miss", "bypass" if it cannot be cached, "corrupt" if its entry could not be used.
        seconds: time in the backend.
    """
    if outcome == "hit":
        count(graphs=1, cache_hits=1, load_seconds=seconds)
    elif outcome == "bypass":
        count(graphs=1, cache_bypasses=1, compile_seconds=seconds)
    else:
        count(graphs=1, cache_misses=1, compile_seconds=seconds)


def get_dynamo_metrics() -> dict[str, float]:
    """Counts since the process began or the last reset.

    Returns:
        `graphs`: Dynamo graphs made ready (a forward with its backward is one), of which `cache_hits` came from the persistent cache,
        `cache_misses` were compiled and stored, and `cache_bypasses` were compiled and cannot be stored. `corrupt_entries`: cache
        entries found damaged and removed. `failures`: graphs that did not compile; `fallbacks`: those of them that run
        operator by operator. `compile_seconds` and `load_seconds`: time in the backend for graphs compiled and graphs loaded.
    """
    with _lock:
        return dataclasses.asdict(_counters)


def reset_dynamo_metrics() -> None:
    """Set all counts to zero."""
    global _counters
    with _lock:
        _counters = _Counters()
